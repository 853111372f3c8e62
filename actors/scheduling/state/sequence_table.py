"""All unfinished sequences: in which queue each of them is, and how it ends.

A sequence enters with its request, waits, runs, may be preempted and wait again, and ends exactly once.  Its end goes to the outputs,
except an end that the detokenizer has found itself.

`start_waiting` starts queued sequences in their order until one finds no room.  A sequence is parked until its grammar is compiled.
A sequence waits while the running ones use as many different adapters as allowed; meanwhile others pass it.  Law: at most MAX_PASSES
of them do, then no other sequence starts before it.  So it starts at the latest when all sequences running at that time have ended.
"""

from collections.abc import Collection, Set
from itertools import count
from typing import Any

from trouper.actors.messages.outputs import AdapterStats, SequenceTokens
from trouper.actors.messages.requests import Admit, RequestId, SequenceId
from trouper.actors.messages.steps import TokenLogprobs
from trouper.actors.scheduling.state.fluid import Fluid
from trouper.actors.scheduling.state.grammar_ledger import GrammarLedger
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.actors.scheduling.state.running import Running
from trouper.actors.scheduling.state.sequence import (
    Request,
    SchedulerOutputs,
    Sequence,
    State,
    open_request,
)
from trouper.actors.scheduling.state.state_snapshots import StateSnapshots
from trouper.actors.scheduling.state.step_builder import StepBuilder
from trouper.actors.scheduling.state.tier import Tier
from trouper.actors.scheduling.state.waiting import Queue, Waiting
from trouper.config.engine_config import SchedulerConfig
from trouper.outputs import FinishReason, RequestError


class Shared:
    """The part of the tables that all replicas of a model share: the outputs and the numbering of requests.

    A request that moves to another replica keeps its number and its outputs thereby.
    """

    def __init__(self) -> None:
        self.outputs = SchedulerOutputs()
        self.numbers = count(1)


class SequenceTable:
    """Own the queues and the running sequences of one replica, and put out their tokens and ends.

    Every change of a sequence's state happens here, which makes its transitions easy to check.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: KVBlocks,
        shared: Shared | None = None,
        states: StateSnapshots | None = None,
        tier: Tier | None = None,
    ) -> None:
        self.waiting = Waiting(is_fcfs=config.policy == "fcfs")
        self.running = Running(config, blocks, self.waiting.returning, states, tier)
        self.grammars = GrammarLedger()
        self._shared = shared or Shared()
        self.outputs = self._shared.outputs
        self.requests: dict[RequestId, Request] = {}
        self.sequences: dict[SequenceId, Sequence] = {}
        # If set, ended sequences leave it.
        self.fluid: Fluid | None = None
        self.ghosts: dict[SequenceId, Sequence] = {}
        # Siblings that wait until their leader's prompt is computed.
        self.num_deferred = 0
        self.num_generation_tokens = 0
        self._config = config
        self._blocks = blocks

    @property
    def num_waiting(self) -> int:
        """Count the sequences that wait for a request slot, for KV blocks, or for a result in flight."""
        return len(self.sequences) - len(self.running) - self.num_deferred

    @property
    def num_started(self) -> int:
        """Count the unfinished sequences that ran before.  Deferred siblings are not counted: their leader is.

        The device may hold results of them; fresh ones have none.
        """
        return len(self.sequences) - self.waiting.num_fresh - self.num_deferred

    def ids_by_state(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """List the running sequences, the queued ones, and those that can be neither now, for tests and debugging."""
        running, waiting = self.running.ids, self.waiting.ids
        return running, waiting, tuple(self.sequences.keys() - {*running, *waiting})

    def statistics(self) -> dict[str, Any]:
        """Describe the sequences and the KV blocks in the fields of `SchedulerStats`.

        The policy adds the numbers of its other parts.
        """
        running, blocks = self.running, self._blocks
        return {
            "num_running": len(running),
            "num_waiting": self.num_waiting,
            "num_deferred": self.num_deferred,
            "num_blocks_free": blocks.num_free,
            "num_blocks_cached": blocks.num_cached,
            "num_blocks_total": blocks.num_usable,
            "kv_cache_usage": blocks.usage,
            "num_preemptions": running.num_preemptions,
            "num_generation_tokens": self.num_generation_tokens,
            "prefix_cache_queries": running.num_queries,
            "prefix_cache_hits": running.num_hits,
            "recompute_cache_queries": running.num_recompute_queries,
            "recompute_cache_hits": running.num_recompute_hits,
            "num_lost_tokens": running.num_lost_tokens,
            **running.kv_bytes(),
            **({} if running.states is None else running.states.statistics()),
            "adapters": None if self._config.max_loras is None else self._adapter_stats(),
        }

    def _adapter_stats(self) -> AdapterStats:
        """List the adapters of the running and of the other sequences."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for sequence in self.sequences.values():
            adapter = sequence.request.admit.adapter
            if adapter is not None:
                names[sequence.id in self.running].add(adapter.name)
        running, waiting = (tuple(sorted(names[is_running])) for is_running in (True, False))
        return AdapterStats(running, waiting, self._config.max_loras or 0)

    def grammar_keys(self, requests: Set[RequestId]) -> Set[bytes]:
        """Return the keys of the grammars that these requests use.

        During a search for a culprit, only the grammars of suspects may be compiled.
        """
        admits = (self.requests[id].admit for id in requests if id in self.requests)
        return {admit.grammar.key for admit in admits if admit.grammar is not None}

    def fail_grammar(self, key: bytes, error: RequestError) -> None:
        """End all requests that use this grammar with an error.

        The device could not compile it, so none of them could ever start.
        """
        for request in list(self.requests.values()):
            grammar = request.admit.grammar
            if grammar is not None and grammar.key == key:
                self.fail_request(request, error)

    @property
    def _capacity(self) -> int:
        return self._blocks.capacity

    def open_request(self, admit: Admit) -> Request:
        """Make a request with the next number.  `enter` adds it to the table.

        Numbers are common to all replicas, so the order of arrival is global.
        """
        return open_request(admit, next(self._shared.numbers), self._config, self._capacity)

    def enter(self, request: Request) -> None:
        """Add a request, with its outputs so far if another replica has begun it.  One that could never run ends at once."""
        admit, capacity = request.admit, self._capacity
        num_prompt = len(admit.prompt_token_ids)
        self.requests[admit.id] = request
        self.grammars.use(admit)
        unfinished = [s for s in request.sequences if s.state is not State.FINISHED]
        self.sequences.update((sequence.id, sequence) for sequence in unfinished)
        self.num_deferred += len(request.deferred)
        if num_prompt == 0:
            self._end_request(
                request, "error", RequestError("validation_error", "the prompt has no token")
            )
        elif num_prompt >= self._config.max_model_len:
            self._end_request(request, "length")
        elif num_prompt >= capacity:
            text = (
                f"the KV cache has {capacity} slots, the prompt and one token need {num_prompt + 1}"
            )
            self._end_request(request, "error", RequestError("kv_cache_exhausted", text))
        elif not self._ends_when_resumed(request):
            self._queue(request, unfinished)

    def _ends_when_resumed(self, request: Request) -> bool:
        """Take over the tokens that an earlier process has sampled.  Returns whether the answer ends with them.

        The request then waits like a preempted one: its tokens are known, and their KV is computed again.
        """
        leader, resumed = request.sequences[0], request.admit.options.resumed_token_ids
        if not resumed or leader.output:
            return False
        leader.state = State.PREEMPTED
        for token in resumed:
            end = leader.append(token)
            if end is not None:
                self.outputs.add_tokens(leader, (), end, ())
                self._finish(leader)
                return True
        return False

    def _queue(self, request: Request, unfinished: list[Sequence]) -> None:
        leader = request.sequences[0]
        if leader.state is State.WAITING:
            self.waiting.fresh.push(leader)
            unfinished = [s for s in unfinished if s is not leader]
        deferred = {sibling.id for sibling in request.deferred}
        for sequence in unfinished:
            if sequence.id not in deferred:
                self.waiting.returning.push(sequence)

    def take_out(self, kept: Set[RequestId], *, only_fresh: bool = False) -> list[Request]:
        """Remove and return all requests without state on the device, except `kept`.

        Ghosts among them end, because another replica does not suspect them.

        Args:
            only_fresh: remove only requests that never ran.
        """
        for ghost in list(self.ghosts.values()):
            is_idle = ghost.request_slot < 0 and not ghost.num_in_flight
            if is_idle and ghost.request.admit.id not in kept:
                self._finish(ghost)
        requests = [
            request
            for id, request in self.requests.items()
            if id not in kept
            and (not only_fresh or request.sequences[0].state is State.WAITING)
            and not any(
                s.request_slot >= 0 or s.num_in_flight
                for s in request.sequences
                if s.state is not State.FINISHED
            )
        ]
        ids: set[SequenceId] = set()
        for request in requests:
            self._forget(request)
            self.num_deferred -= len(request.deferred)
            ids.update(s.id for s in request.sequences if s.state is not State.FINISHED)
        for id in ids:
            del self.sequences[id]
            if self.fluid is not None:
                self.fluid.leave(id)
        self.waiting.take_all(ids)
        return requests

    def work(self) -> tuple[int, int]:
        """Count the known tokens without KV, and the unfinished sequences.

        Prompts shared by several sequences count once, and cached prefixes are subtracted as expected.
        """
        num_tokens = 0
        for sequence in self.sequences.values():
            if sequence.index and not sequence.output:
                continue  # it shares its leader's prompt
            num_missing = sequence.num_tokens - sequence.num_computed
            if sequence.request_slot < 0:
                num_missing -= sequence.request.num_expected
            num_tokens += max(0, num_missing)
        return num_tokens, len(self.sequences)

    def abort(self, id: RequestId, suspects: Set[SequenceId] = frozenset()) -> None:
        """End a request in any state.  Its suspects become ghosts.  Unknown and finished requests are ignored.

        A ghost has no output any more, but still takes part in the search for a culprit.
        """
        request = self.requests.get(id)
        if request is not None:
            self._end_request(request, "abort", suspects=suspects)

    def stop(self, id: SequenceId, *, is_suspect: bool = False) -> None:
        """Drop a sequence after a stop string.  It has no further output, and becomes a ghost if it is a suspect."""
        self.outputs.withdraw(id)
        sequence = self.sequences.get(id)
        if sequence is not None and is_suspect:
            self._make_ghost(sequence)
        elif sequence is not None:
            self._finish(sequence)

    def raise_ghost(self, sequence: Sequence) -> None:
        """Compute an ended sequence once more, because it was in the step in which the device died.

        A sequence at its length limit is ignored: no step in flight could have continued it.
        """
        request = sequence.request
        if sequence.state is not State.FINISHED or sequence.num_tokens >= sequence.limit:
            return
        if request.num_unfinished == 0:
            self.requests[request.admit.id] = request
            self.grammars.use(request.admit)
        if sequence not in request.sequences:
            request.sequences.append(sequence)
        request.num_unfinished += 1
        sequence.state = State.PREEMPTED
        sequence.preemption_epoch += 1
        sequence.valid_from_epoch = sequence.preemption_epoch
        sequence.num_in_flight = 0
        sequence.num_computed = sequence.num_computed_on_device = sequence.num_registered = 0
        self.sequences[sequence.id] = sequence
        self._make_ghost(sequence)
        # Dead entries of the ended sequence may be in the queues.
        self.waiting.take_all({sequence.id})
        self.waiting.returning.push(sequence)

    def end_ghosts(self, suspects: Collection[SequenceId]) -> None:
        """End the ghosts once they are no longer suspects.

        They have been tested, or the search is over.
        """
        for ghost in [ghost for id, ghost in self.ghosts.items() if id not in suspects]:
            self._finish(ghost)

    def _make_ghost(self, sequence: Sequence) -> None:
        sequence.is_ghost = True
        self.ghosts[sequence.id] = sequence

    def fail(self, sequence: Sequence, error: RequestError) -> None:
        """End a sequence with an error, and withdraw its KV from the prefix cache, because it may be wrong."""
        self._blocks.forget(sequence.blocks)
        if self.running.windows is not None:
            self.running.windows.forget(sequence)
        self._end(sequence, "error", error)

    def fail_request(self, request: Request, error: RequestError) -> None:
        """End all sequences of a request.

        Sequences that have already ended keep their results.
        """
        self._end_request(request, "error", error)

    def append(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Append sampled tokens.  Tokens behind the end of the sequence are dropped.

        The sequence ends if one of the tokens is a stop token, or if its limit is reached.
        """
        end, num_before = None, len(sequence.output)
        for token in token_ids:
            end = sequence.append(token)
            if end is not None:
                num_taken = len(sequence.output) - num_before
                token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
                break
        self.num_generation_tokens += len(token_ids)
        if not sequence.is_ghost:
            self.outputs.add_tokens(sequence, token_ids, end, logprobs)
        if end is not None:
            self._finish(sequence)
        elif sequence.request_slot < 0:
            self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again, unless one of its results is still in flight.

        It goes to the queue of returning sequences, served before new ones.
        """
        if sequence.num_in_flight == 0:
            self.waiting.returning.push(sequence)

    def release_siblings(self, request: Request) -> None:
        """Queue the siblings when the leader's prompt is computed, or when the leader has ended.

        They find the prompt in the prefix cache, or fork the leader's blocks.
        """
        self.num_deferred -= len(request.deferred)
        for sibling in request.deferred:
            self.waiting.returning.push(sibling)
        request.deferred.clear()

    def _end_request(
        self,
        request: Request,
        reason: FinishReason,
        error: RequestError | None = None,
        suspects: Set[SequenceId] = frozenset(),
    ) -> None:
        self.num_deferred -= len(request.deferred)
        request.deferred.clear()
        for sequence in tuple(request.sequences):
            if sequence.id in suspects:
                self._put_out_end(sequence, reason, error)
                self._make_ghost(sequence)
            elif sequence.state is not State.FINISHED:
                self._end(sequence, reason, error)

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: RequestError | None = None
    ) -> None:
        """End a sequence without a last token, and put out its end."""
        self._put_out_end(sequence, reason, error)
        self._finish(sequence)

    def _put_out_end(
        self, sequence: Sequence, reason: FinishReason, error: RequestError | None
    ) -> None:
        if sequence.is_ghost:
            return
        self.outputs.add(
            SequenceTokens(
                sequence.id,
                (),
                reason,
                error=error,
                num_preemptions=sequence.num_preemptions,
                replica=sequence.request.replica,
            )
        )

    def _finish(self, sequence: Sequence) -> None:
        """Forget a sequence.  Only the prefix cache keeps some of its KV."""
        request = sequence.request
        if sequence.request_slot >= 0:
            self.running.leave(sequence)
        else:
            self.waiting.discard(sequence)
        sequence.state = State.FINISHED
        self.ghosts.pop(sequence.id, None)
        del self.sequences[sequence.id]
        if self.fluid is not None:
            self.fluid.leave(sequence.id)
        if sequence.index == 0:
            self.release_siblings(request)
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            self._forget(request)
            # Breaks the reference cycle, so the request is freed at once.
            request.sequences.clear()

    def _forget(self, request: Request) -> None:
        del self.requests[request.admit.id]
        self.grammars.leave(request.admit)
        if self.running.states is not None:
            self.running.states.close(request.admit.id)


# The most sequences that one step sets aside.
MAX_PASSED = 64
# The most starts of other sequences that one sequence waits for.
MAX_PASSES = 256


def start_waiting(
    table: SequenceTable, builder: StepBuilder, max_num_running: int, *, only_returning: bool
) -> None:
    """Start queued sequences in their order, until one finds no room.

    Args:
        only_returning: start only sequences that ran before.
    """
    passed: list[tuple[Queue, Sequence]] = []
    while builder.budget > 0 and len(table.running) < max_num_running:
        sequence = table.waiting.head(only_returning=only_returning)
        if sequence is None:
            break
        if not table.grammars.is_ready(sequence.request.admit):
            table.waiting.park(sequence)
            continue
        if not table.running.has_adapter_room(sequence):
            if len(passed) >= MAX_PASSED or sequence.num_passed >= MAX_PASSES:
                break
            passed.append(table.waiting.set_aside(sequence))
            continue
        if not table.running.start(sequence, builder):
            break
        table.waiting.discard(sequence)
        table.outputs.add_start(sequence.id)
        for _, other in passed:
            other.num_passed += 1
    for queue, sequence in passed:
        queue.push(sequence)
