"""All unfinished sequences: where each of them waits or runs, and how it ends.

A sequence enters with its request, waits, runs, may be preempted and wait again, and ends once.  Its end
goes to the outputs, but for the ends that the detokenizer has found itself.
"""

from trouper.actors.messages.identifiers import RequestId, SequenceId
from trouper.actors.messages.outputs import SequenceTokens
from trouper.actors.messages.requests import Admit
from trouper.actors.messages.results import TokenLogprobs
from trouper.actors.messages.stats import AdapterStats
from trouper.actors.scheduling.kv_blocks import KVBlocks
from trouper.actors.scheduling.outbox import SchedulerOutputs
from trouper.actors.scheduling.running import Running
from trouper.actors.scheduling.sequences import Request, Sequence, State, open_request
from trouper.actors.scheduling.waiting import Waiting
from trouper.config.resolve import SchedulerConfig
from trouper.outputs import FinishReason


class SequenceTable:
    """Owns the queues, the running sequences and the outputs."""

    def __init__(self, config: SchedulerConfig, blocks: KVBlocks) -> None:
        self.waiting = Waiting(is_fcfs=config.policy == "fcfs")
        self.running = Running(config, blocks, self.waiting.returning)
        self.outputs = SchedulerOutputs()
        self.requests: dict[RequestId, Request] = {}
        self.sequences: dict[SequenceId, Sequence] = {}
        self.num_deferred = 0  # siblings that wait for their leader's prompt
        self.num_generation_tokens = 0
        self._config = config
        self._blocks = blocks
        self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a request slot, for blocks, or for a result in flight."""
        return len(self.sequences) - len(self.running) - self.num_deferred

    @property
    def num_started(self) -> int:
        """Unfinished sequences that ran before; a leader that did counts for its deferred siblings."""
        return len(self.sequences) - len(self.waiting.fresh) - self.num_deferred

    def ids_by_place(self) -> tuple[tuple[SequenceId, ...], ...]:
        """List the sequences that run, those that wait, and those that can do neither now; for tests and debugging."""
        running, waiting = self.running.ids, self.waiting.ids
        return running, waiting, tuple(self.sequences.keys() - {*running, *waiting})

    def adapter_stats(self) -> AdapterStats:
        """List the adapters of the running and of the other sequences."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for sequence in self.sequences.values():
            adapter = sequence.request.admit.adapter
            if adapter is not None:
                names[sequence.id in self.running].add(adapter.name)
        running, waiting = (tuple(sorted(names[is_running])) for is_running in (True, False))
        return AdapterStats(running, waiting, self._config.max_loras or 0)

    def admit(self, admit: Admit) -> None:
        """Take a request in; one that could never run ends at once."""
        num_prompt = len(admit.prompt_token_ids)
        capacity = self._blocks.num_usable * self._blocks.block_size
        self._num_admitted += 1
        request = open_request(admit, self._num_admitted, self._config, capacity)
        self.requests[admit.id] = request
        self.sequences.update((sequence.id, sequence) for sequence in request.sequences)
        self.num_deferred += len(request.deferred)
        if num_prompt == 0:
            self._end_request(request, "error", "validation_error: the prompt has no token")
        elif num_prompt >= self._config.max_model_len:
            self._end_request(request, "length")
        elif num_prompt >= capacity:
            self._end_request(
                request, "error", f"kv_cache_exhausted: {num_prompt} + 1 tokens in {capacity} slots"
            )
        else:
            self.waiting.fresh.push(request.sequences[0])

    def abort(self, id: RequestId) -> None:
        """End a request, in whatever state; unknown and finished ones are ignored."""
        request = self.requests.get(id)
        if request is not None:
            self._end_request(request, "abort")

    def stop(self, id: SequenceId) -> None:
        """Drop a sequence that a stop string has ended; it has no further output."""
        self.outputs.withdraw(id)
        sequence = self.sequences.get(id)
        if sequence is not None:
            self._finish(sequence)

    def fail(self, sequence: Sequence, error: str) -> None:
        """End a sequence whose KV is suspect."""
        self._blocks.forget(sequence.blocks)
        self._end(sequence, "error", error)

    def fail_request(self, request: Request, error: str) -> None:
        """End all sequences of a request."""
        self._end_request(request, "error", error)

    def append(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Commit sampled tokens; those behind one that ends the sequence are dropped."""
        end, num_before = None, len(sequence.output)
        for token in token_ids:
            end = sequence.append(token)
            if end is not None:
                num_taken = len(sequence.output) - num_before
                token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
                break
        self.num_generation_tokens += len(token_ids)
        self.outputs.add_tokens(sequence, token_ids, end, logprobs)
        if end is not None:
            self._finish(sequence)
        elif sequence.request_slot < 0:
            self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again, if its last result in flight has come."""
        if sequence.num_in_flight == 0:
            self.waiting.returning.push(sequence)

    def release_siblings(self, request: Request) -> None:
        """Queue the siblings of a leader whose prompt is computed, or which is gone."""
        self.num_deferred -= len(request.deferred)
        for sibling in request.deferred:
            self.waiting.returning.push(sibling)
        request.deferred.clear()

    def _end_request(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> None:
        self.num_deferred -= len(request.deferred)
        request.deferred.clear()
        for sequence in tuple(request.sequences):
            if sequence.state is not State.FINISHED:
                self._end(sequence, reason, error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence without a last token, and put its end out."""
        count = sequence.num_preemptions
        self.outputs.add(
            SequenceTokens(sequence.id, (), reason, error=error, num_preemptions=count)
        )
        self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        """Forget a sequence; of its KV only what the prefix cache keeps stays."""
        request = sequence.request
        if sequence.request_slot >= 0:
            self.running.leave(sequence)
        else:
            self.waiting.discard(sequence)
        sequence.state = State.FINISHED
        del self.sequences[sequence.id]
        if sequence.index == 0:
            self.release_siblings(request)
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self.requests[request.admit.id]
            request.sequences.clear()  # no cycle outlives it
