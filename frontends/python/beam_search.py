"""Beam search: every beam grows by one token a round.  Pure: the caller generates, and how it waits is its own.

The shared prefixes of the beams are computed once, by the prefix cache.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeGuard, cast

import msgspec

from trouper.actors.rendering.tokenizers.tokenizer import Tokenizer
from trouper.config.resolve import EngineConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.inputs import PromptType, TokensPrompt
from trouper.outputs import FinishReason, LogprobsOnePosition, RequestOutput
from trouper.params import MAX_LOGPROB_TOKEN_IDS, BeamSearchParams, SamplingParams

Generate = Callable[[Sequence[PromptType], SamplingParams], Sequence[RequestOutput]]
Decode = Callable[[list[int], bool], str]  # the flag drops special tokens

EXTRAS = ("cache_salt", "mm_processor_kwargs")  # of a prompt dict; they hold for every beam


class BeamSearchSequence(msgspec.Struct):
    """One beam: `tokens` are prompt and output ids, `text` is the decoded output."""

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobsOnePosition] = []  # a position for each token of the output


class BeamSearchOutput(msgspec.Struct):
    """The best beams, best first."""

    sequences: list[BeamSearchSequence]


class SearchLimits(NamedTuple):
    """The limits of the engine and the model that a search keeps to."""

    max_logprobs: int  # of one position; -1 is the vocabulary
    max_model_len: int
    eos_token_ids: Sequence[int]  # each of them ends a beam

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> Self:
        """Return the limits of an engine; a conversation may end with a token that its model's config does not name."""
        own = None if tokenizer is None else tokenizer.eos_token_id
        ids = dict.fromkeys((*(() if own is None else (own,)), *config.model.eos_token_ids))
        return cls(config.max_logprobs, config.max_model_len, tuple(ids))


class _Candidate(NamedTuple):
    """A beam with one token more, which few of them get."""

    beam: BeamSearchSequence
    position: LogprobsOnePosition
    token: int
    cum_logprob: float

    def grown(self) -> BeamSearchSequence:
        beam = self.beam
        return BeamSearchSequence(
            [*beam.tokens, self.token],
            self.cum_logprob,
            logprobs=[*beam.logprobs, self.position],
        )


class BeamSearch:
    """The search for the `beam_width` completions of a prompt with the highest score.

    `prompts` are the requests of the next round, each with the parameters `step`; `take` reads their outputs, until
    `is_over`.  score = cumulative logprob / max(1, generated tokens) ** length_penalty; a final EOS counts as a
    generated token, the prompt does not.

    Memory: at most 2 × `beam_width` beams, since of those that have ended only the best are kept.

    Args:
        num_logprobs: candidates of each position that the caller wants to see.

    Raises:
        TrouperValidationError: the engine gives fewer than `2 × beam_width` logprobs.
        UnsupportedFeatureError: the prompt holds embeddings.
        TypeError: not BeamSearchParams.
    """

    def __init__(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        limits: SearchLimits,
        *,
        num_logprobs: int | None = None,
    ) -> None:
        check_params(params, limits.max_logprobs)
        _check_prompt(prompt)
        self.step = _one_token(params, limits.max_logprobs, num_logprobs)
        self.is_over = False
        self.num_tokens = (0, 0)  # of the prompt, and generated in all rounds
        self.prompt_text: str | None = None
        self.prompt_token_ids: list[int] = []
        self._prompt = prompt
        self._params = params
        self._limits = limits
        self._num_rounds = 0
        self._done: list[BeamSearchSequence] = []
        self._beams: list[BeamSearchSequence] = []

    def __repr__(self) -> str:
        return f"<BeamSearch {len(self._beams)} beams after {self._num_rounds} rounds>"

    @property
    def prompts(self) -> list[PromptType]:
        """The requests of the next round."""
        return [_as_prompt(beam, self._prompt) for beam in self._beams] or [self._prompt]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Read the outputs of a round, one for each of its prompts in order."""
        if self._num_rounds == 0:
            first = outputs[0]
            self.prompt_text, self.prompt_token_ids = first.prompt, list(first.prompt_token_ids)
            self._beams = [BeamSearchSequence(list(first.prompt_token_ids))]
        num_generated = self.num_tokens[1] + len(outputs)
        self.num_tokens = (len(self.prompt_token_ids), num_generated)
        if any(output.outputs[0].finish_reason == "abort" for output in outputs):
            self._end("abort")
            return
        self._num_rounds += 1
        self._choose(
            [
                candidate
                for beam, output in zip(self._beams, outputs, strict=True)
                for candidate in _candidates(beam, output, self._params)
            ]
        )
        num_tokens = len(self.prompt_token_ids) + self._num_rounds
        is_long = num_tokens >= self._limits.max_model_len
        if not self._beams or self._num_rounds == self._params.max_tokens or is_long:
            self._end("length")

    def best(self, decode: Decode) -> BeamSearchOutput:
        """Return the best beams.

        Args:
            decode: turns the generated tokens of a beam into its text.
        """
        best = self._best([*self._done, *self._beams])
        for beam in best:
            beam.text = _text(beam, len(self.prompt_token_ids), self._params, decode)
        return BeamSearchOutput(best)

    def _choose(self, candidates: list[_Candidate]) -> None:
        """Keep the best candidates as beams, and those among them that have ended."""
        eos = () if self._params.ignore_eos else self._limits.eos_token_ids
        width = self._params.beam_width
        beams: list[BeamSearchSequence] = []
        for candidate in sorted(candidates, key=lambda each: -each.cum_logprob):
            if candidate.token in eos:
                ended = candidate.grown()
                ended.finish_reason, ended.stop_reason = "stop", candidate.token
                self._done = self._best([*self._done, ended])
            elif len(beams) < width:
                beams.append(candidate.grown())
        self._beams = beams

    def _end(self, reason: FinishReason) -> None:
        self.is_over = True
        for beam in self._beams:
            beam.finish_reason = reason

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        num_prompt = len(self.prompt_token_ids)
        ordered = sorted(beams, key=lambda beam: -_score(beam, num_prompt, self._params))
        return ordered[: self._params.beam_width]


def beam_search(
    prompt: PromptType,
    params: BeamSearchParams,
    limits: SearchLimits,
    *,
    generate: Generate,
    decode: Decode,
) -> BeamSearchOutput:
    """Search with a function that runs one request for each prompt, and returns their final outputs in order.

    Raises:
        TrouperValidationError, UnsupportedFeatureError, TypeError: as `BeamSearch`.
    """
    search = BeamSearch(prompt, params, limits)
    while not search.is_over:
        search.take(generate(search.prompts, search.step))
    return search.best(decode)


def _one_token(
    params: BeamSearchParams, max_logprobs: int, num_shown: int | None
) -> SamplingParams:
    """Return the parameters of one round; logprobs are the model's own, not only those of allowed tokens."""
    allowed = params.allowed_token_ids
    num = -1 if num_shown == -1 else max(2 * params.beam_width, num_shown or 0)
    width: dict[str, Any] = {"logprobs": num}
    if allowed is not None:
        is_few = len(set(allowed)) <= MAX_LOGPROB_TOKEN_IDS
        width = (
            {"logprob_token_ids": sorted(set(allowed))} if is_few else {"logprobs": max_logprobs}
        )
    return SamplingParams(
        **width,
        max_tokens=1,
        temperature=params.temperature,
        allowed_token_ids=allowed,
        ignore_eos=True,  # EOS is a candidate like any other; the search itself ends the beam
        detokenize=num_shown is not None,  # only the texts of tokens that are shown are wanted
    )


def _as_prompt(beam: BeamSearchSequence, prompt: PromptType) -> TokensPrompt:
    """Return the beam so far as a prompt, with the other fields of the first prompt."""
    extras = {name: prompt[name] for name in EXTRAS if name in prompt} if _is_dict(prompt) else {}
    return cast("TokensPrompt", {**extras, "prompt_token_ids": beam.tokens})


def _is_dict(prompt: PromptType) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(prompt, Mapping)


def _check_prompt(prompt: PromptType) -> None:
    """Raises UnsupportedFeatureError for what is more than its token ids say."""
    if _holds_embeds(prompt):
        text = "prompt_embeds: a beam search goes on from token ids; use generate"
        raise UnsupportedFeatureError(text, parameter="prompt_embeds")
    if _is_dict(prompt) and prompt.get("suffix") is not None:
        text = "suffix: a beam search does not fill in; use generate"
        raise UnsupportedFeatureError(text, parameter="suffix")


def _holds_embeds(prompt: PromptType) -> bool:
    """Tell whether a prompt, or a part of its conversation, is embeddings."""
    if not _is_dict(prompt):
        return False
    messages = cast("Sequence[Any]", prompt.get("messages") or ())
    parts = [part for message in messages for part in _parts(message)]
    kinds = [part.get("type") for part in parts if _is_dict(part)]
    return prompt.get("prompt_embeds") is not None or "prompt_embeds" in kinds


def _parts(message: Any) -> Sequence[Any]:
    """Return the parts of a message whose content is a list of them."""
    content: Any = message.get("content") if _is_dict(message) else None
    return cast("list[Any]", content) if isinstance(content, list) else ()


def _candidates(
    beam: BeamSearchSequence, output: RequestOutput, params: BeamSearchParams
) -> list[_Candidate]:
    """Return the `2 × beam_width` likeliest continuations of a beam: enough, if half of them end it."""
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        return []
    position = logprobs[0]
    items = list(position.items())
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        items = [item for item in items if item[0] in allowed]
    items.sort(key=lambda item: -item[1].logprob)  # what was drawn may be one more, and less likely
    return [
        _Candidate(beam, position, token, beam.cum_logprob + entry.logprob)
        for token, entry in items[: 2 * params.beam_width]
    ]


def _score(beam: BeamSearchSequence, num_prompt: int, params: BeamSearchParams) -> float:
    return beam.cum_logprob / max(1, len(beam.tokens) - num_prompt) ** params.length_penalty


def _text(
    beam: BeamSearchSequence, num_prompt: int, params: BeamSearchParams, decode: Decode
) -> str:
    tokens = beam.tokens[num_prompt:]
    if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    return decode(tokens, params.skip_special_tokens)


def check_params(params: BeamSearchParams, max_logprobs: int) -> None:
    """Check the parameters of a search.

    Raises:
        TrouperValidationError: the engine gives fewer than `2 × beam_width` logprobs.
        TypeError: not BeamSearchParams.
    """
    if not isinstance(params, BeamSearchParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TypeError(f"params must be BeamSearchParams, not {type(params).__name__}")
    if max_logprobs != -1 and 2 * params.beam_width > max_logprobs:
        raise TrouperValidationError(
            f"needs 2 × beam_width logprobs, and max_logprobs is {max_logprobs}",
            parameter="beam_width",
            value=params.beam_width,
        )
