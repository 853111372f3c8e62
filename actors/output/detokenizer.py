"""The detokenizer actor: it turns the tokens of each step into text, and writes the reply slots.

It needs only one half of a tokenizer, text from tokens.  The protocols here describe that half, so the output actors do not
depend on the renderer, which owns the tokenizer.  As outputs pass, it also collects the statistics of their requests, one
`OutputStats` for each of its turns.

Laws:
1. It never waits for a client, because the slots merge unread results.
2. A result for an unknown sequence is late, and is ignored.
3. A failure while one request is detokenised ends only that request.
4. A sequence is forgotten at once if a stop string or a failure ends it; the `Stop` of this step names it.  Any other sequence stays
   until its finishing update arrives.
5. The event loop gets a turn after at most `WORK_PER_TURN` results.
6. A request counts once in the statistics, however many completions it has: its first token is that of the first completion to have
   one, its end that of the last.  With statistics off nothing is recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, assert_never

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.actors.messages.controls import DetokenizerInbox, SchedulerInbox
from trouper.actors.messages.outputs import (
    OutputStats,
    RequestEnded,
    SequenceTokens,
    StepTokens,
    Stop,
)
from trouper.actors.messages.requests import RequestId, SequenceId, Track
from trouper.actors.messages.sinks import GenerationSink, VisibleText
from trouper.actors.messages.steps import TokenLogprobs
from trouper.actors.output.stops import TextState, VisibleStops
from trouper.actors.runtime.event_loop import Reporter
from trouper.errors import GenerationError, TrouperError
from trouper.outputs import FinishReason, Logprob, LogprobsOnePosition, RequestStateStats
from trouper.params import SamplingParams


class SequenceTimes(msgspec.Struct):
    """Counts and times of one completion.

    They are kept per completion, because the latency between tokens concerns one stream of tokens. A request has one
    of them for each completion.
    """

    num_preemptions: int = 0
    num_tokens: int = 0
    last_token_s: float = 0.0  # of no meaning before the first


class OutputStatsCollector:
    """Collects latencies and ends of requests until `send`, separately for each replica.

    Each method does nothing if statistics are off, so callers need no conditions.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._first_token_s: list[float] = []
        self._inter_token_s: list[float] = []
        self._ended: list[RequestEnded] = []
        self._replica = 0  # that the lists are of
        self._others: list[OutputStats] = []  # of this turn

    def choose(self, replica: int) -> None:
        """Select the replica for which the following calls count.

        Numbers for the earlier replica are kept until `send`.
        """
        if replica != self._replica:
            self._others += self._take()
            self._replica = replica

    def note_queued(self, stats: RequestStateStats, now: float) -> None:
        """Note that a request has been rendered and waits to run."""
        if self.reporter.is_on:
            stats.queued_ts = now

    def note_start(self, stats: RequestStateStats, now: float) -> None:
        """Note that one of a request's sequences takes a request slot.

        Only the first of its sequences determines the time in the queue. Later starts follow preemptions.
        """
        if self.reporter.is_on and stats.scheduled_ts is None:
            stats.scheduled_ts = now

    def note_preemptions(
        self, stats: RequestStateStats, times: SequenceTimes, num_preemptions: int
    ) -> None:
        """Note how often a sequence has been preempted so far.

        The scheduler reports a total, and only the difference to the last report is added.
        """
        stats.num_preemptions += num_preemptions - times.num_preemptions
        times.num_preemptions = num_preemptions

    def note_tokens(
        self, stats: RequestStateStats, times: SequenceTimes, num_tokens: int, now: float
    ) -> None:
        """Record the arrival of tokens of a sequence.

        The first tokens of a request give its time to first token, and later ones the latency between tokens.
        """
        if not self.reporter.is_on:
            return
        if times.num_tokens:
            self._inter_token_s.append(now - times.last_token_s)
        elif stats.first_token_ts is None:
            stats.first_token_ts = now
            self._first_token_s.append(now - stats.arrival_ts)
        times.last_token_s = stats.last_token_ts = now
        times.num_tokens += num_tokens
        stats.num_generation_tokens += num_tokens
        if times.num_tokens > stats.max_num_generation_tokens:
            stats.max_num_generation_tokens = times.num_tokens

    def note_end(self, ended: RequestEnded, now: float) -> None:
        """Note that a request has ended.

        Its final numbers go to the observer with the next `send`.
        """
        if self.reporter.is_on:
            ended.stats.finished_ts = now
            self._ended.append(ended)

    def send(self) -> None:
        """Report the collected numbers, if there are any, in one message for each replica.

        If the observer's inbox is full, they are dropped instead of delaying outputs.
        """
        for stats in (*self._others, *self._take()):
            self.reporter.report(stats)
        self._others.clear()

    def _take(self) -> list[OutputStats]:
        if not (self._first_token_s or self._inter_token_s or self._ended):
            return []
        stats = OutputStats(
            tuple(self._first_token_s),
            tuple(self._inter_token_s),
            tuple(self._ended),
            self._replica,
        )
        self._first_token_s.clear()
        self._inter_token_s.clear()
        self._ended.clear()
        return [stats]


class TextStream(Protocol):
    """Decode one growing sequence token by token.

    It holds back incomplete characters and white space with a form that depends on the next token.
    """

    def push(self, token_id: int) -> str:
        """Append a token.

        Returns the completed text, empty inside a character.

        The texts of all pushes together are the decoded sequence.  Nothing is ever taken back.
        """
        ...


class TokenDecoder(Protocol):
    """The decoding half of a tokenizer.

    Tokenizers implement it; the detokenizer needs nothing else of them.
    """

    def stream(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """Open a stream for a sequence behind the prompt.

        The end of the prompt decides about the white space in front of the first token.
        """
        ...

    def token_text(self, token_id: int, before: Sequence[int] = ()) -> str:
        """Return the text of one token behind the tokens `before`, for logprobs.

        It may be a replacement character if the token contains only a part of a character.
        """
        ...


def position_logprobs(
    position: TokenLogprobs,
    tokenizer: TokenDecoder | None,
    before: Sequence[int],
    *,
    is_ranked: bool = True,
) -> LogprobsOnePosition:
    """Return the candidates at one position: the sampled (or prompt) token first, then the others by falling logprob.

    Args:
        before: the tokens in front of this position, which may contain the first bytes of a character.
        is_ranked: False if the caller has chosen the candidates.  Then only the first one has a rank.
    """
    first, *others = position.token_ids
    table = {first: Logprob(position.logprobs[0], position.rank, _text(tokenizer, first, before))}
    rank = 0
    first_is_repeated = first in others
    for token_id, logprob in zip(others, position.logprobs[1:], strict=True):
        rank += 1
        if token_id == first:
            continue
        if rank == position.rank and not first_is_repeated:
            # This rank belongs to the first token.
            rank += 1
        text = _text(tokenizer, token_id, before)
        table[token_id] = Logprob(logprob, rank if is_ranked else None, text)
    return table


def _text(tokenizer: TokenDecoder | None, token_id: int, before: Sequence[int]) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id, before)


# Tokens and logprob candidates; the readers that they wake run in the same turn, 40 µs each over HTTP.
WORK_PER_TURN = 8
# A UTF-8 character has at most four bytes, with one token for each byte in the worst case.
MAX_CHARACTER_TOKENS = 4


class DetokenizerSnapshot(msgspec.Struct, frozen=True):
    """The state of the detokenizer."""

    # The tracked sequences.
    sequences: tuple[SequenceId, ...]


class _Request(msgspec.Struct):
    id: RequestId
    slot: GenerationSink
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    trace_headers: Mapping[str, str] | None
    visible: Callable[[], VisibleText] | None  # of each sequence
    num_open: int  # sequences without an end
    num_prompt_logprobs: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason = "abort"  # the last sequence's; an error stays
    error_code: str | None = None


class _Sequence(msgspec.Struct):
    """The state of one completion.  `text` is created with its first tokens."""

    request: _Request
    index: int
    text: TextState | VisibleStops | None = None
    recent: tuple[int, ...] = ()  # the last tokens, for logprob texts
    times: SequenceTimes = msgspec.field(default_factory=SequenceTimes)


class Detokenizer:
    """The actor that converts tokens to text and writes reply slots.

    It owns the table of tracked sequences; no other task reads or writes it.
    """

    def __init__(
        self,
        inbox: MemoryObjectReceiveStream[DetokenizerInbox],
        scheduler: MemoryObjectSendStream[SchedulerInbox],
        tokenizer: TokenDecoder | None,
        reporter: Reporter | None = None,
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._stats = OutputStatsCollector(reporter or Reporter(None))
        self._sequences: dict[SequenceId, _Sequence] = {}

    def __repr__(self) -> str:
        return f"<Detokenizer {len(self._sequences)} sequences>"

    @property
    def num_tracked(self) -> int:
        """Count the tracked sequences.

        A sequence is tracked from rendering until its end was written.
        """
        return len(self._sequences)

    def snapshot(self) -> DetokenizerSnapshot:
        """Describe which sequences are tracked."""
        return DetokenizerSnapshot(tuple(self._sequences))

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self._inbox, self._scheduler, self._stats.reporter:
            task_status.started()
            async for message in self._inbox:
                match message:
                    case Track():
                        self._track(message)
                    case StepTokens():
                        await self._tell_all(message)
                    case _:
                        assert_never(message)

    def _track(self, message: Track) -> None:
        message.slot.start(
            message.prompt, message.prompt_token_ids, message.placeholders, message.audio_seconds
        )
        self._stats.note_queued(message.slot.stats, anyio.current_time())
        n = message.params.n
        request = _Request(
            message.id,
            message.slot,
            message.params,
            message.prompt_token_ids,
            message.options.trace_headers,
            None
            if message.options.visible is None
            else partial(message.options.visible, message.prompt, message.prompt_token_ids),
            num_open=n,
        )
        for index in range(n):
            self._sequences[SequenceId(message.id + index)] = _Sequence(request, index)
        if resumed := message.options.resumed_token_ids:
            # Stop strings may begin in them.  Their text has been returned by an earlier process.
            leader = self._sequences[SequenceId(message.id)]
            leader.text = self._open_text(request)
            leader.text.push(resumed)
            leader.recent = resumed[1 - MAX_CHARACTER_TOKENS :]

    async def _tell_all(self, message: StepTokens) -> None:
        await anyio.lowlevel.checkpoint()
        now = anyio.current_time()
        stopped: list[SequenceId] = []
        work = 0
        for id in message.started:
            if (sequence := self._sequences.get(id)) is not None:
                self._stats.note_start(sequence.request.slot.stats, now)
        for expected in message.expected:
            if (sequence := self._sequences.get(expected.id)) is not None:
                sequence.request.slot.note_expected(
                    expected.seconds, is_least=expected.is_least, error=expected.error
                )
        for update in message.sequences:
            work += _work(update)
            if work > WORK_PER_TURN:
                await anyio.lowlevel.checkpoint()
                work = 0
            stopped.extend(self._take_update(update, now))
        if stopped:
            try:
                self._scheduler.send_nowait(Stop(tuple(stopped)))  # room is reserved by the wiring
            except anyio.BrokenResourceError:
                pass  # the engine is going down, and its end ends every sequence
        self._stats.send()
        for answer in message.answers:
            answer.set(None)

    def _take_update(self, update: SequenceTokens, now: float) -> list[SequenceId]:
        """Write the update of one sequence to its slot; return the sequences that the scheduler must drop."""
        sequence = self._sequences.get(update.id)
        if sequence is None:
            return []
        request, reason = sequence.request, update.finish_reason
        self._stats.choose(update.replica)
        self._stats.note_preemptions(request.slot.stats, sequence.times, update.num_preemptions)
        if reason is not None:
            del self._sequences[update.id]
        stopped: list[SequenceId] = []
        if not request.slot.is_closed:
            try:
                if self._write(sequence, update, now):
                    stopped = (
                        [update.id] if self._sequences.pop(update.id, None) is not None else []
                    )
                    reason = "stop"
            except Exception as error:  # it is this request's, whatever it is
                request.slot.fail(_typed(error))
                stopped = self._forget(request)
                request.num_open, reason = 1, "error"
                request.error_code = "detokenizing_error"
        if reason is not None:
            self._note_end(request, reason, now)
        return stopped

    def _forget(self, request: _Request) -> list[SequenceId]:
        ids = [SequenceId(request.id + index) for index in range(request.params.n)]
        return [id for id in ids if self._sequences.pop(id, None) is not None]

    def _write(self, sequence: _Sequence, update: SequenceTokens, now: float) -> bool:
        """Write the slot; True when a stop string has ended the sequence."""
        request = sequence.request
        slot = request.slot
        # The other completions share the first one's prompt.
        if update.num_cached_tokens is not None and sequence.index == 0:
            request.num_cached_tokens = update.num_cached_tokens
            slot.note_cached_tokens(update.num_cached_tokens)
        if update.prompt_logprobs and sequence.index == 0:
            self._write_prompt_logprobs(request, update)
        if update.error is not None:
            error = update.error
            request.error_code = error.code
            slot.note_error(error)
        if not update.token_ids and update.finish_reason is None:
            return False
        if sequence.text is None:
            sequence.text = self._open_text(request)
        delta = sequence.text.push(
            update.token_ids,
            is_last=update.finish_reason is not None,
            ends_with_stop_token=update.finish_reason == "stop",
        )
        token_ids = update.token_ids[: delta.num_tokens]
        if token_ids:
            self._stats.note_tokens(slot.stats, sequence.times, len(token_ids), now)
        slot.write(
            sequence.index,
            delta.text,
            token_ids,
            logprobs=self._logprobs(sequence, update, token_ids),
            finish_reason=update.finish_reason if delta.stop is None else "stop",
            stop_reason=update.stop_reason if delta.stop is None else delta.stop,
        )
        return delta.stop is not None

    def _note_end(self, request: _Request, reason: FinishReason, now: float) -> None:
        """Note the end of a sequence; the last one's is the end of the request."""
        request.num_open -= 1
        if request.finish_reason != "error":
            request.finish_reason = reason
        if request.num_open > 0:
            return
        ended = RequestEnded(
            request_id=request.slot.request_id,
            stats=request.slot.stats,
            finish_reason=request.finish_reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            params=request.params,
            trace_headers=request.trace_headers,
            error_code=request.error_code,
        )
        self._stats.note_end(ended, now)

    def _open_text(self, request: _Request) -> TextState | VisibleStops:
        return open_text(self._tokenizer, request.params, request.prompt_token_ids, request.visible)

    def _logprobs(
        self, sequence: _Sequence, update: SequenceTokens, token_ids: tuple[int, ...]
    ) -> list[LogprobsOnePosition] | None:
        if not update.logprobs:
            return None
        positions: list[LogprobsOnePosition] = []
        for token_id, position in zip(token_ids, update.logprobs, strict=False):
            positions.append(
                position_logprobs(
                    position,
                    self._tokenizer,
                    sequence.recent,
                    is_ranked=sequence.request.params.logprob_token_ids is None,
                )
            )
            sequence.recent = (*sequence.recent, token_id)[1 - MAX_CHARACTER_TOKENS :]
        return positions

    def _write_prompt_logprobs(self, request: _Request, update: SequenceTokens) -> None:
        positions: list[LogprobsOnePosition] = []
        for position in update.prompt_logprobs:
            request.num_prompt_logprobs += 1
            end = request.num_prompt_logprobs  # position 0 has none, so this one's index
            before = request.prompt_token_ids[max(0, end + 1 - MAX_CHARACTER_TOKENS) : end]
            positions.append(position_logprobs(position, self._tokenizer, before))
        request.slot.extend_prompt_logprobs(positions)


def open_text(
    tokenizer: TokenDecoder | None,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    visible: Callable[[], VisibleText] | None,
) -> TextState | VisibleStops:
    """Return the empty text of an answer.

    Args:
        visible: makes the filter of the part in which stop strings count; None means all text.
    """
    if tokenizer is None or not params.detokenize:
        return TextState(lambda _: "")
    stream = tokenizer.stream(
        prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    if visible is not None and params.stop_strings:
        return VisibleStops(
            stream.push,
            params.stop_strings,
            visible(),
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )
    return TextState(
        stream.push,
        params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )


def _work(update: SequenceTokens) -> int:
    work = 1 + len(update.token_ids)
    for positions in (update.logprobs, update.prompt_logprobs):
        if positions:
            work += sum(len(position.token_ids) for position in positions)
    return work


def _typed(error: Exception) -> Exception:
    if isinstance(error, TrouperError):
        return error
    wrapped = GenerationError(f"detokenising failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
