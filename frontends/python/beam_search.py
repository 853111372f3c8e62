"""Beam search: keep the most probable partial completions and extend each by one token in every round.

A round is one ordinary request for each beam, so the scheduler needs no support for beams, and the prefix cache
computes shared prefixes only once. This module is pure: callers run the requests, blocking in `LLM.beam_search` and
asynchronously in the server.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeGuard, cast

import msgspec

from trouper.actors.rendering.media.parts import take_media, url_of
from trouper.actors.rendering.media.urls import is_local, is_remote
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.engine_config import EngineConfig
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.inputs import PromptType, TokensPrompt
from trouper.outputs import FinishReason, LogprobsOnePosition, RequestOutput
from trouper.params import BeamSearchParams, SamplingParams
from trouper.sampling_fields import MAX_LOGPROB_TOKEN_IDS

Generate = Callable[[Sequence[PromptType], SamplingParams], Sequence[RequestOutput]]
# Takes token ids and whether to skip special tokens.
Decode = Callable[[list[int], bool], str]

# Fields of a prompt dict that apply to every beam.
EXTRAS = ("cache_salt", "mm_processor_kwargs", "multi_modal_data", "multi_modal_uuids")


class BeamSearchSequence(msgspec.Struct):
    """One beam: `tokens` are the ids of the prompt and the output, `text` is the decoded output only.

    `logprobs` has one entry for each token of the output.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobsOnePosition] = []


class BeamSearchOutput(msgspec.Struct):
    """The result of a search: at most `beam_width` beams, best first.

    Each beam has its tokens, its text without the prompt and its cumulative log probability; the order includes the
    length penalty.
    """

    sequences: list[BeamSearchSequence]


class SearchLimits(NamedTuple):
    """Limits of the engine and the model for a search.

    `max_logprobs` is the number of candidates that one position may return (-1: the whole vocabulary).  A beam ends
    at any of `eos_token_ids`.  With `sees_prompt`, all tokens of a prompt see each other, so generated tokens cannot be
    continued as part of a prompt, and searches are refused.
    """

    max_logprobs: int
    max_model_len: int
    eos_token_ids: Sequence[int]
    sees_prompt: bool = False

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer | None) -> Self:
        """Collect the limits of an engine; the tokenizer may name an end token that the model's config lacks.

        Beam search needs every end token, because it ends beams itself and not in the engine.
        """
        own = None if tokenizer is None else tokenizer.eos_token_id
        ids = dict.fromkeys((*(() if own is None else (own,)), *config.model.eos_token_ids))
        sees_prompt = config.media is not None and config.media.family.spans == "prompt"
        return cls(config.max_logprobs, config.max_model_len, tuple(ids), sees_prompt)


class _Candidate(NamedTuple):
    """A beam and one possible next token; only the best candidates become beams."""

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
    """Search for the `beam_width` completions of a prompt with the highest score.

    Until `is_over`, run one request for each of `prompts` with the parameters `step`, and give their outputs to
    `take`; `best` then returns the result. The score is cumulative logprob / max(1, generated tokens) **
    length_penalty, in which a final end token counts as generated. Memory is bounded by 2 × `beam_width` beams,
    because only the best finished beams are kept.

    Args:
        num_logprobs: logprobs of each position that the caller wants to return.

    Raises:
        TrouperValidationError: `max_logprobs` of the engine is less than `2 × beam_width`.
        UnsupportedFeatureError: the prompt has embeddings or a suffix.
        TypeError: `params` is not BeamSearchParams.
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
        if limits.sees_prompt:
            text = "beam search is not supported by this model, because all tokens of its prompts see each other; use generate"
            raise UnsupportedFeatureError(text, parameter="use_beam_search")
        self.step = _one_token(params, limits.max_logprobs, num_logprobs)
        self.is_over = False
        # Tokens of the prompt, and tokens generated in all rounds.
        self.num_tokens = (0, 0)
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
        """The requests of the next round.

        In the first round it is the caller's prompt; later each open beam is a prompt of token ids, whose prefix is
        cached.
        """
        return [_as_prompt(beam, self._prompt) for beam in self._beams] or [self._prompt]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend the beams by the outputs of a round, one for each of `prompts`, in order.

        The candidates of all beams are ranked together; finished ones are set aside.  An aborted output ends the
        search.
        """
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
        """Return the best beams with their texts, which `decode` computes from the generated tokens.

        Finished beams and open ones compete by their log probability under the length penalty.  At most `beam_width`
        are returned.
        """
        best = self._best([*self._done, *self._beams])
        for beam in best:
            beam.text = _text(beam, len(self.prompt_token_ids), self._params, decode)
        return BeamSearchOutput(best)

    def _choose(self, candidates: list[_Candidate]) -> None:
        """Keep the best unfinished candidates as the new beams, and the best finished ones as results."""
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
    """Run a whole search with blocking functions.

    Args:
        generate: runs one request for each prompt and returns their final outputs in order.
        decode: converts the generated tokens of a beam to text.

    Raises:
        TrouperValidationError, UnsupportedFeatureError, TypeError: for the reasons listed in `BeamSearch`.
    """
    search = BeamSearch(prompt, params, limits)
    while not search.is_over:
        search.take(generate(search.prompts, search.step))
    return search.best(decode)


def _one_token(
    params: BeamSearchParams, max_logprobs: int, num_shown: int | None
) -> SamplingParams:
    """Return the sampling parameters of one round.

    With allowed tokens the logprobs of exactly these tokens are requested, because the most probable tokens of the
    model may all be forbidden.
    """
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
        # The search itself ends beams at an end token, which is a candidate like any other.
        ignore_eos=True,
        # Texts are needed only for the logprobs that the caller returns.
        detokenize=num_shown is not None,
    )


def _as_prompt(beam: BeamSearchSequence, prompt: PromptType) -> TokensPrompt:
    """Return a prompt that continues the beam, with the extra fields of the original prompt."""
    given: Mapping[str, Any] = prompt if _is_dict(prompt) else {}
    extras: dict[str, Any] = {name: given[name] for name in EXTRAS if name in given}
    if "messages" in given:
        # The beam already contains the tokens of the images, but the engine also needs the images themselves.
        _, images = take_media(given["messages"])
        if images:
            modality = images[0].modality
            extras["multi_modal_data"] = {modality: [image.data for image in images]}
            if any(image.uuid for image in images):
                extras["multi_modal_uuids"] = {modality: [image.uuid for image in images]}
    return cast("TokensPrompt", {**extras, "prompt_token_ids": beam.tokens})


def _is_dict(prompt: PromptType | Mapping[str, Any]) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(prompt, Mapping)


def _check_prompt(prompt: PromptType) -> None:
    """Raise UnsupportedFeatureError if token ids do not represent the whole prompt, since rounds continue from them."""
    if _holds_embeds(prompt):
        text = (
            "prompt_embeds is not supported with beam search, which needs token ids; use generate"
        )
        raise UnsupportedFeatureError(text, parameter="prompt_embeds")
    if _is_dict(prompt) and any(
        is_remote(url) or is_local(url) for url in map(url_of, _all_parts(prompt))
    ):
        text = "messages: URLs to fetch are not supported with beam search; send the image itself"
        raise UnsupportedFeatureError(text, parameter="messages")
    if _is_dict(prompt) and prompt.get("suffix") is not None:
        text = "suffix is not supported with beam search; use generate"
        raise UnsupportedFeatureError(text, parameter="suffix")


def _holds_embeds(prompt: PromptType | Mapping[str, Any]) -> bool:
    """Return whether a prompt, or a part of a message in it, consists of embeddings."""
    if not _is_dict(prompt):
        return False
    kinds = [part.get("type") for part in _all_parts(prompt) if _is_dict(part)]
    return prompt.get("prompt_embeds") is not None or "prompt_embeds" in kinds


def _all_parts(prompt: Mapping[str, Any]) -> list[Any]:
    messages = cast("Sequence[Any]", prompt.get("messages") or ())
    return [part for message in messages for part in _parts(message)]


def _parts(message: Any) -> Sequence[Any]:
    """Return the parts of a message's content, or nothing if the content is a text."""
    content: Any = message.get("content") if _is_dict(message) else None
    return cast("list[Any]", content) if isinstance(content, list) else ()


def _candidates(
    beam: BeamSearchSequence, output: RequestOutput, params: BeamSearchParams
) -> list[_Candidate]:
    """Return the `2 × beam_width` most probable continuations of a beam.

    This many are enough: even if `beam_width` of them are end tokens, `beam_width` beams remain.
    """
    logprobs = output.outputs[0].logprobs
    if not logprobs:
        return []
    position = logprobs[0]
    items = list(position.items())
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        items = [item for item in items if item[0] in allowed]
    # The sampled token may be an additional, less probable entry.
    items.sort(key=lambda item: -item[1].logprob)
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
    """Check that the engine can run a search with these parameters.

    Raises:
        TrouperValidationError: `max_logprobs` of the engine is less than `2 × beam_width`.
        TypeError: `params` is not BeamSearchParams.
    """
    if not isinstance(params, BeamSearchParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TypeError(f"params must be BeamSearchParams, not {type(params).__name__}")
    if max_logprobs != -1 and 2 * params.beam_width > max_logprobs:
        raise TrouperValidationError(
            f"needs 2 × beam_width logprobs, but max_logprobs is {max_logprobs}",
            parameter="beam_width",
            value=params.beam_width,
        )
