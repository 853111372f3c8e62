"""A request and its sequences in the scheduler, the rules that need nothing else, and the outputs that leave it.

One policy owns this mutable state.  It is never sent anywhere.  The counters of a runnable sequence obey:

    0 ≤ num_computed_on_device ≤ num_computed < num_tokens + num_in_flight ≤ limit

    positions   0 … num_computed_on_device … num_computed … num_tokens + num_in_flight
                │ KV computed              │ in flight    │ not planned

A token that a step in flight samples is a placeholder: `num_in_flight` counts it, and only the device knows its id.  Drafts in flight
are not counted until they are accepted.  Then every later position moves, also in the plans in flight.

`SchedulerOutputs` holds outputs on their way to the detokenizer.  Several steps of a sequence become one entry, so a slow detokenizer
cannot make it grow beyond the unfinished sequences and their new tokens.
"""

import hashlib
from bisect import bisect_left
from enum import Enum

import msgspec

from trouper.actors.messages.outputs import SequenceTokens, StepTokens
from trouper.actors.messages.requests import Admit, SequenceId
from trouper.actors.messages.sinks import Promise
from trouper.actors.messages.steps import NEVER, Sampling, TokenLogprobs
from trouper.actors.scheduling.routing import Demand
from trouper.actors.scheduling.state.kv_blocks import FIRST_PARENT, block_hash
from trouper.config.engine_config import SchedulerConfig
from trouper.outputs import FinishReason
from trouper.params import RepetitionDetectionParams
from trouper.sampling_fields import DeviceFields

# Negative priority, arrival time, number of the request, index of the sequence.  A smaller order runs first; all are different.
Order = tuple[int, float, int, int]


class State(Enum):
    """The stage of a sequence.

    The transitions are those of `SequenceTable`; a finished sequence never changes again.
    """

    # Has never run.
    WAITING = "waiting"
    # Holds a request slot.
    RUNNING = "running"
    # Has run, and will be recomputed.
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request(msgspec.Struct, eq=False):
    """A client's request and its sequences.

    Its sequences share the prompt and its blocks, and each has its own output.
    """

    admit: Admit
    # Of the first sequence.
    sampling: Sampling
    # With the primary EOS token.
    stop_ids: frozenset[int]
    # The most drafts of one sequence in a step.
    max_drafts: int
    sequences: "list[Sequence]"
    # Siblings that wait until the leader's prompt is computed.
    deferred: "list[Sequence]"
    num_unfinished: int
    # Of the full prompt blocks, filled at the first lookup.
    prompt_hashes: list[bytes]
    replica: int = 0
    # Prompt tokens that should be in the cache of its replica.
    num_expected: int = 0

    def demand(self, block_size: int) -> Demand:
        """Describe the work for a replica, from which the router chooses one.

        Args:
            block_size: tokens of one block of the prefix cache.  0 if there is no prefix cache.
        """
        admit, leader, hashes = self.admit, self.sequences[0], list[bytes]()
        if block_size and not admit.params.skip_reading_prefix_cache:
            num_blocks = max(0, leader.num_prompt - 1) // block_size
            hashes = leader.hash_blocks(num_blocks, block_size)
        return Demand(
            leader.num_tokens,
            self.num_unfinished,
            admit.options.data_parallel_rank,
            admit.options.session_id,
            hashes,
        )

    def is_end_of_grammar(self, token: int) -> bool:
        """Whether the token ends an output under a grammar.

        It is then a regular end, also if the request ignores the model's own EOS token.
        """
        grammar = self.admit.grammar
        return grammar is not None and token in grammar.eos_token_ids


class StateMarks(msgspec.Struct, eq=False):
    """Notes of the rules of recurrent states and of windows about one sequence.  They stay empty for models without either."""

    # The row of the state with which the sequence begins, until its first step is answered; -1 for none.
    restore: int = -1
    # Up to this position others have computed its KV, but there is no state.  0 for none.
    junction: int = 0
    # The position behind which its state was last saved.
    last_saved: int = 0
    # The rows that steps in flight write, by position.
    saving: dict[int, int] = {}
    # The number of leading blocks behind each window, which the sequence has given back.
    behind: dict[int, int] = {}
    # The ends of prefixes, in blocks, whose windows stay in the prefix cache.
    cuts: tuple[int, ...] = ()


class Sequence(msgspec.Struct, eq=False, kw_only=True):
    """One growing list of tokens: the prompt and one output.

    It knows which of its tokens are computed, which blocks it holds, and when it ends.
    """

    id: SequenceId
    # Its number in the request.  0 is the leader.
    index: int
    request: Request
    order: Order
    num_prompt: int
    # It ends with this many tokens at the latest.
    limit: int
    # Known tokens: prompt and output.
    num_tokens: int
    output: list[int]
    state: State = State.WAITING
    # -1 without a slot.
    request_slot: int = -1
    # The next plan must send the whole sequence to the device.
    is_slot_stale: bool = True
    # Counts preemptions.  Results of epochs before `valid_from_epoch` are dropped.
    preemption_epoch: int = 0
    valid_from_epoch: int = 0
    blocks: list[int]
    hashes: list[bytes]
    # Blocks offered to the prefix cache.
    num_registered: int = 0
    num_computed: int = 0
    num_computed_on_device: int = 0
    # Tokens that a lost device had computed, until the sequence starts again.
    num_lost: int = 0
    num_in_flight: int = 0
    # The device has the rows of all images before this position.
    seen_until: int = 0
    # The newest step that samples one of its tokens.
    sampling_step: int = 0
    num_preemptions: int = 0
    # Preemptions for the growth of another sequence.
    num_evictions: int = 0
    # Sequences that started while it waited for an adapter slot.
    num_passed: int = 0
    # Whether the device has answered one of its steps.
    has_landed: bool = False
    # It has ended for its client, and runs on only to find out whether it kills the device.  It has no outputs.
    is_ghost: bool = False
    # Prompt tokens found in the prefix cache at its first start.
    num_cached: int = 0
    marks: StateMarks = msgspec.field(default_factory=StateMarks)
    # Not put out yet.
    prompt_logprobs: list[TokenLogprobs]
    # Received so far.
    num_prompt_logprobs: int = 0

    @property
    def num_output(self) -> int:
        """Count the tokens generated so far.

        Tokens in flight are not included, because nothing is known of them yet.
        """
        return len(self.output)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens at positions start … stop - 1, of prompt and output.

        Only this range is copied, because prompts can be long.
        """
        prompt, num_prompt = self.request.admit.prompt_token_ids, self.num_prompt
        if stop <= num_prompt:
            return prompt[start:stop]
        return prompt[start:] + tuple(self.output[max(0, start - num_prompt) : stop - num_prompt])

    def next_image(self, start: int) -> int:
        """Return the first position from `start` on that needs a row of an image which the device has not encoded."""
        for item in self.request.admit.media:
            if item.end > max(start, self.seen_until):
                return max(start, item.first + item.runs[0][0])
        return NEVER

    def span_at(self, position: int) -> tuple[int, int]:
        """Return the begin and the end of the run of tokens that see each other and that a cut here would divide, or (0, 0)."""
        spans = self.request.admit.spans
        i = bisect_left(spans, position, key=lambda span: span[1])
        return spans[i] if i < len(spans) and spans[i][0] < position < spans[i][1] else (0, 0)

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Return the hash chain of the first `count` blocks.  All their tokens must be known.

        A hash depends on all tokens before it, and on the adapter, the salt and the embeddings.
        """
        hashes, shared = self.hashes, self.request.prompt_hashes
        if len(hashes) < min(count, len(shared)):
            hashes.extend(shared[len(hashes) :])
        admit = self.request.admit
        salt, digests, adapter = admit.cache_salt, admit.row_digests, admit.adapter
        for i in range(len(hashes), count):
            tokens = self.token_ids(i * block_size, (i + 1) * block_size)
            extra = salt.encode() if salt is not None and i == 0 else b""
            if admit.options.cache_scope and i == 0:
                # The scope comes first and only the server writes it, so no salt of a client equals another client's scope.
                extra = b"\0\0\0" + hashlib.sha256(admit.options.cache_scope).digest() + extra
            if adapter is not None and i == 0:
                # 34 bytes, while a digest of embeddings adds 33.  A salt has no NUL.  So two different extras never have the same bytes.
                extra += b"\0\1" + adapter.digest
            if i < len(digests) and digests[i]:
                extra += b"\0" + digests[i]
            hashes.append(block_hash(hashes[-1] if hashes else FIRST_PARENT, tokens, extra))
            if i == len(shared) and (i + 1) * block_size <= self.num_prompt:
                shared.append(hashes[-1])
        return hashes[:count]

    def append(self, token: int) -> tuple[FinishReason, int | str | None] | None:
        """Append a sampled token.  Returns the finish reason and the stop reason if it is the last one.

        Before `min_tokens` output tokens, only the length limit and the end of a grammar end the sequence; the sampler masks
        stop tokens until then.
        """
        self.output.append(token)
        self.num_tokens += 1
        request = self.request
        params = request.admit.params
        is_long_enough = self.num_output >= params.min_tokens
        if token in request.stop_ids and (is_long_enough or request.is_end_of_grammar(token)):
            return "stop", None if token == request.admit.eos_token_id else token
        if self.num_tokens >= self.limit:
            return "length", None
        rule = params.repetition_detection
        if rule is not None and is_long_enough and is_repeating(self.output, rule):
            return "repetition", "repetition_detected"
        return None

    def take_prompt_logprobs(self, start: int, entries: tuple[TokenLogprobs, ...]) -> None:
        """Take the logprobs of prompt tokens start + 1 ….  Those that a recomputed chunk repeats are ignored."""
        self.prompt_logprobs.extend(entries[max(0, self.num_prompt_logprobs - start) :])
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + len(entries))

    def sampling(self) -> Sampling:
        """Return the parameters for the device.  Sequence i has the seed of the leader plus i; only the leader scores the prompt."""
        shared = self.request.sampling
        if self.index == 0 and (not self.output or shared.prompt_logprobs is None):
            return shared
        return msgspec.structs.replace(
            shared, seed=as_int64(shared.seed + self.index), prompt_logprobs=None
        )


def open_request(admit: Admit, number: int, config: SchedulerConfig, capacity: int) -> Request:
    """Make the request and its n sequences.  All but the leader are deferred until its prompt is computed.

    Args:
        number: the number of the admission.
        capacity: tokens that all KV blocks hold together.
    """
    stop_ids = set(admit.stop_token_ids)
    if admit.eos_token_id is not None:
        stop_ids.add(admit.eos_token_id)
    n, max_drafts = admit.params.n, admit.params.max_draft_tokens
    request = Request(
        admit=admit,
        sampling=_sampling(admit, sorted(stop_ids), config.seed),
        stop_ids=frozenset(stop_ids),
        max_drafts=config.num_speculative_tokens if max_drafts is None else max_drafts,
        sequences=[],
        deferred=[],
        num_unfinished=n,
        prompt_hashes=[],
    )
    num_prompt = len(admit.prompt_token_ids)
    max_tokens = admit.params.max_tokens or config.max_model_len
    # The last token needs no KV, because no later token reads it.
    limit = min(num_prompt + max_tokens, config.max_model_len, capacity + 1)
    rank = (0, 0.0) if config.policy == "fcfs" else (-admit.options.priority, admit.arrival_time)
    for index in range(n):
        sequence = Sequence(
            id=SequenceId(admit.id + index),
            index=index,
            request=request,
            order=(rank[0], rank[1], number, index),
            num_prompt=num_prompt,
            limit=limit,
            num_tokens=num_prompt,
            output=[],
            blocks=[],
            hashes=[],
            prompt_logprobs=[],
        )
        request.sequences.append(sequence)
    request.deferred.extend(request.sequences[1:])
    return request


def as_int64(value: int) -> int:
    """Wrap a number into 64 bits, as two's complement does.

    Client seeds may be any integer, but the device has 64 bits for them.
    """
    return (value + 2**63) % 2**64 - 2**63


def derived_seed(engine_seed: int, request_id: int) -> int:
    """Return the seed of a request that gives none.

    Only the engine's seed and the number of the request determine it, so a replay samples the same tokens.
    """
    digest = hashlib.sha256(f"{engine_seed}:{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _sampling(admit: Admit, stop_ids: list[int], engine_seed: int) -> Sampling:
    params = admit.params
    seed = params.seed
    if seed is None:
        seed = derived_seed(engine_seed, admit.id)
    given = {name: getattr(params, name) for name in DeviceFields.__struct_fields__}
    # Structs with immutable fields cross to the device, so lists become tuples.
    return Sampling(
        **given,
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        temperature=0.0 if params.is_greedy else params.temperature,
        seed=seed,
        logit_bias=tuple((params.logit_bias or {}).items()),
        bad_words_ids=admit.bad_words_ids,
        stop_ids=tuple(stop_ids) if params.min_tokens else (),
    )


def is_repeating(tokens: list[int], rule: RepetitionDetectionParams) -> bool:
    """Whether the output ends with `min_count` repetitions of a pattern of `min_pattern_size` … `max_pattern_size` tokens.

    It is called after every token, so it must be fast.  A tail with a period equals itself shifted by that period.  Comparing one
    token excludes most sizes; only the others need two slices.
    """
    num_tokens = len(tokens)
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        begin = num_tokens - size * rule.min_count
        if begin < 0:
            return False
        if tokens[-1] == tokens[-1 - size] and tokens[begin:-size] == tokens[begin + size :]:
            return True
    return False


class SchedulerOutputs:
    """Collect outputs until they are taken.  A later entry of a sequence is appended to its earlier one.

    Its size is bounded by the number of sequences, however long the detokenizer takes.
    """

    def __init__(self) -> None:
        self._entries: dict[SequenceId, SequenceTokens] = {}
        self._started: list[SequenceId] = []

    def add_start(self, id: SequenceId) -> None:
        """Note that a sequence has started: for the first time or after a preemption.

        The detokenizer uses it for the times of the request only.
        """
        self._started.append(id)

    def add_tokens(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        end: tuple[FinishReason, int | str | None] | None,
        logprobs: tuple[TokenLogprobs, ...],
    ) -> None:
        """Add sampled tokens.  With the first ones go the prompt's logprobs and its number of cached tokens.

        `end` is the finish reason with the stop token or string, or None while the sequence continues.
        """
        finish_reason, stop_reason = end if end is not None else (None, None)
        is_first = len(sequence.output) == len(token_ids)
        entry = SequenceTokens(
            sequence.id,
            token_ids,
            finish_reason,
            stop_reason,
            logprobs,
            tuple(sequence.prompt_logprobs) if is_first else (),
            sequence.num_cached if is_first else None,
            num_preemptions=sequence.num_preemptions,
            replica=sequence.request.replica,
        )
        if is_first:
            sequence.prompt_logprobs.clear()
        self.add(entry)

    def add(self, entry: SequenceTokens) -> None:
        """Add an entry, appended to the earlier entry of its sequence if there is one.

        A reason to finish of the later entry is kept.
        """
        earlier = self._entries.get(entry.id)
        if earlier is not None:
            entry = msgspec.structs.replace(
                entry,
                token_ids=earlier.token_ids + entry.token_ids,
                logprobs=earlier.logprobs + entry.logprobs,
                prompt_logprobs=earlier.prompt_logprobs + entry.prompt_logprobs,
                num_cached_tokens=earlier.num_cached_tokens
                if entry.num_cached_tokens is None
                else entry.num_cached_tokens,
            )
        self._entries[entry.id] = entry

    def withdraw(self, id: SequenceId) -> None:
        """Drop the entry of a sequence, if it has one.

        A sequence ended by a stop string must have no further output.
        """
        self._entries.pop(id, None)

    def take(self, answers: tuple[Promise[None], ...] = ()) -> StepTokens | None:
        """Take all outputs as one message with `answers`.  Returns None if there are neither outputs nor answers."""
        if not (self._entries or self._started or answers):
            return None
        message = StepTokens(tuple(self._entries.values()), tuple(self._started), answers)
        self._entries.clear()
        self._started.clear()
        return message
