"""Bugs of an engine that loses its worker process, on purpose."""

from unittest.mock import patch

import anyio.lowlevel

from tests.simulation.bugs import bug
from trouper.actors.executor.devices import process
from trouper.actors.executor.devices.outstanding import OpenCalls, RestoredState
from trouper.actors.executor.devices.process import ProcessDevice
from trouper.actors.executor.devices.supervision import Death, RestartBudget
from trouper.actors.executor.devices.worker_link import KeptFiles
from trouper.actors.executor.workers.wire import Loaded
from trouper.actors.messages.steps import DeviceLost, StepDone
from trouper.actors.scheduling.culprit_search import Quarantine
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.running import Running

from .worker_scenario import draw_slow_steps, draw_with_killer, draw_with_runs, draw_workers

NAMES: list[str] = []  # of the bugs in this file


def worker_bug(owner, attribute, draw=draw_workers):
    """`draw`: scenarios in which it shows soon; in those of `draw_workers` it shows within 500."""

    def register(make):
        NAMES.append(make.__name__)
        return bug(owner, attribute, draw)(make)

    return register


# The device


@worker_bug(ProcessDevice, "receive")
def answers_after_the_loss(right):
    async def faulty(self):
        late = self.__dict__.pop("late", None)
        if late is not None:
            return late
        event = await right(self)
        if isinstance(event, DeviceLost):
            self.late = self.__dict__.pop("last", None)
        elif isinstance(event, StepDone):
            self.last = event
        return event

    return faulty


@worker_bug(ProcessDevice, "_next_frame")
def loss_before_whole_frames(right):
    async def faulty(self):
        found = await right(self)
        is_answer = isinstance(found, tuple) and isinstance(found[1], StepDone)
        is_late = is_answer and self._workers[0]._peer.is_dead
        return await self._reap(0) if is_late else found

    return faulty


@worker_bug(ProcessDevice, "_reap")
def successor_before_reaping(right):
    async def faulty(self, rank, **how):
        await anyio.lowlevel.checkpoint()
        return Death(rank, self._plans[0].step if self._plans else None, -11)

    return faulty


@worker_bug(OpenCalls, "fail_all")
def call_left_open(right):
    return lambda self, error: None


@worker_bug(OpenCalls, "note")
def workers_may_differ(right):
    def faulty(self, returned, num_workers):
        done = right(self, returned, num_workers)
        self.differ = None
        return done

    return faulty


@worker_bug(ProcessDevice, "_reap")
def only_the_cause_is_reaped(right):
    async def faulty(self, rank, **how):
        workers = self._workers
        self._workers = [worker for worker in workers if worker.rank == rank]
        try:
            return await right(self, 0, **how)
        finally:
            self._workers = workers

    return faulty


@worker_bug(RestoredState, "follow")
def sleep_level_forgotten(right):
    return lambda self, call: None


@worker_bug(ProcessDevice, "_begin_s", draw_slow_steps)
def deadline_from_submission(right):
    return lambda self: self._plans[0].submitted_s if self._plans else right(self)


@worker_bug(ProcessDevice, "_frames_of_all")
def bytes_of_the_predecessor_are_kept(right):
    async def faulty(self, kind):
        if kind is Loaded:
            before = self.__dict__.pop("before", None)
            self.before = first = self._workers[0]
            if before is not None:
                first._frames._bytes += before._frames._bytes
        return await right(self, kind)

    return faulty


@worker_bug(RestartBudget, "note_loss")
def budget_never_counts(right):
    def faulty(self, now, num_suspects=0):
        return right(self, now, num_suspects) or 0.0

    return faulty


@worker_bug(RestartBudget, "explain", draw_with_killer)
def verdict_keeps_its_losses(right):
    return lambda self, num_losses: None


# The policy


@worker_bug(Policy, "lose_device")
def steps_in_flight_not_voided(right):
    def faulty(self, loss):
        kept = list(self.in_flight)
        num_losses = right(self, loss)
        self.in_flight.extend(kept)
        return num_losses

    return faulty


@worker_bug(Policy, "apply", draw_with_runs)
def a_run_is_taken_again_after_a_restart(right):
    def faulty(self, done):
        entries = self.in_flight[0].entries
        right(self, done)
        runs, num_lost = self.__dict__.setdefault("runs", {}), self.table.running.num_lost_tokens
        for (sequence, *_), token_ids in zip(entries, done.token_ids, strict=True):
            before, run = runs.pop(sequence.id, (num_lost, ()))
            if before < num_lost and sequence.id in self.table.running:
                self.table.append(sequence, run, ())
            if len(token_ids) > 1:
                runs[sequence.id] = num_lost, token_ids

    return faulty


@worker_bug(Policy, "return_device")
def prefix_cache_survives(right):
    return lambda self, keeps_memory: right(self, keeps_memory=True)


@worker_bug(process, "is_memory_sound")
def memory_is_kept_after_a_wild_write(right):
    return lambda statuses, was_out_of_memory, is_broken: True


@worker_bug(KeptFiles, "close")
def memory_files_stay_open(right):
    def faulty(self):
        self._files.clear()
        self._layouts, self._are_sound = None, False

    return faulty


@worker_bug(Policy, "lose_device")
def epoch_kept(right):
    def faulty(self, loss):
        num_losses = right(self, loss)
        self._epoch -= 1
        return num_losses

    return faulty


@worker_bug(Policy, "lose_device")
def slot_not_given_again(right):
    def faulty(self, loss):
        with patch.object(Running, "lose_all", lambda running: None):
            return right(self, loss)

    return faulty


@worker_bug(Policy, "lose_device")
def planned_before_it_is_back(right):
    def faulty(self, loss):
        num_losses = right(self, loss)
        self.is_device_lost = False
        return num_losses

    return faulty


@worker_bug(Policy, "return_device")
def return_is_not_noticed(right):
    return lambda self, keeps_memory: None


@worker_bug(Policy, "lose_device")
def suspects_of_the_wrong_plan(right):
    def faulty(self, loss):
        if len(self.in_flight) > 1:
            self.in_flight.rotate(1)
        return right(self, loss)

    return faulty


@worker_bug(Quarantine, "lose", draw_with_killer)
def verdict_in_company(right):
    def faulty(self, columns):
        columns = list(columns)
        before = {suspect.sequence.id for suspect in self._suspects}
        for sequence, _ in columns:
            if sequence.id in before:
                self._end()
                return sequence.request, 2
        return right(self, columns)

    return faulty


@worker_bug(Quarantine, "_choose", draw_with_killer)
def suspects_are_tested_together(right):
    def faulty(self):
        right(self)
        self._tested = list(self._suspects)

    return faulty
