"""Write the tokens of one durable answer to the journal, and replay the tokens that an earlier process has written.

An output of the engine contains all tokens since the previous output was read, so its size depends on the reader's pace.  Events for whole
outputs would differ between runs, and the cursors of clients would become invalid.  So an output is split into one output for each token,
whose text depends only on the tokens so far.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from trouper.actors.messages.sinks import VisibleText
from trouper.actors.output.detokenizer import TokenDecoder, open_text
from trouper.actors.output.stops import TextState, VisibleStops
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.records import StreamRecord, Tokens
from trouper.frontends.server.durable.streams import DurableStream, lost
from trouper.frontends.server.generation.adapter import ParsedRequest
from trouper.outputs import CompletionOutput, RequestOutput


class TokenSplitter:
    """Split the outputs of one completion into single tokens, each with the text that it adds.

    Args:
        text: the empty text state of the answer.
    """

    def __init__(self, text: TextState | VisibleStops) -> None:
        self._text = text
        # Tokens that were passed on with the engine's text.  They are pushed to `_text` only if a later output must be split.
        self._behind: list[int] = []

    def pass_by(self, token: int) -> None:
        """Note an output of a single token, which needs no split because the engine's text belongs to it."""
        self._behind.append(token)

    def split(self, output: RequestOutput) -> list[RequestOutput]:
        """Return one output for each token.  An output without tokens, which only ends the answer, stays one output."""
        (completion,) = output.outputs
        ids, logprobs = completion.token_ids, completion.logprobs
        if self._behind:
            self._text.push(self._behind)
            self._behind = []
        if not ids:
            rest = self._text.push((), is_last=completion.finish_reason is not None)
            return [_with(output, completion, completion.token_ids, rest.text, is_last=True)]
        found: list[RequestOutput] = []
        for i, token in enumerate(ids):
            is_last = i == len(ids) - 1
            ends = is_last and completion.finish_reason is not None
            # The text of a stop token is omitted, in contrast to a stop string, which is found in the text.
            is_stop_token = completion.finish_reason == "stop" and not isinstance(
                completion.stop_reason, str
            )
            delta = self._text.push(
                (token,), is_last=ends, ends_with_stop_token=ends and is_stop_token
            )
            one = msgspec.structs.replace(completion, logprobs=logprobs and [logprobs[i]])
            found.append(_with(output, one, [token], delta.text, is_last=is_last))
        return found


def _with(
    output: RequestOutput,
    completion: CompletionOutput,
    token_ids: list[int],
    text: str,
    *,
    is_last: bool,
) -> RequestOutput:
    """Return a part of an output with some of its tokens.  Only the last part keeps the finish reason."""
    part = msgspec.structs.replace(completion, token_ids=token_ids, text=text)
    if not is_last:
        part.finish_reason = part.stop_reason = None
    return msgspec.structs.replace(output, outputs=[part], finished=output.finished and is_last)


class TokenKeeper:
    """Implement `OutputKeeper` for one answer, with the journal.

    Args:
        id: the id of the stream in the journal.
        record: the records of an earlier process, to be replayed.
        stream: the stream that withholds events until their tokens are written.  Without it, `keep` waits for the write.

    The journal does not contain prompt logprobs, so an answer with them is generated again from the beginning.  With the same seed, the
    tokens are the same.
    """

    def __init__(
        self,
        journal: Journal,
        id: str,
        parsed: ParsedRequest,
        tokenizer: TokenDecoder | None,
        record: StreamRecord | None = None,
        stream: DurableStream | None = None,
    ) -> None:
        self._journal, self._id, self._parsed, self._tokenizer = journal, id, parsed, tokenizer
        self._stream = stream
        self._is_kept = parsed.params.prompt_logprobs is None
        # Whether the engine's outputs have the complete text of their tokens.  In a resumed answer, text withheld before them is missing.
        self._has_all_texts = record is None
        self._n = parsed.params.n
        self._splitters: dict[int, TokenSplitter] = {}
        # The tokens so far, by choice, and the finished choices.
        self._ids: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        # The cached prompt tokens in the first process, by prompt.
        self._num_cached: dict[int, int | None] = {}
        self._firsts: dict[int, Tokens] = {}
        # The token ids of the prompts in the first process, until they were compared with this one's.
        self._prompts: dict[int, list[int]] = {}
        self.known: list[tuple[int, RequestOutput]] = []
        for tokens in [] if record is None or not self._is_kept else record.tokens:
            output = self._output_of(tokens)
            i = tokens.choice // self._n
            self._num_cached.setdefault(i, output.num_cached_tokens)
            self._prompts.setdefault(i, output.prompt_token_ids)
            self.known += [(i, part) for part in self._split(i, output)]

    @property
    def is_whole(self) -> bool:
        """Whether all choices have ended."""
        return len(self._ended) == self._parsed.num_choices

    def open_choices(self) -> Mapping[int, tuple[int, ...]]:
        """Return the unfinished choices with their recorded tokens."""
        choices = range(self._parsed.num_choices)
        return {c: tuple(self._ids.get(c, ())) for c in choices if c not in self._ended}

    def note_shown(self, i: int, output: RequestOutput) -> None:
        """Note that the events of this output come next."""
        if self._stream is not None:
            for completion in output.outputs:
                self._stream.advance(i * self._n + completion.index, len(completion.token_ids))

    async def keep(self, i: int, output: RequestOutput) -> Sequence[RequestOutput]:
        """Submit an output of prompt `i` to the journal, and return it split into one output for each token.

        Raises:
            HTTPError: the answer is resumed, but its prompt differs from the first process: a template may contain the date.
        """
        # Compared only once, because comparing a long prompt takes longer than generating a token.
        known = self._prompts.pop(i, None)
        if known is not None and known != output.prompt_token_ids:
            raise lost("its prompt has changed")
        if i in self._num_cached:
            output.num_cached_tokens = self._num_cached[i]
        records = [self._record_of(i, output, completion) for completion in output.outputs]
        parts = self._split(i, output)
        if not self._is_kept:
            return parts
        if self._stream is None:
            await self._journal.write(*records)
        else:
            for record in records:
                self._journal.put(record, self._stream)
        return parts

    def _record_of(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Tokens:
        choice = i * self._n + completion.index
        position, is_first = len(self._ids.get(choice, ())), choice not in self._ids
        places = (output.multi_modal_placeholders or {}) if is_first else {}
        return Tokens(
            self._id,
            position,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.stop_reason,
            output.prompt if is_first else None,
            output.prompt_token_ids if is_first else [],
            output.num_cached_tokens if is_first else None,
            choice,
            {name: [(a, b) for a, b in each] for name, each in places.items()} or None,
        )

    def _output_of(self, tokens: Tokens) -> RequestOutput:
        """Return the output from which a record was made."""
        choice = tokens.choice
        completion = CompletionOutput(
            index=choice % self._n,
            text="",
            token_ids=tokens.token_ids,
            logprobs=tokens.logprobs,
            finish_reason=tokens.finish_reason,  # type: ignore[arg-type]
            stop_reason=tokens.stop_reason,
        )
        first = self._firsts.setdefault(choice, tokens)
        return RequestOutput(
            request_id=self._id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=None,
            outputs=[completion],
            finished=tokens.finish_reason is not None,
            num_cached_tokens=first.num_cached,
            multi_modal_placeholders=first.media,  # type: ignore[arg-type]  # a list for a sequence
        )

    def _split(self, i: int, output: RequestOutput) -> list[RequestOutput]:
        """Split an output into the tokens of its choices, and record them as known."""
        parts: list[RequestOutput] = []
        is_single = len(output.outputs) == 1
        for completion in output.outputs:
            choice = i * self._n + completion.index
            splitter = self._splitters.get(choice)
            if splitter is None:
                splitter = self._splitters[choice] = TokenSplitter(self._open_text(output))
            if is_single and len(completion.token_ids) == 1 and self._has_all_texts:
                splitter.pass_by(completion.token_ids[0])
                parts.append(output)
            else:
                is_last = completion is output.outputs[-1]
                one = output
                if not is_single:
                    one = msgspec.structs.replace(
                        output, outputs=[completion], finished=output.finished and is_last
                    )
                parts += splitter.split(one)
            self._ids.setdefault(choice, []).extend(completion.token_ids)
            if completion.finish_reason is not None:
                self._ended.add(choice)
        return parts

    def _open_text(self, output: RequestOutput) -> TextState | VisibleStops:
        visible = self._parsed.options.visible
        make: Callable[[], VisibleText] | None = None
        if visible is not None:
            make = partial(visible, output.prompt, output.prompt_token_ids)
        return open_text(self._tokenizer, self._parsed.params, output.prompt_token_ids, make)


def joined(parts: Sequence[tuple[int, RequestOutput]]) -> list[RequestOutput]:
    """Join the single tokens of all choices into one complete output for each prompt."""
    found: dict[int, RequestOutput] = {}
    pieces: dict[tuple[int, int], list[CompletionOutput]] = {}
    for i, output in parts:
        found.setdefault(i, output)
        for completion in output.outputs:
            pieces.setdefault((i, completion.index), []).append(completion)
    for i, output in found.items():
        of_prompt = [each for (prompt, _), each in sorted(pieces.items()) if prompt == i]
        completions = [_whole(each) for each in of_prompt]
        found[i] = msgspec.structs.replace(output, outputs=completions, finished=True)
    return [found[i] for i in sorted(found)]


def _whole(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    logprobs = [each for piece in pieces for each in piece.logprobs or ()]
    return msgspec.structs.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=logprobs or None,
    )
