"""The states of an engine and the legal transitions between them, as a table that tests can check completely.

    STARTING ─▶ AWAKE ⇄ PAUSED          pause, resume
                AWAKE, PAUSED ─▶ DRAINING ─▶ ASLEEP ─▶ WAKING ─▶ PAUSED     sleep, wake
                any ─▶ STOPPING ─▶ STOPPED,   any ─▶ FAILED

ASLEEP means that some device memory is released.  Nothing is planned until all of it is back.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Literal, get_args

from trouper.actors.messages.controls import Pause
from trouper.errors import TrouperValidationError
from trouper.outputs import RequestError

Mode = Literal["abort", "wait", "keep"]
MEMORY = frozenset({"weights", "kv_cache"})
TAGS = ("weights", "kv_cache", "scheduling")


class EngineState(Enum):
    AWAKE = "awake"
    PAUSED = "paused"
    DRAINING = "draining"
    ASLEEP = "asleep"
    WAKING = "waking"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Event(Enum):
    PAUSE = "pause"
    RESUME = "resume"
    # The pause has begun, and the memory will be released.
    SLEEP = "sleep"
    # The memory is released.
    SLEPT = "slept"
    # The memory is coming back.
    WAKE = "wake"
    # All memory is back, and the waking call may resume.
    WOKEN = "woken"
    # Only some memory is back, or waking has failed.
    WAKE_PAUSED = "wake, still paused"
    STOP = "stop"
    STOPPED = "stopped"
    FAIL = "fail"


_S, _E = EngineState, Event
TRANSITIONS: dict[tuple[EngineState, Event], EngineState] = {
    (_S.AWAKE, _E.PAUSE): _S.PAUSED,
    (_S.AWAKE, _E.RESUME): _S.AWAKE,
    (_S.AWAKE, _E.SLEEP): _S.DRAINING,
    (_S.AWAKE, _E.WAKE): _S.WAKING,
    (_S.PAUSED, _E.PAUSE): _S.PAUSED,
    (_S.PAUSED, _E.RESUME): _S.AWAKE,
    (_S.PAUSED, _E.SLEEP): _S.DRAINING,
    (_S.PAUSED, _E.WAKE): _S.WAKING,
    # A cancelled sleep, with all memory still loaded.
    (_S.DRAINING, _E.PAUSE): _S.PAUSED,
    # Also a cancelled deeper sleep.
    (_S.DRAINING, _E.SLEPT): _S.ASLEEP,
    (_S.ASLEEP, _E.PAUSE): _S.ASLEEP,
    (_S.ASLEEP, _E.SLEEP): _S.DRAINING,
    (_S.ASLEEP, _E.WAKE): _S.WAKING,
    (_S.WAKING, _E.WOKEN): _S.PAUSED,
    (_S.WAKING, _E.WAKE_PAUSED): _S.ASLEEP,
    (_S.STOPPING, _E.STOPPED): _S.STOPPED,
    **{(state, _E.STOP): _S.STOPPING for state in _S if state not in (_S.STOPPED, _S.FAILED)},
    **{(state, _E.FAIL): _S.FAILED for state in _S if state is not _S.STOPPED},
}


class Hold:
    """One block inside `paused()`.  It is equal only to itself.

    `Lifecycle` keeps a list of them, and two blocks with the same mode must not be confused.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode


class Lifecycle:
    """The state of the engine, the requests that it admits, and the memory that it has.

    It is pure: it decides which changes are legal, and `Controls` carries them out.
    """

    def __init__(self) -> None:
        self.state = EngineState.AWAKE
        self.pause = Pause.NONE
        # The reason why new requests are refused.  None queues them.
        self.refuses: RequestError | None = None
        self.level = 0
        self.resident: frozenset[str] = MEMORY
        # A call for memory has failed, so some replicas may have more memory than `resident`.
        self.is_uneven = False
        # Open blocks of `paused()`.
        self._holds: list[Hold] = []
        # The state before the first hold.
        self._found: tuple[Pause, RequestError | None] = Pause.NONE, None

    def __repr__(self) -> str:
        return f"<Lifecycle {self.state.value} pause={self.pause.value} level={self.level}>"

    @property
    def shown_state(self) -> str:
        """Name the state for people: sleep of level 1 is dozing, because waking takes only milliseconds then."""
        is_dozing = self.state is EngineState.ASLEEP and self.level == 1
        return "dozing" if is_dozing else self.state.value

    @property
    def is_paused(self) -> bool:
        return self.pause is not Pause.NONE

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine is paused or lacks memory.  It stays True after a partial wake."""
        return self.is_paused or self.resident != MEMORY

    def move(self, event: Event) -> None:
        """Change the state.  Raises RuntimeError if the event is illegal in this state.

        The table of transitions is the only place that allows a change of state.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise RuntimeError(
                f"{event.value} is not possible while the engine is {self.state.value}"
            )
        self.state = after

    def begin_pause(self, mode: Mode, *, refuses: bool) -> None:
        """Pause the engine.  A stricter earlier pause stays.

        Args:
            refuses: refuse new requests instead of queueing them.
        """
        wanted = Pause.ALL if mode == "keep" else Pause.NO_NEW_REQUESTS
        if self.pause is not Pause.ALL:
            self.pause = wanted
        if refuses:
            self.refuses = RequestError(
                "engine_paused", "the engine is paused, try again later", retryable=True
            )

    def hold(self, mode: Mode) -> "Hold":
        """Begin a block that restores the present state at its end.

        The state before the first of several overlapping blocks is restored at the end.
        """
        if not self._holds:
            self._found = self.pause, self.refuses
        hold = Hold(mode)
        self._holds.append(hold)
        return hold

    def release(self, hold: "Hold") -> None:
        """End a hold: restore the state before the first hold, then apply the remaining holds."""
        self._holds.remove(hold)
        if self.resident == MEMORY:
            self.pause, self.refuses = self._found
            for other in self._holds:
                self.begin_pause(other.mode, refuses=other.mode != "keep")

    def has(self, hold: "Hold") -> bool:
        return hold in self._holds

    def give_back(self, level: int) -> None:
        """Note that the device has released its memory.

        The level is that of the deepest sleep so far, until all memory is loaded again. Requests cannot be scheduled
        until then.
        """
        self.resident, self.level = frozenset(), max(level, self.level)

    def bring_back(self, memory: frozenset[str]) -> None:
        """Note that the device has this memory again."""
        self.resident |= memory

    def resume(self) -> None:
        self.pause, self.refuses, self.level = Pause.NONE, None, 0


def check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise TrouperValidationError("must be abort, wait or keep", parameter="mode", value=mode)


def check_level(level: int) -> None:
    if isinstance(level, bool) or level not in (0, 1, 2):
        raise TrouperValidationError("must be 0, 1 or 2", parameter="level", value=level)


def check_tags(tags: Iterable[str] | None) -> frozenset[str]:
    """Check the names of parts of the memory; None means all.

    Raises TrouperValidationError for an unknown name.  One name may be given as a string.
    """
    if tags is None:
        return frozenset(TAGS)
    wanted = (tags,) if isinstance(tags, str) else tuple(tags)
    for tag in wanted:
        if tag not in TAGS:
            raise TrouperValidationError(
                f"must be among {', '.join(TAGS)}", parameter="tags", value=tag
            )
    return frozenset(wanted)
