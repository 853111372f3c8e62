"""Build the tokenizer of a GGUF file for the `tokenizers` library, with its special tokens and chat templates.

The file contains one of four models: `gpt2`, byte-level BPE with a named way to split text (`tokenizer.ggml.pre`);
`llama`, sentencepiece with scores, from which the merges are reconstructed; and for encoders `bert`, WordPiece, or `t5`,
sentencepiece's unigram model.
"""

from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram, WordPiece

from trouper.config.gguf.header import Gguf
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
# Combining marks belong to words.
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT_4O = (_CASED % (_ENDING, _ENDING) + r"\p{N}{1,3}" + _SLASHED,)
TEKKEN = (_CASED % ("", "") + r"\p{N}" + _SLASHED,)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")


SEED_CODER = (_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
FALCON = (
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"[0-9][0-9][0-9]",
)


class Pre(NamedTuple):
    """The rules by which texts are split before merging.

    A GGUF file only names them, so each name that occurs in practice has an entry in a table here.
    """

    patterns: tuple[str, ...] = ()  # one after the other; none: GPT-2's own
    splits_digits: bool = False
    ignores_merges: bool = False  # a piece that is a token needs none
    adds_bos: bool = False  # where the file does not say
    is_composed: bool = False  # by NFC


PRES = {
    "default": Pre(),
    "gpt-2": Pre(),
    "olmo": Pre(),
    "phi-2": Pre(),
    "exaone4": Pre(),
    "exaone": Pre(splits_digits=True),
    "smollm": Pre(splits_digits=True),
    "starcoder": Pre(splits_digits=True),
    "refact": Pre(splits_digits=True),
    "command-r": Pre(splits_digits=True),
    "llama-bpe": Pre(LLAMA3, ignores_merges=True, adds_bos=True),
    "llama3": Pre(LLAMA3, ignores_merges=True, adds_bos=True),
    "llama-v3": Pre(LLAMA3, ignores_merges=True, adds_bos=True),
    "lfm2": Pre(LLAMA3, ignores_merges=True, adds_bos=True),
    "dbrx": Pre(LLAMA3),
    "smaug-bpe": Pre(LLAMA3),
    "chatglm-bpe": Pre(LLAMA3),
    "glm4": Pre(LLAMA3),
    "qwen2": Pre(QWEN2, is_composed=True),
    "qwen35": Pre(QWEN35, is_composed=True),
    "deepseek-r1-qwen": Pre(QWEN2, is_composed=True),
    "hunyuan": Pre(QWEN2),
    "hunyuan-dense": Pre(DEEPSEEK_V3),
    "megrez": Pre(QWEN2),
    "stablelm2": Pre(QWEN2),
    "seed-coder": Pre(SEED_CODER),
    "falcon": Pre(FALCON),
    "tekken": Pre(TEKKEN, ignores_merges=True, adds_bos=True),
    "gpt-4o": Pre(GPT_4O),
    "deepseek-v3": Pre(DEEPSEEK_V3),
    "deepseek-coder": Pre(DEEPSEEK_CODER),
}


class GgufTokenizer(NamedTuple):
    """The parts of a tokenizer, as read from a GGUF file.

    `Tokenizer` is created from them in the same way as from the files of a folder.
    """

    backend: Backend
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    gives_types: bool  # to the second text of a pair


def read_tokenizer(header: Gguf) -> GgufTokenizer:
    """Build the tokenizer that the metadata describe.

    Raises:
        TrouperValidationError: it lacks a part, or parts contradict each other; the message names the key.
        UnsupportedFeatureError: the model or its way of splitting is unknown.
    """
    kind = header.need(KEY + "model", str)
    tokens = header.need(KEY + "tokens", list[str])
    kinds = _kinds(header, len(tokens))
    if kind == "gpt2":
        backend, adds_bos = _byte_level(header, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(header, tokens), True
    elif kind == "bert":
        tokens = _word_pieces(tokens, kinds)
        backend, adds_bos = _word_piece(header, tokens, kinds), True
    elif kind == "t5":
        backend, adds_bos = _unigram(header, tokens), False
    else:
        raise UnsupportedFeatureError(
            f"{header.path.name}: {KEY}model: {kind[:40]!r} is not supported; gpt2, llama, bert and t5 are",
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
    if kind == "bert":
        _put_around_pieces(backend, header, named)
    else:
        _put_around(backend, header, named, adds_bos, doubles_end=kind == "t5")
    return GgufTokenizer(backend, named, _templates(header), gives_types=kind == "bert")


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


def _word_pieces(tokens: list[str], kinds: np.ndarray[Any, Any]) -> list[str]:
    """Write the beginnings of words bare and their continuations with ##, if a file has them with ▁ and bare."""
    pieces: list[str] = []
    for token, kind in zip(tokens, kinds.tolist(), strict=True):
        is_special = kind in (CONTROL, USER) or (token[:1] == "[" and token[-1:] == "]")
        pieces.append(token if is_special else token[1:] if token[:1] == "▁" else f"##{token}")
    return pieces


def _word_piece(header: Gguf, tokens: list[str], kinds: np.ndarray[Any, Any]) -> Backend:
    """Build BERT's tokenizer; a vocabulary without capitals is one of texts in lower case."""
    vocabulary = _vocabulary(header, tokens)
    unknown = _token_at(header, tokens, "unknown_token_id", "[UNK]")
    backend = Backend(WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    is_cased = any(
        token != token.lower()
        for token, kind in zip(tokens, kinds.tolist(), strict=True)
        if kind not in (CONTROL, USER) and token[:1] != "["
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _put_around_pieces(backend: Backend, header: Gguf, named: dict[str, str]) -> None:
    """Put [CLS] and [SEP] around a text, and another [SEP] behind the second of a pair."""
    begin = named.get("cls_token") or named.get("bos_token") or "[CLS]"
    end = named.get("sep_token") or named.get("eos_token") or "[SEP]"
    for token, key in ((begin, "cls_token_id"), (end, "seperator_token_id")):
        if backend.token_to_id(token) is None:
            raise _wrong(header, key, f"lacks, and the vocabulary has no {token}")
    backend.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end],
        pair=[begin, "$A", end, "$B:1", f"{end}:1"],
        special_tokens=[(x, backend.token_to_id(x)) for x in dict.fromkeys((begin, end))],
    )


def _unigram(header: Gguf, tokens: list[str]) -> Backend:
    """Build sentencepiece's unigram model in the form of XLM-RoBERTa."""
    _vocabulary(header, tokens)
    scores: Any = header.metadata.get(KEY + "scores")
    if not _is_table(scores, len(tokens)):
        raise _wrong(header, "scores", f"not {len(tokens)} numbers")
    unknown = tokens.index(_token_at(header, tokens, "unknown_token_id", "<unk>"))
    pairs = list(zip(tokens, map(float, scores), strict=True))
    backend = Backend(Unigram(pairs, unk_id=unknown, byte_fallback=False))
    steps: list[Any] = []
    charsmap: Any = header.metadata.get(KEY + "precompiled_charsmap")
    if charsmap is not None:
        if not isinstance(charsmap, np.ndarray):
            raise _wrong(header, "precompiled_charsmap", "not bytes")
        numbers = cast("np.ndarray[Any, np.dtype[Any]]", charsmap)
        if numbers.dtype.itemsize != 1:
            raise _wrong(header, "precompiled_charsmap", "not bytes")
        steps.append(normalizers.Precompiled(numbers.tobytes()))
    if header.get(KEY + "remove_extra_whitespaces", bool) is not False:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    has_space = header.get(KEY + "add_space_prefix", bool) is not False
    scheme = "always" if has_space else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def _token_at(header: Gguf, tokens: list[str], key: str, default: str) -> str:
    """Return the token that a key names, or the one with the default spelling if the file has no such key."""
    index = header.get(KEY + key, int)
    if index is None and default in tokens:
        return default
    if index is None or not 0 <= index < len(tokens):
        raise _wrong(header, key, "beyond the tokens" if index is not None else "lacks")
    return tokens[index]


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


def _put_around(
    backend: Backend,
    header: Gguf,
    named: dict[str, str],
    adds_bos: bool,
    *,
    doubles_end: bool = False,
) -> None:
    """Add BOS and EOS according to the file; without them no post-processor is needed.

    Args:
        doubles_end: whether EOS, not BOS, is in front of a pair's second text, as in RoBERTa.
    """
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
            *(f"{x}:1" for x in (after if doubles_end else before)),
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
