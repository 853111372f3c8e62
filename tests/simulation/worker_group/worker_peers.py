"""Worker processes without processes: each answers encoded frames in virtual time, until its fate ends it.

A peer computes the answer to a frame when the frame is sent, and the moment in which its bytes appear; `receive` hands them
out in drawn pieces.  So no task runs for it, and its end can be put before any byte.
"""

import os
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import anyio
import trio

from tests.simulation.clients import Broken as BrokenOracle
from tests.simulation.ports import InjectedError, Trouble
from tests.simulation.scenario import STEP_S, VOCAB_SIZE, layout_of
from tests.simulation.simulated_device import MEMORY, SimulatedDevice
from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.devices.outstanding import DECISIVE
from trouper.actors.executor.workers import wire
from trouper.actors.executor.workers.launching import CLOSED, Exit
from trouper.actors.executor.workers.wire import (
    Broken,
    Call,
    Close,
    ErrorText,
    Frame,
    FrameReader,
    KeepMemory,
    Load,
    Loaded,
    LogRecord,
    Progress,
    Returned,
    describe_error,
    encode,
)
from trouper.actors.messages.controls import Sleep, Wake
from trouper.actors.messages.requests import Grammar, GrammarReady, PrepareGrammar, Vocabulary
from trouper.actors.messages.steps import StepDone, StepFailed, StepPlan

from .worker_scenario import SIGKILL, SIGSEGV, Fate

GARBAGE = (b"\x7f" * 9, b"\x09\x04\x00\x00\x00oops", b"\x09\xff\xff\xff\xff")
NEVER = float("inf")


class Piece(NamedTuple):
    """Bytes that appear at a moment, with the descriptors that come with the first of them."""

    at_s: float
    data: bytes
    files: list[int]
    answers: int | None  # the step whose answer ends here


class WorkerModel(SimulatedDevice):
    """What a worker computes, without waits: its peer has the clock."""

    def __init__(self, info: DeviceInfo, credits: int, trouble: Trouble, absent: frozenset[str]):
        sizes = info.num_blocks, info.block_size
        super().__init__(*sizes, VOCAB_SIZE, credits, trouble, layout=info.layout)
        self.absent = absent

    def step(self, plan: StepPlan) -> StepDone | StepFailed:
        if self.absent:
            raise BrokenOracle(f"a step while {sorted(self.absent)} are absent")
        return self._run(plan)

    def sampled(self, plan: StepPlan, answer: StepDone) -> list[tuple[Any, int, list[int]]]:
        """For each token that was sampled: its sequence, its position and all that were sampled of it."""
        found = []
        for i, slot in enumerate(plan.request_slots):
            if answer.token_ids[i]:
                row = self._rows[slot]
                end = row.end - len(answer.token_ids[i]) + 1
                found.append((row.sequence, end, row.token_ids[row.num_prompt :]))
        return found

    def end_of(self, slot: int) -> int:
        """Return how far a slot has come, by drafts that were right as well."""
        return self._rows[slot].end

    def hold(self, order: PrepareGrammar) -> None:
        """Compile a grammar, beside the steps."""
        self._grammars -= set(order.released)
        self._grammars.add(order.grammar.key)

    def obey(self, call: Call) -> None:
        if isinstance(call.action, Sleep):
            self.absent = MEMORY
            self._forget()
        elif isinstance(call.action, Wake):
            self.absent -= call.action.tags


class SimPeer:
    """One incarnation of a worker.

    Args:
        rank: from the end: 0 answers plans, the others only take them.
        workers: the peers of this incarnation; each adds itself.
    """

    max_inline = wire.MAX_INLINE
    where = ""
    pid = 0

    def __init__(
        self,
        world: Any,
        number: int,
        rank: int,
        worker_group: "list[SimPeer]",
        fate: Fate,
        dice: random.Random,
    ) -> None:
        self.world, self.number, self.rank, self.fate = world, number, rank, fate
        self.worker_group = worker_group
        worker_group.append(self)
        self._dice = dice
        self._frames = FrameReader(lambda rules: Grammar(rules, lambda: None, str))
        self._has_vocabulary = False
        self._out: deque[Piece] = deque()
        self._changed = trio.Event()
        self.begun_s = self._free_at = self._last_s = anyio.current_time()
        self.died_s = self.begun_s + fate.at if fate.end == "time" else NEVER
        self.status = fate.status
        self.is_stuck = False  # hangs, or has no more to say
        self.is_misbehaving = False  # may be killed for it
        self.is_ended = self.was_killed = False
        self.model: WorkerModel | None = None
        self._memory = 0  # the number of the file that outlives it
        self.num_plans = self.num_calls = self.num_runs = 0
        self._room = fate.at if fate.end == "byte" else NEVER  # bytes that it lives to write
        self.unanswered: deque[int] = deque()  # steps sent and not answered by a whole frame
        self.num_answers = self.num_handed_out = 0

    def __repr__(self) -> str:
        return f"<SimPeer {self.number}, rank {self.rank} from the end, {self.fate}, died {self.died_s:.4f}>"

    @property
    def is_dead(self) -> bool:
        return anyio.current_time() >= self.died_s

    def readable(self) -> list[Piece]:
        """What it wrote before its end and its engine has not read."""
        return [piece for piece in self._out if piece.at_s <= self.died_s]

    # Towards the worker

    def send(self, data: bytes, file: int | None) -> None:
        if self.is_ended:
            raise BrokenPipeError
        cut = self._dice.randrange(len(data) + 1)
        reader = self._frames
        for part, files in ((data[:cut], [] if file is None else [os.dup(file)]), (data[cut:], [])):
            reader.feed(part, files)
            while (frame := reader.take()) is not None:
                if isinstance(frame, KeepMemory):
                    self._memory = os.fstat(frame.file).st_ino
                    os.close(frame.file)
                else:
                    self._take(frame)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, StepPlan) and self.rank == 0:
            self.unanswered.append(frame.step)
        if self.is_dead:
            raise BrokenPipeError
        self._free_at = max(self._free_at, anyio.current_time())
        if self.is_stuck:
            return
        match frame:
            case Load():
                self._load(frame)
            case StepPlan():
                self._step(frame)
            case Vocabulary():
                self._has_vocabulary = True
            case PrepareGrammar():
                self._prepare(frame)
            case Call():
                self._call(frame)
            case Close():
                self._close()
            case _:
                raise BrokenOracle(f"a worker was sent {frame}")

    def _load(self, load: Load) -> None:
        fate, config = self.fate, load.config
        self._write(Progress("weights"))
        layout = layout_of(self.world.scenario)
        num_blocks = config.num_blocks * len(layout.windows) + 1
        if fate.end == "memory" and self.number > 0:
            num_blocks += int(fate.at)
            self.is_misbehaving = True
        sizes = num_blocks, config.block_size
        info = DeviceInfo(*sizes, "float32", "simulated", layout=layout)
        absent = MEMORY - frozenset(load.woken) if load.sleep_level else frozenset()
        credits = config.scheduler.max_steps_in_flight
        self.model = WorkerModel(info, credits, self.world.trouble, absent)
        if self._memory:
            cache = self.world.memories.setdefault(self._memory, self.model._cache)
            self.model._cache = cache
            if load.sleep_level:
                self.model._forget()
        self._free_at += fate.load_s
        self._write(LogRecord("loader", 20, "loaded"))
        self._write(Loaded(info))

    def _step(self, plan: StepPlan) -> None:
        if self.model is None or len(self.unanswered) > self.model._max_steps_in_flight:
            raise BrokenOracle(f"{self}: {len(self.unanswered)} plans")
        number, self.num_plans = self.num_plans, self.num_plans + 1
        if self.rank:
            if number == self.fate.at:
                self._misbehave(plan, STEP_S)
            return
        if any(peer.is_stuck for peer in self.worker_group):  # what it would wait for does not come
            self.is_stuck = True
            return
        seconds = self.world.trouble.duration_s(plan)
        if self.world.is_deadly(plan, self.model):
            self._die(self._free_at + seconds * self._dice.random(), SIGSEGV)
            return
        if number == self.fate.at and self._misbehave(plan, seconds):
            return
        answer = self.model.step(plan)
        self._free_at += seconds
        sampled = self.model.sampled(plan, answer) if isinstance(answer, StepDone) else []
        self.world.note_sampled(plan.step, sampled)
        if isinstance(answer, StepDone) and any(len(run) > 1 for run in answer.token_ids):
            self._answer_run(answer)
        else:
            self._write(answer)
        if self.fate.end == "doubled" and number == self.fate.at:
            self.is_misbehaving = True
            self._write(answer)

    def _answer_run(self, answer: StepDone) -> None:
        """Write the answer of a step in which some sequence takes several tokens, unless the worker dies of it."""
        number, self.num_runs = self.num_runs, self.num_runs + 1
        if self.fate.end != "run" or number != self.fate.at:
            self._write(answer)
            return
        self.world.ends_of_runs[self.fate.place] += 1
        match self.fate.place:
            case "before":
                self._die(self._free_at, self.fate.status)
            case "within":
                self._room = self._dice.randrange(1, 12)  # less than any such answer
                self._write(answer)
            case "behind":
                self._write(answer)
                self._die(self._last_s, self.fate.status)

    def _misbehave(self, plan: StepPlan, seconds: float) -> bool:
        """Whether the step ends the worker."""
        match self.fate.end:
            case "step":
                self._die(
                    self._free_at + seconds * self._dice.choice((0, 0.5, 1)), self.fate.status
                )
            case "hang":
                self.is_stuck = self.is_misbehaving = True
            case "broken":
                self.is_misbehaving = True
                self._write(Broken(ErrorText("AcceleratorError", "a sticky error")))
                self._die(self._last_s, 71)
            case "garbage":
                self.is_stuck = self.is_misbehaving = True
                self._append(self._dice.choice(GARBAGE), None, None)
            case _:
                return False
        return True

    def _prepare(self, order: PrepareGrammar) -> None:
        if self.model is None or not self._has_vocabulary:
            raise BrokenOracle(f"{self}: a grammar before its vocabulary")
        self.model.hold(order)
        self._write(GrammarReady(order.grammar.key))

    def _call(self, call: Call) -> None:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if self.fate.end == "call" and number == self.fate.at:
            self._die(self._free_at + STEP_S * self._dice.choice((0, 1)), self.fate.status)
            return
        assert self.model is not None
        try:
            if self.rank == 0:
                self._free_at += self.world.trouble.call_s(call.action.name)
        except InjectedError as error:
            self.is_misbehaving = len(self.worker_group) > 1 and isinstance(
                call.action, DECISIVE
            )  # the others do it
            self._write(Returned(call.number, describe_error(error)))
        else:
            self.model.obey(call)
            self._write(Returned(call.number))

    def _close(self) -> None:
        if self.fate.end == "close":
            self.is_stuck = True
            if self.fate.at:
                self._die(self._free_at + STEP_S, self.fate.status)
            return
        self._die(self._free_at, 0)

    def _spoil_memory(self) -> None:
        """Write anywhere, as a worker may before a fault."""
        for peer in self.worker_group:
            if peer.model is not None:
                peer.model._forget()

    def _die(self, at_s: float, status: int) -> None:
        if at_s < self.died_s:
            self.died_s, self.status = at_s, status
        self.is_stuck = True
        self._changed.set()

    # From the worker

    def _write(self, frame: Any) -> None:
        with patch.object(wire, "MAX_INLINE", self.world.scenario.max_inline):
            data, file = encode(frame)
        is_answer = isinstance(frame, StepDone | StepFailed)
        self._append(data, file, frame.step if is_answer else None)

    def _append(self, data: bytes, file: int | None, answers: int | None) -> None:
        at_s = max(self._free_at, self._last_s)
        files = [] if file is None else [file]
        room, self._room = self._room, max(0, self._room - len(data))
        is_cut = self._dice.random() < self.world.scenario.cut_rate
        cut = self._dice.randrange(1, len(data)) if is_cut else len(data)
        parts = [Piece(at_s, data[:cut], files, None if is_cut else answers)]
        if is_cut:
            parts.append(Piece(at_s + STEP_S * self._dice.random() / 4, data[cut:], [], answers))
        for part in parts:
            whole = part.data
            if room < len(whole):
                part = part._replace(data=whole[: int(room)], answers=None)
            if part.data:
                self._out.append(part)
            else:
                _close_files(part.files)
            self._last_s = part.at_s
            if room < len(whole):
                self._die(part.at_s, self.fate.status)
                break
            room -= len(whole)
        self._changed.set()

    async def receive(self) -> tuple[bytes, list[int]]:
        while True:
            now = anyio.current_time()
            piece = self._out[0] if self._out else None
            if piece is not None and piece.at_s <= min(now, self.died_s) and not self.is_ended:
                return self._hand_out(piece)
            if self.is_dead or self.is_ended:
                return CLOSED
            self._changed = trio.Event()
            with trio.move_on_at(min(self.died_s, NEVER if piece is None else piece.at_s)):
                await self._changed.wait()

    def _hand_out(self, piece: Piece) -> tuple[bytes, list[int]]:
        self._out.popleft()
        size = self._dice.choice((1, len(piece.data), len(piece.data)))
        if size < len(piece.data):
            self._out.appendleft(piece._replace(data=piece.data[size:], files=[]))
        elif piece.answers is not None:
            if self.unanswered and self.unanswered[0] == piece.answers:
                self.unanswered.popleft()
                self.num_answers += 1
            self.world.note_answer(piece.answers)
        return piece.data[:size], piece.files

    async def end(self, grace_s: float) -> Exit:
        if not self.is_ended:
            with anyio.CancelScope(shield=True):
                await trio.sleep_until(min(self.died_s, anyio.current_time() + grace_s))
            if not self.is_dead:
                self.was_killed = True
                self.died_s, self.status = anyio.current_time(), SIGKILL
            self.is_ended = True
            if self.status == SIGSEGV or self.fate.is_out_of_memory:
                self._spoil_memory()
            self.world.note_end(self)
            for piece in self._out:
                _close_files(piece.files)
            self._frames.close()
        return Exit(self.status, self.fate.is_out_of_memory, ("last words",))


class SimLauncher:
    """Starts the incarnations; a predecessor must have been reaped."""

    def __init__(self, world: Any, dice: random.Random) -> None:
        self._world, self._dice = world, dice
        self.num_ranks: int = world.scenario.num_ranks
        self.peers: list[SimPeer] = []
        self._worker_group: list[SimPeer] = []  # of the last incarnation

    def __call__(self, rank: int, *, files: Sequence[int] = ()) -> SimPeer:
        scenario = self._world.scenario
        if rank == 0:
            self._worker_group = []
            if any(not peer.is_ended for peer in self.peers):
                raise BrokenOracle("a successor before all were reaped")
        number = len(self.peers) // scenario.num_ranks
        drawn = scenario.fates[number] if number < len(scenario.fates) else Fate()
        from_end = scenario.num_ranks - 1 - rank
        is_fated = from_end == (drawn.rank if drawn.rank < scenario.num_ranks else 0)
        fate = drawn if is_fated else Fate(load_s=drawn.load_s)
        peer = SimPeer(self._world, number, from_end, self._worker_group, fate, self._dice)
        self.peers.append(peer)
        self._world.record("start", number, fate.end)
        return peer


def _close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)
