"""What a request must produce, computed without an engine.  A second, plain formulation of the rules."""

from typing import NamedTuple

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from trouper.actors.messages.steps import Sampling
from trouper.actors.rendering.tokenizer import Tokenizer

from .pooling.pooling_scenario import PoolingWish
from .scenario import EOS, VOCAB_SIZE, Wish
from .simulated_device import simulated_tokens

EOS_TEXT = "<e>"
LETTERS = "abcdef"
PAIRS = [one + two for one in LETTERS for two in LETTERS]
TEXTS = [EOS_TEXT, *LETTERS, *PAIRS, *"ghijk"]  # by token id
assert len(TEXTS) == VOCAB_SIZE


def build_tokenizer() -> Tokenizer:
    """Six letters and all their pairs: stop strings are found inside tokens and across them."""
    vocabulary = {text: id for id, text in enumerate(TEXTS)}
    backend = Backend(BPE(vocabulary, [(pair[0], pair[1]) for pair in PAIRS]))
    backend.decoder = Fuse()
    backend.add_special_tokens([AddedToken(EOS_TEXT, special=True, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": EOS_TEXT})


TOKENIZER = build_tokenizer()


class Expected(NamedTuple):
    """One completion of a request that is left alone."""

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None


def sampling_of(wish: Wish, index: int, drawn_seed: int) -> Sampling:
    """`drawn_seed` is what the engine chose for child 0 of a request without a seed."""
    seed = drawn_seed if wish.seed is None else wish.seed
    stop_ids = set(wish.stop_token_ids) | (set() if wish.ignore_eos else {EOS})
    return Sampling(
        temperature=wish.temperature,
        seed=(seed + index + 2**63) % 2**64 - 2**63,
        min_tokens=wish.min_tokens,
        stop_ids=tuple(stop_ids),
    )


def expected(
    wish: Wish, prompt: tuple[int, ...], sampling: Sampling, max_model_len: int, has_text: bool
) -> Expected:
    limit = min(wish.max_tokens, max_model_len - len(prompt))
    tokens = simulated_tokens(prompt, sampling, limit, VOCAB_SIZE)
    text, floor = "", 0
    for count, token in enumerate(tokens, 1):
        end = _end(wish, tokens[:count], limit)
        is_silent = not has_text or token == EOS
        if end is not None and end[0] == "stop" and not wish.include_stop:
            is_silent = True
        text += "" if is_silent else TEXTS[token]
        if count <= wish.min_tokens:
            floor = len(text)
        elif found := _stop_string(wish, text, floor):
            stop, cut = found
            return Expected(tokens[:count], text[:cut], "stop", stop)
        if end is not None:
            return Expected(tokens[:count], text, *end)
    raise AssertionError("the limit ends every request")


def expected_prompt(wish: PoolingWish, max_model_len: int) -> tuple[int, ...]:
    """The ids of a text that is pooled, as its tokenizer and the wish have them."""
    is_text = isinstance(wish.prompt, str)
    ids = tuple(TOKENIZER.encode(wish.prompt)) if is_text else wish.prompt
    if wish.truncate is None:
        return ids
    limit = max_model_len if wish.truncate == -1 else wish.truncate
    return ids[-limit:] if wish.keeps_end else ids[:limit]


def expected_types(wish: PoolingWish, max_model_len: int) -> tuple[int, ...] | None:
    """Its type ids, cut likewise; None where all are 0."""
    if wish.type_ids is None:
        return None
    types = msgspec.structs.replace(wish, prompt=wish.type_ids)
    cut = expected_prompt(types, max_model_len)
    return cut if any(cut) else None


def text_of(token_ids: list[int]) -> str:
    return "".join(TEXTS[token] for token in token_ids if token != EOS)


def _end(wish: Wish, tokens: list[int], limit: int) -> tuple[str, int | str | None] | None:
    token, count = tokens[-1], len(tokens)
    if count >= wish.min_tokens:
        if token == EOS and not wish.ignore_eos:
            return "stop", None
        if token in wish.stop_token_ids:
            return "stop", token
    if count >= limit:
        return "length", None
    if wish.repetition is not None and count >= wish.min_tokens:
        longest, times = wish.repetition
        for size in range(1, longest + 1):
            if count >= size * times and tokens[-size:] * times == tokens[-size * times :]:
                return "repetition", "repetition_detected"
    return None


def _stop_string(wish: Wish, text: str, floor: int) -> tuple[str, int] | None:
    """The stop string that completes first, and where the text ends."""
    ends = [
        (text.index(stop, floor) + len(stop), order, stop)
        for order, stop in enumerate(wish.stop)
        if stop in text[floor:]
    ]
    if not ends:
        return None
    end, _, stop = min(ends)
    return stop, end if wish.include_stop else end - len(stop)
