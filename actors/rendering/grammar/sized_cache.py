"""A cache with a limit in bytes that evicts the least recently used values first.

The limit is in bytes because one client can make a very large value.  An owner may hold at most half of the space, so
one client's values cannot evict those of all others.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class _KeptValue(NamedTuple, Generic[ValueT]):
    value: ValueT
    num_bytes: int
    owner: str


class KeptBySize(Generic[KeyT, ValueT]):
    """A cache of at most `max_bytes`.  One thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[KeyT, _KeptValue[ValueT]] = (
            OrderedDict()
        )  # the last used at the end
        self._num_bytes: dict[str, int] = {}  # by owner

    def __repr__(self) -> str:
        return f"<KeptBySize: {len(self)} of {self.num_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """The bytes of all together."""
        return sum(self._num_bytes.values())

    def get(self, key: KeyT) -> ValueT | None:
        """Return the value of a key and mark it as used now, or None if there is no value."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def put(self, key: KeyT, value: ValueT, num_bytes: int, owner: str = "") -> None:
        """Keep a value and evict the least recently used ones, beginning with its owner's."""
        self._remove(key)
        self._entries[key] = _KeptValue(value, num_bytes, owner)
        self._num_bytes[owner] = self._num_bytes.get(owner, 0) + num_bytes
        while self._num_bytes.get(owner, 0) > self._max_bytes // (2 if owner else 1):
            self._remove(next(key for key, entry in self._entries.items() if entry.owner == owner))
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def _remove(self, key: KeyT) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            rest = self._num_bytes[entry.owner] - entry.num_bytes
            self._num_bytes[entry.owner] = rest
            if not rest:
                del self._num_bytes[entry.owner]
