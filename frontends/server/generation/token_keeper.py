"""Keep the tokens of one answer in the journal, and read those that an earlier process has kept.

An output of the engine contains what was sampled since the last one was read, so its size depends on the reader's pace.  Events made of
it would differ from run to run, and so would the positions that clients remember.  So an output is divided into its tokens here.  The text
after some tokens depends on these tokens only.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from trouper.actors.messages.sinks import VisibleText
from trouper.actors.output.detokenizer import TokenDecoder, open_text
from trouper.actors.output.stops import TextState, VisibleStops
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.records import StreamRecord, Tokens
from trouper.frontends.server.generation.adapter import ParsedRequest
from trouper.outputs import CompletionOutput, RequestOutput


class TokenSplitter:
    """Divides the outputs of one completion into its tokens, each with the text that it adds.

    Args:
        text: the text of the answer, to which nothing was added yet.
    """

    def __init__(self, text: TextState | VisibleStops) -> None:
        self._text = text

    def split(self, output: RequestOutput) -> list[RequestOutput]:
        """Return one output for each token.  An output without tokens, which ends the answer, stays as it is."""
        (completion,) = output.outputs
        ids, logprobs = completion.token_ids, completion.logprobs
        if not ids:
            rest = self._text.push((), is_last=output.finished)
            return [_with(output, completion, completion.token_ids, rest.text, is_last=True)]
        found: list[RequestOutput] = []
        for i, token in enumerate(ids):
            is_last = i == len(ids) - 1
            ends = is_last and completion.finish_reason is not None
            # A stop string is found in the text.  The text of a stop token is left out.
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
    """Return an output with some of its tokens.  Only the last ones have the end."""
    part = msgspec.structs.replace(completion, token_ids=token_ids, text=text)
    if not is_last:
        part.finish_reason = part.stop_reason = None
    return msgspec.structs.replace(output, outputs=[part], finished=output.finished and is_last)


class TokenKeeper:
    """`OutputKeeper` of one answer.

    Args:
        id: of the stream in the journal.
        record: what an earlier process has kept.
    """

    def __init__(
        self,
        journal: Journal,
        id: str,
        parsed: ParsedRequest,
        tokenizer: TokenDecoder | None,
        record: StreamRecord | None = None,
    ) -> None:
        self._journal, self._id, self._parsed, self._tokenizer = journal, id, parsed, tokenizer
        self._splitter: TokenSplitter | None = None
        self._num_tokens = 0
        self.known: list[RequestOutput] = []
        kept = [] if record is None else record.tokens
        for tokens in kept:
            output = _output_of(id, tokens, kept[0])
            self._num_tokens += len(tokens.token_ids)
            self.known += self._split(output)

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that an earlier process has kept."""
        return tuple(token for output in self.known for token in output.outputs[0].token_ids)

    def whole(self) -> RequestOutput | None:
        """Return the complete output, if an earlier process has kept it."""
        if not self.known or not self.known[-1].finished:
            return None
        parts = [output.outputs[0] for output in self.known]
        logprobs = [each for part in parts for each in part.logprobs or ()]
        completion = msgspec.structs.replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=list(self.known_token_ids),
            logprobs=logprobs or None,
        )
        return msgspec.structs.replace(self.known[-1], outputs=[completion])

    async def keep(self, output: RequestOutput) -> Sequence[RequestOutput]:
        """Write an output, and return it as one output for each token."""
        parts = self._split(output)
        completion = output.outputs[0]
        is_first = self._num_tokens == 0
        tokens = Tokens(
            self._id,
            self._num_tokens,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.stop_reason,
            output.prompt if is_first else None,
            output.prompt_token_ids if is_first else [],
            output.num_cached_tokens if is_first else None,
        )
        self._num_tokens += len(completion.token_ids)
        await self._journal.write(tokens)
        return parts

    def _split(self, output: RequestOutput) -> list[RequestOutput]:
        if self._splitter is None:
            visible = self._parsed.options.visible
            make: Callable[[], VisibleText] | None = None
            if visible is not None:
                make = partial(visible, output.prompt, output.prompt_token_ids)
            text = open_text(self._tokenizer, self._parsed.params, output.prompt_token_ids, make)
            self._splitter = TokenSplitter(text)
        return self._splitter.split(output)


def _output_of(id: str, tokens: Tokens, first: Tokens) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        finish_reason=tokens.finish_reason,  # type: ignore[arg-type]
        stop_reason=tokens.stop_reason,
    )
    return RequestOutput(
        request_id=id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=None,
        outputs=[completion],
        finished=tokens.finish_reason is not None,
        num_cached_tokens=first.num_cached,
    )
