"""A whole engine on a `ProcessDevice`, whose workers are simulated, under observation."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec

from tests.simulation.clients import Broken
from tests.simulation.ports import Watched
from tests.simulation.world import World, a_grammar, config_of
from trouper.actors.engine.wiring import Engine
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.supervision import MAX_LOSSES, WorkerState
from trouper.actors.executor.workers.launching import Peer, launch_all
from trouper.actors.messages.steps import DeviceBack, DeviceLost, StepDone, StepFailed, StepPlan
from trouper.config.engine_config import EngineConfig
from trouper.errors import DeviceStartError

from . import worker_oracles
from .worker_peers import SimLauncher, SimPeer, WorkerModel
from .worker_scenario import SIGKILL, WorkerScenario


class WatchedProcessDevice(Watched, ProcessDevice):
    """The real one, which notes what it hands out."""

    launcher: SimLauncher
    check: Callable[[Any], None]

    async def receive(self) -> Any:
        event = await super().receive()
        self.check(event)
        return event

    @property
    def num_steps_out(self) -> int:
        return len(self._plans)

    @property
    def is_up(self) -> bool:
        return self._state is WorkerState.UP

    @property
    def is_closed(self) -> bool:
        return all(peer.is_ended for peer in self.launcher.peers)


class SimWorkers:
    """Starts an incarnation without rings: the simulated workers exchange nothing."""

    def __init__(self, launcher: SimLauncher) -> None:
        self._launcher = launcher

    async def __call__(self) -> Sequence[Peer]:
        ranks = range(self._launcher.num_ranks)
        return await launch_all(self._launcher, 0, ranks, [()] * len(ranks))

    async def release(self) -> None:
        pass


class WorkerWorld(World):
    """Everything that one run knows; of an engine whose device may be lost."""

    oracles: Any = worker_oracles
    death_cause = DeviceStartError
    deadline_s = 2000.0  # virtual: a worker that hangs in the first step of a size is waited for
    settle_s = 400.0
    closing_s = 12.0  # a worker has 10 s to close

    scenario: WorkerScenario

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.columns: dict[int, list[tuple[int, int]]] = {}  # step -> (client, prompt's length)
        self.sampled: dict[int, list[Any]] = {}  # step -> what its answer will tell
        self.losses: list[list[Any]] = []  # [moment, whether it is explained]
        self.suspects: list[frozenset[int]] = []  # clients in the eldest plan of each loss
        # By grammar: of each loss while it was prepared, whether nothing else ran.
        self.suspect_grammars: dict[int, list[bool]] = {}
        self.num_suspects = 0  # sequences in the step of the last loss
        self.num_deadly = 0  # losses that a killer has caused
        self.is_lost = self.has_died = False
        self.memories: dict[int, bytearray] = {}  # that outlive their workers, by number of file
        self.num_kept = 0  # losses after which they were found again
        self.ends_of_runs: Counter[str] = Counter()  # by their place
        self.killers = {killer.client: killer.after for killer in self.scenario.killers}

    def make_device(self) -> Any:
        return None  # it needs an event loop

    def make_config(self) -> EngineConfig:
        scenario = self.scenario
        return msgspec.structs.replace(
            config_of(scenario),
            device_worker="process",
            max_worker_restarts=scenario.max_restarts,
            worker_restart_window_s=scenario.window_s,
            step_timeout_s=scenario.step_timeout_s,
        )

    async def run(self) -> None:
        launcher = SimLauncher(self, self._dice("peers"))
        self.device = WatchedProcessDevice(self.make_config(), launch_workers=SimWorkers(launcher))
        self.device.launcher, self.device.check = launcher, self._check_event
        self.device.ready, self.device.sampled = {}, {}
        logging.disable(logging.CRITICAL)
        num_files = worker_oracles.num_open_files()
        try:
            await super().run()
        finally:
            logging.disable(logging.NOTSET)
        worker_oracles.check_end(self, num_files)

    def check_death(self, error: BaseException) -> None:
        super().check_death(error)
        self.has_died = error.__cause__ is not None

    async def _perform(self, audience: Any) -> None:
        try:
            await super()._perform(audience)
        except DeviceStartError as error:  # the first load, which is not repeated
            self.is_closing = True
            worker_oracles.check_failed_start(self, error)

    def watch(self, engine: Engine) -> None:
        super().watch(engine)
        policy = self.policy
        policy.lose_device = partial(self._lose, policy.lose_device)  # type: ignore[method-assign]
        policy.return_device = partial(self._return, policy.return_device)  # type: ignore[method-assign]

    def _lose(self, right: Callable[[DeviceLost], int], loss: DeviceLost) -> int:
        self.is_lost = True
        grammars = {a_grammar(number).key: number for number in range(4)}
        number = grammars.get(self.policy.table.grammars._preparing)
        if number is not None and not loss.is_from_outside:
            is_silent = not self.policy.in_flight
            self.suspect_grammars.setdefault(number, []).append(is_silent)
        num_explained = right(loss)
        for counted in self.losses[-num_explained:] if num_explained else ():
            counted[1] = True
        return num_explained

    def _return(self, right: Callable[..., None], *, keeps_memory: bool) -> None:
        self.is_lost = False
        self.num_kept += keeps_memory
        right(keeps_memory=keeps_memory)

    def _note(self, plan: StepPlan, before: set[int]) -> None:
        if self.is_lost:
            self.give_up(Broken(f"a plan while the device is lost: {plan}"))
        ids = [entry[0].id for entry in self.policy.in_flight[-1].entries]
        self.columns[plan.step] = [self.owners[id] for id in ids]
        super()._note(plan, before)

    # What the peers report

    def is_deadly(self, plan: StepPlan, model: WorkerModel) -> bool:
        """Whether a killer is in the step."""
        for i, (client, num_prompt) in enumerate(self.columns[plan.step]):
            if client not in self.killers:
                continue
            after = self.killers[client]
            start = plan.num_computed_tokens[i]
            if plan.num_unknown_tokens and plan.num_unknown_tokens[i]:
                start = model.end_of(plan.request_slots[i])
            end = start + plan.num_scheduled_tokens[i]
            if plan.num_lookahead_tokens:
                end += plan.num_lookahead_tokens[i]
            if after is None or end >= num_prompt + after:
                self.num_deadly += 1
                return True
        return False

    def note_sampled(self, step: int, sampled: list[Any]) -> None:
        self.sampled[step] = sampled

    def note_answer(self, step: int) -> None:
        """The last byte of an answer has been handed out."""
        for sequence, end, tokens in self.sampled.get(step, ()):
            self.device.ready[sequence, end] = anyio.current_time()
            self.device.sampled[sequence] = tokens

    def note_end(self, peer: SimPeer) -> None:
        """A worker has been reaped; after a loss that which is its cause is the last of its workers."""
        now = anyio.current_time()
        self.record("end of worker", peer.number, peer.rank, peer.status, peer.was_killed)
        has_cause = any(
            p.is_misbehaving or p.is_stuck or (p.is_dead and not p.was_killed)
            for p in peer.worker_group
            if p is not peer
        )
        has_cause |= peer.is_misbehaving or peer.is_stuck
        if peer.was_killed and not (has_cause or self.is_closing):
            is_spent = self.trouble.has_crashed or self.engine is None
            is_closed = self.device._state is WorkerState.CLOSED
            if not is_spent and not is_closed:
                self.give_up(Broken(f"a worker was killed that did nothing wrong: {peer}"))
        if self.device._state is WorkerState.CLOSED or not all(
            p.is_ended for p in peer.worker_group
        ):
            return
        unanswered = peer.worker_group[-1].unanswered
        is_from_outside = peer.status == SIGKILL and not (
            peer.was_killed or peer.is_misbehaving or peer.fate.is_out_of_memory
        )
        if unanswered and not is_from_outside:
            columns = self.columns[unanswered[0]]
            self.suspects.append(frozenset(client for client, _ in columns))
        if peer.number == 0 and self.device._info is None:
            return
        self.losses = [loss for loss in self.losses if loss[0] > now - self.scenario.window_s]
        num_suspects = 0
        if unanswered and not is_from_outside:
            num_suspects = len(self.columns[unanswered[0]])
        is_search = (
            num_suspects < self.num_suspects and 0 < 2 * num_suspects <= self.num_suspects + 1
        )
        self.num_suspects = num_suspects
        self.losses.append([now, is_search])
        num_unexplained = sum(not is_explained for _, is_explained in self.losses)
        if num_unexplained > self.scenario.max_restarts or len(self.losses) > MAX_LOSSES:
            self.trouble.has_crashed = True

    def _check_event(self, event: Any) -> None:
        peer = self.device.launcher.peers[-1]
        match event:
            case StepDone() | StepFailed():
                peer.num_handed_out += 1
                self.record("answer", event.step)
            case DeviceLost():
                self.record("lost", event.step)
                worker_oracles.check_loss(peer)
            case DeviceBack():
                self.record("back")
