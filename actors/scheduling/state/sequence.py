"""A request and its sequences as the scheduler sees them, with what follows from them alone.

Mutable state of one owner, the scheduling policy; never sent anywhere.  Law of a sequence's counters:

    0 ≤ num_computed_on_device ≤ num_computed < num_tokens + num_in_flight ≤ limit        while it may run

    positions   0 … num_computed_on_device … num_computed … num_tokens + num_in_flight
                │ KV is there              │ a step in    │ not planned
                │                          │ flight       │

A token that a step in flight samples is a placeholder: counted by `num_in_flight`, known to the device.  Drafts in flight are
not counted until they are known to be right: then every position behind moves, those of plans in flight too.

Detection of an output that repeats itself.  Pure.
"""

import hashlib
from enum import Enum

import msgspec

from trouper.actors.messages.requests import Admit, SequenceId
from trouper.actors.messages.steps import Sampling, TokenLogprobs
from trouper.actors.scheduling.routing import Demand
from trouper.actors.scheduling.state.kv_blocks import FIRST_PARENT, block_hash
from trouper.config.resolve import SchedulerConfig
from trouper.outputs import FinishReason
from trouper.params import RepetitionDetectionParams

Order = tuple[int, float, int, int]  # smaller runs first; unique


class State(Enum):
    """Stage of a sequence's life."""

    WAITING = "waiting"  # never ran
    RUNNING = "running"  # holds a request slot
    PREEMPTED = "preempted"  # ran, and will be recomputed
    FINISHED = "finished"


class Request(msgspec.Struct, eq=False):
    """Client's request, and the sequences grown for it."""

    admit: Admit
    sampling: Sampling  # of the first sequence
    stop_ids: frozenset[int]  # the primary EOS included
    max_drafts: int  # of one sequence in a step
    sequences: "list[Sequence]"
    deferred: "list[Sequence]"  # siblings that wait for the leader's prompt to be computed
    num_unfinished: int
    prompt_hashes: list[bytes]  # of the full prompt blocks; filled at the first lookup
    replica: int = 0  # that it is with
    num_expected: int = 0  # prompt tokens that its replica should have in the cache

    def demand(self, block_size: int) -> Demand:
        """Describe what it asks of a replica; `block_size`: of the prefixes that are kept, 0 if none is."""
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
        """Tell whether the token ends an output that matches a grammar."""
        grammar = self.admit.grammar
        return grammar is not None and token in grammar.eos_token_ids


class Sequence(msgspec.Struct, eq=False, kw_only=True):
    """One list of tokens being grown."""

    id: SequenceId
    index: int  # in its request; 0 is the leader
    request: Request
    order: Order
    num_prompt: int
    limit: int  # tokens at which it ends, whatever they are
    num_tokens: int  # known ones: prompt and output
    output: list[int]
    state: State = State.WAITING
    request_slot: int = -1  # on the device; -1 = none
    is_slot_stale: bool = True  # the device must be given all of the sequence
    preemption_epoch: int = 0  # counts preemptions
    valid_from_epoch: int = 0  # results of earlier epochs are dropped
    blocks: list[int]
    hashes: list[bytes]
    num_registered: int = 0  # blocks known to the prefix cache
    num_computed: int = 0
    num_computed_on_device: int = 0
    num_in_flight: int = 0
    sampling_step: int = 0  # the newest step that samples a token of it
    num_preemptions: int = 0
    num_evictions: int = 0  # preemptions for another's growth
    num_passed: int = 0  # starts of others while its adapter had to wait
    has_landed: bool = False  # a step of it has been answered
    # It has ended for its client, and is computed on to find out whether it kills the device: nothing of it is put out.
    is_ghost: bool = False
    num_cached: int = 0  # prompt tokens found in the cache when it first started
    prompt_logprobs: list[TokenLogprobs]  # not put out yet
    num_prompt_logprobs: int = 0  # seen so far

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.output)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens at positions start … stop - 1, of prompt and output."""
        prompt, num_prompt = self.request.admit.prompt_token_ids, self.num_prompt
        if stop <= num_prompt:
            return prompt[start:stop]
        return prompt[start:] + tuple(self.output[max(0, start - num_prompt) : stop - num_prompt])

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Return the hash chain of the first `count` blocks, all of whose tokens are known."""
        hashes, shared = self.hashes, self.request.prompt_hashes
        if len(hashes) < min(count, len(shared)):
            hashes.extend(shared[len(hashes) :])
        admit = self.request.admit
        salt, digests, adapter = admit.cache_salt, admit.embeds_digests, admit.adapter
        for i in range(len(hashes), count):
            tokens = self.token_ids(i * block_size, (i + 1) * block_size)
            extra = salt.encode() if salt is not None and i == 0 else b""
            if admit.options.cache_scope and i == 0:
                # In front, and only the server writes it: a client's salt cannot name another client's scope.
                extra = b"\0\0\0" + hashlib.sha256(admit.options.cache_scope).digest() + extra
            if adapter is not None and i == 0:
                extra += b"\0\0" + adapter.number.to_bytes(8)  # 10 bytes; a digest adds 33
            if i < len(digests) and digests[i]:
                extra += (
                    b"\0" + digests[i]
                )  # a salt has no NUL, so no two extras are the same bytes
            hashes.append(block_hash(hashes[-1] if hashes else FIRST_PARENT, tokens, extra))
            if i == len(shared) and (i + 1) * block_size <= self.num_prompt:
                shared.append(hashes[-1])
        return hashes[:count]

    def append(self, token: int) -> tuple[FinishReason, int | str | None] | None:
        """Commit a sampled token; return finish and stop reason if it is the last.

        Under `min_tokens` outputs only the length ends it (the sampler masks the stop ids anyway), and the end of a grammar.
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
        """Take the logprobs of prompt tokens start + 1 …; a recomputed chunk brings known ones again."""
        self.prompt_logprobs.extend(entries[max(0, self.num_prompt_logprobs - start) :])
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + len(entries))

    def sampling(self) -> Sampling:
        """Return the device's parameters: child i has the seed of child 0 plus i; one child scores the prompt."""
        shared = self.request.sampling
        if self.index == 0 and (not self.output or shared.prompt_logprobs is None):
            return shared
        return msgspec.structs.replace(
            shared, seed=as_int64(shared.seed + self.index), prompt_logprobs=None
        )


def open_request(admit: Admit, number: int, config: SchedulerConfig, capacity: int) -> Request:
    """Make the request and its n sequences, of which all but the leader are deferred.

    `number` counts admissions; all blocks together hold the KV of `capacity` tokens.
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
    # The last token needs no KV, which no later token would read.
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
    """Wrap a number into 64 bits, as two's complement does."""
    return (value + 2**63) % 2**64 - 2**63


def _sampling(admit: Admit, stop_ids: list[int], engine_seed: int) -> Sampling:
    params = admit.params
    seed = params.seed
    if seed is None:  # fixed by the engine's seed and the request alone: a replay samples the same
        text = f"{engine_seed}:{admit.id}".encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    return Sampling(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed_token_ids=tuple(params.allowed_token_ids or ()),
        bad_words_ids=admit.bad_words_ids,
        min_tokens=params.min_tokens,
        stop_ids=tuple(stop_ids) if params.min_tokens else (),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=tuple(params.logprob_token_ids or ()),
    )


def is_repeating(tokens: list[int], rule: RepetitionDetectionParams) -> bool:
    """Whether the tail is one pattern of `min_pattern_size` … `max_pattern_size` tokens, `min_count` times.

    Called after every token.  A tail has a period when it equals itself shifted by that period, so the last
    token decides most sizes at once; the others cost two slices.
    """
    num_tokens = len(tokens)
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        begin = num_tokens - size * rule.min_count
        if begin < 0:
            return False  # longer patterns need even more tokens
        if tokens[-1] == tokens[-1 - size] and tokens[begin:-size] == tokens[begin + size :]:
            return True
    return False
