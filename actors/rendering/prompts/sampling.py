"""Complete the sampling parameters of a request with everything that the model decides.  Pure.

The model decides the stop tokens, the longest output and the token ids of bad words.  It also has marks around its
reasoning; with a token budget for it, or with a grammar, they become the `ReasoningRules` of the request.
"""

import copy
from typing import NamedTuple

import msgspec

from trouper.actors.messages.requests import ReasoningRules
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.generation import Marks, StructuredOutputsConfig
from trouper.config.media import IMAGE, NO_IMAGES
from trouper.errors import TrouperValidationError, invalid
from trouper.params import SamplingParams


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and names of the model and the engine that rendering depends on.

    They are plain values, so rendering can be tested without a model.
    """

    name: str = "of this engine"
    vocab_size: int
    max_model_len: int
    num_token_types: int = 0  # of an encoder
    room: int = 1  # positions behind the prompt that must stay free
    max_logprobs: int = 20
    # Tokens of a step.
    max_step: int = 2**31
    eos_token_ids: tuple[int, ...] = ()
    hidden_size: int | None = None  # None: prompt_embeds are not enabled
    block_size: int = 16  # by which embeddings are named in the prefix cache
    max_edits: int | None = None  # tokens that are biased or banned; None: as many as you like
    max_bad_word: int | None = None  # tokens of a bad word
    sends_grammars: bool = False  # the device is in another process
    reasoning: Marks | None = None  # where the options name them
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    # Why requests with images, or with what else the model takes, are refused, if they are.
    no_images: str = NO_IMAGES
    # What the model takes besides text, if its media are not refused.
    modality: str = IMAGE


class ResolvedSampling(NamedTuple):
    params: SamplingParams  # max_tokens is a number
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    bad_words_ids: tuple[tuple[int, ...], ...]


def resolve_sampling(
    params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits, tokenizer: Tokenizer | None
) -> ResolvedSampling:
    """Fill in the model's stop tokens, the longest output and the tokens of bad words.

    Raises:
        TrouperValidationError: a parameter that this model, or an engine without a tokenizer, cannot follow.
    """
    params.verify(vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
    if tokenizer is None:
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                raise invalid(name, "this engine has no tokenizer (skip_tokenizer_init)")
    params = copy.copy(params)
    if params.max_tokens is None:
        params.max_tokens = limits.max_model_len - num_prompt_tokens
    eos = eos_ids(limits, tokenizer)
    stops = dict.fromkeys(params.stop_token_ids or ())
    # A grammar's end is drawn under ignore_eos only where nothing else can be, and then it ends the output.
    ends_at_eos = not params.ignore_eos or params.structured_outputs is not None
    if ends_at_eos:
        stops |= dict.fromkeys(eos[1:])
    resolved = ResolvedSampling(
        params,
        eos[0] if eos and ends_at_eos else None,
        tuple(stops),
        _bad_words(params, limits, tokenizer) if tokenizer is not None else (),
    )
    _check_room(resolved, limits)
    return resolved


def _check_room(resolved: ResolvedSampling, limits: ModelLimits) -> None:
    """Refuse a request with more edits of its logits than a row of the device holds."""
    params, words = resolved.params, resolved.bad_words_ids
    if limits.max_bad_word is not None and max(map(len, words), default=0) > limits.max_bad_word:
        raise invalid("bad_words", f"at most {limits.max_bad_word} tokens each on this device")
    num_stops = 1 + len(resolved.stop_token_ids) if params.min_tokens else 0
    num_edits = len(params.logit_bias or ()) + len(words) + num_stops
    if limits.max_edits is not None and num_edits > limits.max_edits:
        raise TrouperValidationError(
            f"{num_edits} biased, banned and stop tokens; this device takes {limits.max_edits}",
            parameter="logit_bias",
        )


def eos_ids(limits: ModelLimits, tokenizer: Tokenizer | None) -> list[int]:
    """List the primary EOS token, then the others.

    Where the tokenizer names one it is the primary: Llama 3's config lists <|end_of_text|> first, but
    its conversations end with the tokenizer's <|eot_id|>.
    """
    own = None if tokenizer is None else tokenizer.eos_token_id
    others = [id for id in limits.eos_token_ids if id != own]
    return others if own is None else [own, *others]


def _bad_words(
    params: SamplingParams, limits: ModelLimits, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """Tokenise each word with and without a leading space, as it stands inside a text and at its beginning.

    At most two sequences per word; `params` bounds the number of words and their characters.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        forms = [tokenizer.encode(s + word.lstrip(), add_special_tokens=False) for s in ("", " ")]
        if not any(forms):
            raise invalid("bad_words", "does not become any token", word)
        for ids in filter(None, forms):
            if max(ids) >= limits.vocab_size:
                raise invalid("bad_words", "becomes tokens that the model does not have", word)
            found[tuple(ids)] = None
    return tuple(found)


TAIL_TOKENS = 32  # of a prompt of ids: they hold the mark that it may end with


def reasoning_of(
    marks: Marks | None,
    params: SamplingParams,
    prompt: str | None,
    prompt_token_ids: list[int],
    tokenizer: Tokenizer | None,
) -> ReasoningRules | None:
    """Return the rules of the reasoning with which an output may begin, or None if nothing depends on them.

    Raises:
        TrouperValidationError: there is a budget, and the marks of the reasoning are not known.
    """
    budget = params.thinking_token_budget
    if budget is None and params.structured_outputs is None:
        return None
    if marks is None or tokenizer is None:
        if budget is not None:
            rule = "needs a model whose reasoning is marked (reasoning_config)"
            raise invalid("thinking_token_budget", rule, budget)
        return None
    start, end = (mark.strip() for mark in marks)
    if prompt is None:
        prompt = tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    if prompt.rstrip().endswith(end):  # the template has closed it already
        return None
    start_ids, end_ids = (tuple(tokenizer.encode(mark, False)) for mark in (start, end))
    return ReasoningRules(
        start=start,
        end=end,
        start_ids=start_ids,
        end_ids=end_ids,
        begins_inside=prompt.rstrip().endswith(start),
        budget=budget,
    )
