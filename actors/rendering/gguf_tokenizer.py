"""The tokenizer inside a GGUF file, as the `tokenizers` library runs it, with its special tokens and templates.

Two models: `gpt2`, byte-level BPE whose splitting goes by a name (`tokenizer.ggml.pre`), and `llama`, sentencepiece
with scores, from which the merges are found again.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from trouper.config.gguf import Gguf
from trouper.errors import UnsupportedFeatureError, invalid

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4  # token_type
SPECIAL_KEYS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id", "pad_token": "padding_token_id", "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}  # fmt: skip
MAX_TOKEN_CHARS = 1024  # of one that merges are sought for
_LATE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_FIRST}{_UPPER}*{_LOWER}+%s|{_FIRST}{_UPPER}+{_LOWER}*%s|"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA3 = (_WORDS + r"\p{N}{1,3}" + _LATE,)
QWEN2 = (_WORDS + r"\p{N}" + _LATE,)
GPT_4O = (_CASED % (_ENDING, _ENDING) + r"\p{N}{1,3}" + _SLASHED,)
TEKKEN = (_CASED % ("", "") + r"\p{N}" + _SLASHED,)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")


class Pre(NamedTuple):
    """How texts are split before merging."""

    patterns: tuple[str, ...] = ()  # one after the other; none: GPT-2's own
    splits_digits: bool = False
    ignores_merges: bool = False  # a piece that is a token needs none
    adds_bos: bool = False  # where the file does not say
    is_composed: bool = False  # by NFC


PRES = {
    "default": Pre(),
    "gpt-2": Pre(),
    "olmo": Pre(),
    "smollm": Pre(splits_digits=True),
    "starcoder": Pre(splits_digits=True),
    "refact": Pre(splits_digits=True),
    "command-r": Pre(splits_digits=True),
    "llama-bpe": Pre(LLAMA3, ignores_merges=True, adds_bos=True),
    "llama3": Pre(LLAMA3, ignores_merges=True, adds_bos=True),
    "llama-v3": Pre(LLAMA3, ignores_merges=True, adds_bos=True),
    "dbrx": Pre(LLAMA3),
    "smaug-bpe": Pre(LLAMA3),
    "qwen2": Pre(QWEN2, is_composed=True),
    "deepseek-r1-qwen": Pre(QWEN2, is_composed=True),
    "tekken": Pre(TEKKEN, ignores_merges=True, adds_bos=True),
    "gpt-4o": Pre(GPT_4O),
    "deepseek-v3": Pre(DEEPSEEK_V3),
    "deepseek-coder": Pre(DEEPSEEK_CODER),
}


class GgufTokenizer(NamedTuple):
    """Parts from which a `Tokenizer` is made."""

    backend: Backend
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


def read_tokenizer(header: Gguf) -> GgufTokenizer:
    """Build the tokenizer that the metadata describe.

    Raises:
        TrouperValidationError: it lacks a part, or parts contradict each other; the message names the key.
        UnsupportedFeatureError: a model or a way of splitting that is not known.
    """
    kind = header.need(KEY + "model", str)
    tokens = header.need(KEY + "tokens", list[str])
    kinds = _kinds(header, len(tokens))
    if kind == "gpt2":
        backend, adds_bos = _byte_level(header, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(header, tokens), True
    else:
        raise UnsupportedFeatureError(
            f"{header.path.name}: {KEY}model: {kind[:40]!r} is not supported; gpt2 and llama are",
            parameter="tokenizer",
        )
    added = [
        AddedToken(tokens[i], special=bool(kinds[i] != USER), normalized=False)
        for i in np.flatnonzero((kinds == CONTROL) | (kinds == USER))
        if tokens[i]
    ]
    backend.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]  # the package leaves its element type open
    named = {
        name: tokens[i]
        for name, key in SPECIAL_KEYS.items()
        if (i := header.get(KEY + key, int)) is not None and 0 <= i < len(tokens)
    }
    _put_around(backend, header, named, adds_bos)
    return GgufTokenizer(backend, named, _templates(header))


def _kinds(header: Gguf, count: int) -> np.ndarray[Any, Any]:
    kinds: Any = header.metadata.get(KEY + "token_type")
    if kinds is None:
        return np.full(count, NORMAL)
    if not _is_table(kinds, count):
        raise _wrong(header, "token_type", f"not {count} numbers")
    return kinds


def _is_table(value: object, count: int) -> bool:
    return isinstance(value, np.ndarray) and np.shape(cast("Any", value)) == (count,)


def _vocabulary(header: Gguf, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise _wrong(header, "tokens", "empty, or a token stands there twice")
    return vocabulary


def _byte_level(header: Gguf, tokens: list[str]) -> tuple[Backend, bool]:
    name = header.get(KEY + "pre", str) or "default"
    pre = PRES.get(name)
    if pre is None:
        known = ", ".join(PRES)
        raise UnsupportedFeatureError(
            f"{header.path.name}: {KEY}pre: {name[:40]!r} is not supported; known are {known}",
            parameter="tokenizer",
        )
    vocabulary = _vocabulary(header, tokens)
    halves = (merge.partition(" ") for merge in header.need(KEY + "merges", list[str]))
    merges = [(left, right) for left, _, right in halves]
    try:
        backend = Backend(BPE(vocabulary, merges, ignore_merges=pre.ignores_merges))
    except (
        Exception
    ):  # the library raises bare Exception; looking for it first would take longer than the rest
        for left, right in merges:
            if not {left, right, left + right} <= vocabulary.keys():
                rule = f"{f'{left} {right}'[:40]!r} is not made of tokens"
                raise _wrong(header, "merges", rule) from None
        raise
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    if pre.splits_digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    if pre.is_composed:
        backend.normalizer = normalizers.NFC()
    return backend, pre.adds_bos


def _sentencepiece(header: Gguf, tokens: list[str]) -> Backend:
    vocabulary = _vocabulary(header, tokens)
    scores: Any = header.metadata.get(KEY + "scores")
    if not _is_table(scores, len(tokens)):
        raise _wrong(header, "scores", f"not {len(tokens)} numbers")
    unknown = header.get(KEY + "unknown_token_id", int) or 0
    if not 0 <= unknown < len(tokens):
        raise _wrong(header, "unknown_token_id", "beyond the tokens")
    backend = Backend(
        BPE(
            vocabulary,
            _found_merges(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_space = header.get(KEY + "add_space_prefix", bool) is not False
    normalizer: list[Any] = [normalizers.Prepend("▁")] if has_space else []
    backend.normalizer = normalizers.Sequence([*normalizer, normalizers.Replace(" ", "▁")])
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*decoder, decoders.Strip(content=" ", left=1)] if has_space else decoder
    )
    return backend


def _found_merges(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """List every way to put a token together from two, the best token first."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocabulary.items():
        if len(token) > MAX_TOKEN_CHARS:
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-float(scores[i]), vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _put_around(backend: Backend, header: Gguf, named: dict[str, str], adds_bos: bool) -> None:
    """Add BOS and EOS as the file says; a text without them needs no post-processor."""
    bos = header.get(KEY + "add_bos_token", bool)
    begin = named.get("bos_token") if (adds_bos if bos is None else bos) else None
    end = named.get("eos_token") if header.get(KEY + "add_eos_token", bool) else None
    if not (begin or end):
        return
    before, after = [x for x in (begin,) if x], [x for x in (end,) if x]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[
            *before,
            "$A",
            *after,
            *(f"{x}:1" for x in before),
            "$B:1",
            *(f"{x}:1" for x in after),
        ],
        special_tokens=[(x, backend.token_to_id(x)) for x in dict.fromkeys([*before, *after])],
    )


def _templates(header: Gguf) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {
        name.removeprefix(key + "."): header.need(name, str)
        for name in header.metadata
        if name.startswith(key + ".")
    }
    default = header.get(key, str)
    return found if default is None else {"default": default, **found}


def _wrong(header: Gguf, key: str, rule: str) -> Exception:
    return invalid("tokenizer", f"{header.path.name}: {KEY}{key}: {rule}", str(header.path))
