"""Load LoRA adapters into slots of the device, and track which requests use them.

Laws:
1. A slot is free or contains one adapter.  The adapter is identified by the digest of its files, which stays the same after a restart.
2. A request holds its adapter's slot from its opening until its end, whether its output is read or not.  Until then nothing else is
   loaded into the slot.  The scheduler has then ended the request's sequences, so no plan with a needed result reads the slot.
3. An unloaded adapter accepts no new requests, and its slot is freed when its last request ends.
4. A named adapter (`load_named`) stays registered until it is unloaded.  Its weights may be evicted; the next request reloads them.
5. A request waits if all slots are in use.  Waiting requests are served in order of arrival.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import anyio
import msgspec

from trouper.actors.messages.requests import LoadedAdapter
from trouper.config.adapters import AdapterFiles, LoRAConfig
from trouper.errors import (
    AdaptersInUseError,
    LoRAAdapterNotFoundError,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
)
from trouper.lora import LoRARequest

ReadFiles = Callable[[LoRARequest, str | None], Awaitable[AdapterFiles]]
# Load the files into this slot of the device, and call the last argument once they are loaded.
LoadFiles = Callable[[int, AdapterFiles, Callable[[], object]], Awaitable[None]]


class _SlotUse(msgspec.Struct, eq=False):
    """An adapter in a slot."""

    request: LoRARequest
    adapter: LoadedAdapter
    # Requests that use it.
    num_open: int = 0
    is_pinned: bool = False
    # It takes no new requests.
    is_unloaded: bool = False


class _NamedAdapter(NamedTuple):
    """An adapter that stays registered when its weights are evicted."""

    request: LoRARequest
    # Its folder must be inside this one.
    root: str | None


class Adapters:
    """Load adapters, and count the requests that use them.

    Args:
        config: None if the engine was started without adapters.
        read: reads the files in a thread.
        load: loads the files on the devices of all replicas.  Calls never overlap.
        has_replicas: whether there are several devices, so that a load may succeed on only some of them.
    """

    def __init__(
        self,
        config: LoRAConfig | None,
        read: ReadFiles,
        load: LoadFiles,
        *,
        has_replicas: bool = False,
    ) -> None:
        self._config, self._read, self._load = config, read, load
        self._has_replicas = has_replicas
        num_slots = 0 if config is None else config.num_slots
        self._free = list(range(num_slots, 0, -1))
        self._loaded: dict[
            int, _SlotUse
        ] = {}  # by the caller's number, the least recently used first
        self._named: dict[int, _NamedAdapter] = {}  # by the same number
        self._slots: dict[int, _SlotUse] = {}  # unloaded ones that are in use too
        # Of the files that were loaded last, by the same number; one for each known adapter.
        self._digests: dict[int, bytes] = {}
        self._loading = anyio.Lock()
        self._turns = anyio.Lock()  # of the tasks that wait for a slot; it is fair
        self._freed = anyio.Event()  # one of the slots has become idle or free

    def __repr__(self) -> str:
        return f"<Adapters {len(self._loaded)} loaded, {len(self._free)} slots free>"

    @property
    def requests(self) -> list[LoRARequest]:
        """The adapters that requests may use: all named ones, and others while they are loaded.

        `/v1/models` and `list_loras` return this list.
        """
        known = {number: named.request for number, named in self._named.items()}
        known.update((number, loaded.request) for number, loaded in self._loaded.items())
        return list(known.values())

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def digest_of(self, request: LoRARequest) -> bytes:
        """Return the digest of an adapter's files, which is the same in every process.  Empty for an unknown adapter.

        An answer resumed after a restart uses it to check that the adapter has not changed.
        """
        known = {each.lora_int_id for each in self.requests}
        self._digests = {number: each for number, each in self._digests.items() if number in known}
        return self._digests.get(request.lora_int_id, b"")

    def check(self, request: object) -> None:
        """Check the type of an adapter request, and that the engine supports adapters.

        Raises:
            TypeError: `request` is not a LoRARequest.
            TrouperValidationError: the engine was started without `enable_lora`.
        """
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, not {type(request).__name__}")
        if self._config is None:
            raise invalid("lora_request", "this engine was started without enable_lora")

    async def load(self, request: LoRARequest, root: str | None = None) -> bool:
        """Load an adapter.  Returns False if it was loaded already.

        Args:
            root: the folder that must contain the adapter's folder; None allows any folder.

        Raises:
            TrouperValidationError: its files do not fit the model, or another adapter has its number or name.
            UnsupportedFeatureError: its files contain more than a plain LoRA adapter.
            AdaptersInUseError: all slots are in use.
        """
        self.check(request)
        async with self._loading:
            known = self._find(request)
            if known is not None and not request.load_inplace:
                return False
            files = await self._read(request, root)
            slot, victim = self._take_slot(known)
            mine = msgspec.structs.replace(request, load_inplace=False)
            loaded = _SlotUse(mine, LoadedAdapter(slot, files.digest, mine.lora_name))
            # Whether all replicas have refused the adapter, so that the slot is unchanged.
            is_refused = False
            try:
                await self._load(slot, files, partial(self._take_in, loaded, known))
            except (TrouperValidationError, UnsupportedFeatureError):
                is_refused = True
                raise
            finally:
                if self._slots.get(slot) is not loaded:
                    is_as_it_was = is_refused or not self._has_replicas
                    self._give_up(slot, victim, is_as_it_was=is_as_it_was)
            self._digests[request.lora_int_id] = files.digest
            return True

    async def load_named(self, request: LoRARequest, root: str | None = None) -> None:
        """Load an adapter like `load`, and keep it registered until it is unloaded.

        Requests may use its name even after it was evicted from its slot; it is then reloaded.
        """
        await self.load(request, root)
        mine = msgspec.structs.replace(request, load_inplace=False)
        self._named[request.lora_int_id] = _NamedAdapter(mine, root)

    async def load_in_turn(
        self, request: LoRARequest, check: Callable[[], None], *, loads_new: bool = True
    ) -> None:
        """Load an adapter like `load`, but wait for a slot if all are in use.

        Args:
            check: raises an exception to end the wait, for example when the engine ends.
            loads_new: if False, only reload an adapter that is registered.

        Raises:
            AdaptersInUseError: all adapters are pinned, so no slot will become free.
            LoRAAdapterNotFoundError: the adapter is not registered, or its files no longer exist.
        """
        if self._find(request) is not None and not request.load_inplace:
            return  # without waiting behind requests for other adapters
        if not loads_new:
            self._check_named(request)
        async with self._turns:
            while True:
                self._freed = anyio.Event()
                try:
                    await (self.load(request) if loads_new else self._load_again(request))
                except AdaptersInUseError:
                    if all(use.is_pinned and not use.is_unloaded for use in self._slots.values()):
                        raise
                else:
                    return
                await self._freed.wait()
                check()

    def unload(self, lora_int_id: int) -> bool:
        """Unload an adapter, so that new requests cannot use it.  Returns False if it is unknown.

        Open requests keep it until they end; then its slot becomes free.
        """
        named, loaded = self._named.pop(lora_int_id, None), self._loaded.get(lora_int_id)
        if loaded is not None:
            self._forget(loaded)
        return named is not None or loaded is not None

    def pin(self, lora_int_id: int) -> bool:
        """Keep an adapter in its slot until it is unloaded, even if no request uses it.

        Returns whether it is loaded.  Without a pin, the least recently used adapter gives way to a new one.
        """
        loaded = self._loaded.get(lora_int_id)
        if loaded is not None:
            loaded.is_pinned = True
        return loaded is not None

    def enter(self, request: LoRARequest) -> LoadedAdapter:
        """Assign an adapter to a request during its opening.

        The adapter cannot lose its slot until `leave` is called for the request.

        Raises:

            LoRAAdapterNotFoundError: it is not loaded.
        """
        self.check(request)
        loaded = self._find(request)
        if loaded is None:
            raise LoRAAdapterNotFoundError(f"the adapter {request.lora_name!r} is not loaded")
        self._loaded[request.lora_int_id] = self._loaded.pop(request.lora_int_id)
        loaded.num_open += 1
        return loaded.adapter

    def leave(self, adapter: LoadedAdapter) -> None:
        """Release an adapter from a closed request.

        The last request of an unloaded adapter frees its slot, which may let another adapter load. Every `enter`
        needs one `leave`.
        """
        loaded = self._slots[adapter.slot]
        loaded.num_open -= 1
        if not loaded.num_open:
            self._freed.set()
        if loaded.is_unloaded and not loaded.num_open:
            self._release(loaded)

    def _find(self, request: LoRARequest) -> _SlotUse | None:
        """Return the loaded adapter with the request's number, or None.  Raises TrouperValidationError if its name or path differs."""
        loaded = self._loaded.get(request.lora_int_id)
        known = loaded or self._named.get(request.lora_int_id)
        if known is not None:
            mine = known.request
            if mine.lora_name != request.lora_name:
                rule = f"is already used by the adapter {mine.lora_name!r}; choose another number"
                raise invalid("lora_int_id", rule, request.lora_int_id)
            if mine.lora_path != request.lora_path and not request.load_inplace:
                rule = f"differs from that of the loaded adapter {mine.lora_name!r}; unload it first, or set load_inplace"
                raise invalid("lora_path", rule, request.lora_path)
            return loaded
        if any(other.lora_name == request.lora_name for other in self.requests):
            raise invalid(
                "lora_name",
                "is already used by another adapter; choose another name",
                request.lora_name,
            )
        return None

    def _check_named(self, request: LoRARequest) -> _NamedAdapter:
        named = self._named.get(request.lora_int_id)
        if named is None:
            raise LoRAAdapterNotFoundError(f"the adapter {request.lora_name!r} is not loaded")
        return named

    async def _load_again(self, request: LoRARequest) -> None:
        """Reload a named adapter that was evicted.  If it is unloaded meanwhile, it stays unloaded."""
        named = self._check_named(request)
        try:
            await self.load(named.request, named.root)
        except (TrouperValidationError, UnsupportedFeatureError) as error:
            text = f"the adapter {request.lora_name!r} cannot be loaded again: {error.args[0]}"
            raise LoRAAdapterNotFoundError(text) from error
        finally:
            if request.lora_int_id not in self._named:
                self.unload(request.lora_int_id)
        self._check_named(request)

    def _take_slot(self, known: _SlotUse | None) -> tuple[int, _SlotUse | None]:
        """Choose a slot to load into.  If it contains an idle adapter, evict it, so that new requests do not find it."""
        if self._free:
            return self._free.pop(), None
        candidates = [known] if known is not None else []
        candidates += [loaded for loaded in self._loaded.values() if not loaded.is_pinned]
        for loaded in candidates:
            if not loaded.num_open:
                del self._loaded[loaded.request.lora_int_id]
                return loaded.adapter.slot, loaded
        raise AdaptersInUseError(
            f"all {len(self._slots)} adapter slots (max_cpu_loras) are "
            "in use or pinned; try again when a request has ended, or unload an adapter",
            "adapters_in_use",
        )

    def _take_in(self, loaded: _SlotUse, known: _SlotUse | None) -> None:
        """Make a loaded adapter available to requests, in place of an earlier one with the same number."""
        if known is not None and self._loaded.get(known.request.lora_int_id) is known:
            self._forget(known)
        self._loaded[loaded.request.lora_int_id] = self._slots[loaded.adapter.slot] = loaded

    def _give_up(self, slot: int, victim: _SlotUse | None, *, is_as_it_was: bool) -> None:
        """Release a slot after a failed load.  Its earlier adapter is restored only if no replica has overwritten the slot."""
        if victim is not None and is_as_it_was:
            self._loaded[victim.request.lora_int_id] = victim
            return
        if victim is not None:
            del self._slots[slot]
        self._free.append(slot)

    def _forget(self, loaded: _SlotUse) -> None:
        """Unload an adapter.  Its slot becomes free once no request uses it."""
        del self._loaded[loaded.request.lora_int_id]
        loaded.is_unloaded = True
        if not loaded.num_open:
            self._release(loaded)

    def _release(self, loaded: _SlotUse) -> None:
        self._freed.set()
        del self._slots[loaded.adapter.slot]
        self._free.append(loaded.adapter.slot)
