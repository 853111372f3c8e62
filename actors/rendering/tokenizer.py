"""A light tokenizer over the `tokenizers` library.

Importing transformers costs 0.8 s, and nothing here needs it if the folder contains a tokenizer.json:
that file, as it is, gives the ids that transformers gives.  (transformers 5, too, lets the file's
post-processor decide about BOS and ignores `add_bos_token` beside it.)  A folder without one is
converted by transformers once, at start.

Nothing changes the backend after `load`, so threads may share one `Tokenizer`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from trouper.actors.rendering.gguf_tokenizer import read_tokenizer
from trouper.actors.rendering.token_stream import REPLACEMENT, TokenStream
from trouper.config.checkpoint.files import check_folder, checked, read_object, read_text
from trouper.config.gguf.header import is_gguf, read_gguf
from trouper.errors import GenerationError, TrouperValidationError, UnsupportedFeatureError
from trouper.extras import install_hint

SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"
)  # fmt: skip
TYPES = "token_type_ids"
# Classes of transformers, without "Fast", whose models get token types unless the folder says otherwise.
TYPE_GIVERS = frozenset(
    {"BertTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer", "FunnelTokenizer", "RemBertTokenizer"}
)  # fmt: skip
TOKENIZER_CONFIG = "tokenizer_config.json"
TEXT_CACHE_SIZE = 2**16  # single-token texts for logprobs; about 100 bytes each
MAX_CHARACTER_TOKENS = 4
# From here on a text is encoded as a batch of one, for which the library gives the interpreter away: 500,000
# characters kept every other thread waiting for 1.7 s.  It costs some 20 µs.
LONG_TEXT_CHARS = 4096
MANY_TOKENS = 1024  # that are decoded without the interpreter, too


class Tokenizer:
    """Text to ids and back for one model.

    `special_tokens` maps the names that chat templates use (`bos_token` …) to their texts;
    `chat_templates` maps the template's name, mostly just "default", to its source.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        folder: str = "",
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        truncation_side: str | None = None,
        gives_types: bool = True,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.folder = folder
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.truncation_side = truncation_side
        self._gives_types = gives_types
        self.added_tokens = {i: t.content for i, t in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        vocabulary = backend.get_vocab()
        self.vocab_size = len(vocabulary)
        self.max_id = max(vocabulary.values(), default=-1)
        # Byte-level and metaspace spellings are never shorter than the text they stand for.
        self.longest_token_chars = max(map(len, vocabulary), default=1)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.mask_token_id = self._special_id("mask_token")
        self._text_of = lru_cache(TEXT_CACHE_SIZE)(self._decode_one)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a model folder or a GGUF file.

        Raises:
            TrouperValidationError: it holds no tokenizer, or one that cannot be read.
            UnsupportedFeatureError: its tokenizer has no form that the `tokenizers` library can run, or
                needs transformers, which is not installed.
        """
        path = Path(folder)
        if is_gguf(path):
            return cls._load_gguf(path)
        check_folder(path, "tokenizer")
        if (path / "tokenizer.json").is_file():
            return cls._load_light(path)
        return cls._load_with_transformers(path)

    @classmethod
    def _load_gguf(cls, path: Path) -> Self:
        try:
            backend, named, templates, gives_types = read_tokenizer(read_gguf(path))
        except (TrouperValidationError, UnsupportedFeatureError):
            raise
        except Exception as error:  # the library raises bare Exception
            raise _unreadable(path, "the tokenizer", error) from error
        return cls(
            backend,
            folder=str(path),
            special_tokens=named,
            chat_templates=templates,
            gives_types=gives_types,
        )

    @classmethod
    def _load_light(cls, path: Path) -> Self:
        try:
            backend = Backend.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise _unreadable(path, "tokenizer.json", error) from error
        config = read_object(path / TOKENIZER_CONFIG, "tokenizer") or {}
        if "added_tokens_decoder" not in config:
            config |= read_object(path / "special_tokens_map.json", "tokenizer") or {}
        try:
            named = {n: _content(config[n]) for n in SPECIAL_NAMES if config.get(n)}
            _add_tokens(backend, config, named)
            templates = _chat_templates(path, config)
        except TrouperValidationError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _unreadable(path, TOKENIZER_CONFIG, error) from error
        return cls(
            backend,
            folder=str(path),
            special_tokens=named,
            chat_templates=templates,
            truncation_side=config.get("truncation_side"),
            gives_types=_gives_types(config),
        )

    @classmethod
    def _load_with_transformers(cls, path: Path) -> Self:
        hf = _load_hf(path, f"no tokenizer.json in {path}: another tokenizer")
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedFeatureError(
                f"the tokenizer in {path} ({type(hf).__name__}) cannot be converted to tokenizer.json"
            )
        # From a config alone transformers makes a tokenizer that knows its added tokens and no text.
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        if not backend.get_vocab().keys() - added:
            raise TrouperValidationError(
                "no tokenizer in the folder", parameter="tokenizer", value=str(path)
            )
        templates: str | dict[str, str] = hf.chat_template or {}
        return cls(
            backend,
            folder=str(path),
            special_tokens=hf.special_tokens_map,
            chat_templates={"default": templates} if isinstance(templates, str) else templates,
        )

    def __repr__(self) -> str:
        return f"<Tokenizer {self.folder!r}, {self.vocab_size} tokens>"

    def to_json(self) -> str:
        """Return the vocabulary and its rules in the format of `tokenizer.json`.

        A worker process creates an equal tokenizer from it, for example for grammars.
        """
        return self._backend.to_str()

    def gives_below(self, num: int) -> bool:
        """Every id of a text is below `num`: those of the vocabulary, and those added around a text or a pair."""
        around = self._backend.encode("").ids + self._backend.encode("", "").ids
        return max([self.max_id, *around]) < num

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to token ids.

        Special tokens spelled in the text become these tokens, as in transformers.

        Raises:

            TrouperValidationError: the text contains lone surrogates.
        """
        backend = self._backend
        try:
            if len(text) >= LONG_TEXT_CHARS:
                return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                    0
                ].ids
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise _not_unicode() from None
        except BaseException as error:
            _check_panic(error)
            raise

    def encode_within(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        keeps_end: bool = False,
        max_each: Sequence[int | None] = (),
    ) -> tuple[list[int], list[int]]:
        """Ids and type ids of a text or a pair; cut so that the special tokens stay.

        Of a pair the longer text is cut first, as transformers' `longest_first`; before that each text is cut at its
        end to its own length in `max_each`.

        Raises:
            TrouperValidationError: the text holds lone surrogates.
        """
        backend = self._backend
        try:
            if max_length is None and not max_each:
                whole = backend.encode(text, pair, add_special_tokens=add_special_tokens)
                return whole.ids, self._types(whole.type_ids)
            parts = [
                backend.encode(part, add_special_tokens=False)
                for part in (text, pair)
                if part is not None
            ]
            for part, length in zip(parts, max_each, strict=False):
                if length is not None and length < len(part):  # else it may not fit a word
                    part.truncate(length)
            if max_length is not None:
                num_special = backend.num_special_tokens_to_add(pair is not None)
                room = max_length - (num_special if add_special_tokens else 0)
                for part, length in zip(parts, _shares([len(p) for p in parts], room), strict=True):
                    part.truncate(length, direction="left" if keeps_end else "right")
            whole = backend.post_process(*parts, add_special_tokens=add_special_tokens)
            return whole.ids[:max_length], self._types(whole.type_ids[:max_length])
        except TypeError:
            raise _not_unicode() from None
        except BaseException as error:
            _check_panic(error)
            raise

    def encode_pieces(
        self, pieces: Sequence[str], add_special_tokens: bool = False, *, continues: bool = False
    ) -> list[int]:
        """Encode the parts one by one, so that no token spans two of them.

        `continues`: the first part, too, continues a text.
        """
        ids = [] if continues else self.encode(pieces[0], add_special_tokens)
        newline = self.encode("\n", add_special_tokens=False)
        for piece in filter(None, pieces if continues else pieces[1:]):
            # After a newline, so that no metaspace is put before what is no beginning of a text.
            more = self.encode("\n" + piece, add_special_tokens=False)
            if newline and more[: len(newline)] == newline:
                ids += more[len(newline) :]
            else:
                ids += self.encode(piece, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        if len(ids) >= MANY_TOKENS:
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TokenStream:
        """Create an incremental decoder for one sequence behind a prompt.

        The end of the prompt decides about the white space of the first token.  Both options are those of the
        request.
        """
        is_glued = not (skip_special_tokens or spaces_between_special_tokens)
        return TokenStream(
            self._backend,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            silent=self.special_ids if skip_special_tokens else frozenset(),
            max_id=self.max_id,
            glued=self.added_tokens if is_glued else None,
        )

    def vocabulary_strings(self, token_ids: Iterable[int]) -> list[str]:
        """Return each token as the vocabulary spells it, such as `Ġis`; an id of no token is an empty text."""
        return [self._backend.id_to_token(id) or "" for id in token_ids]

    def describe(self) -> dict[str, Any]:
        """Return the settings that the model folder has for its tokenizer, with the chat template."""
        path = Path(self.folder)
        config = read_object(path / TOKENIZER_CONFIG, "tokenizer") if path.is_dir() else None
        templates: Any = self.chat_templates
        return {
            "tokenizer_class": type(self).__name__,
            **self.special_tokens,
            **(config or {}),
            "chat_template": templates.get("default", templates or None),
        }

    def token_text(self, token_id: int, before: Sequence[int] = ()) -> str:
        """The text of one token for logprobs.

        A token that ends inside a character has no text; the one that completes it has the whole
        character: `before` holds the tokens that came first.
        """
        text = self._text_of(token_id)
        if REPLACEMENT not in text:
            return text
        for size in range(1, MAX_CHARACTER_TOKENS):
            context = list(before[-size:])
            whole = self.decode([*context, token_id], skip_special_tokens=False)
            done = self.decode(context, skip_special_tokens=False).rstrip(REPLACEMENT)
            if whole.startswith(done) and REPLACEMENT not in whole[len(done) :]:
                return whole[len(done) :]
        return text.rstrip(REPLACEMENT)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token.

        They may be a part of a character: vocabularies of bytes contain such tokens.
        """
        spelled = self._backend.id_to_token(token_id) or ""
        if found := _BYTE_TOKEN.fullmatch(spelled):
            return bytes.fromhex(found[1])
        text = self._text_of(token_id)
        if REPLACEMENT in text and all(char in _BYTES for char in spelled):
            return bytes([_BYTES[char] for char in spelled])
        return text.encode()

    def hf_tokenizer(self) -> Any:
        """Load the transformers tokenizer of the same folder, which is much slower to load.

        Raises:

            UnsupportedFeatureError: the extra `transformers` is not installed.
        """
        return _load_hf(Path(self.folder), "get_tokenizer")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token spelled as in the vocabulary, or None if the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def _types(self, type_ids: list[int]) -> list[int]:
        return type_ids if self._gives_types else [0] * len(type_ids)

    def _decode_one(self, token_id: int) -> str:
        if not 0 <= token_id <= self.max_id:
            return ""
        return self._backend.decode([token_id], skip_special_tokens=False)


def _byte_letters() -> dict[str, int]:
    """Return the letters that byte-level vocabularies spell bytes with: GPT-2's table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_letters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _not_unicode() -> TrouperValidationError:
    rule = "the text is not valid Unicode (a lone surrogate)"
    return TrouperValidationError(rule, parameter="prompt")


def _check_panic(error: BaseException) -> None:
    """Raises GenerationError in place of a panic in the library: that is no Exception, and would end the engine."""
    if type(error).__name__ == "PanicException":
        raise GenerationError(f"the tokenizer failed: {error}") from error


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """Number of tokens that each part keeps when the longer is cut first.

    Of an odd room the longer part, or else the second, keeps one more.
    """
    room = max(0, room)
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    shorter = min(*lengths, room // 2)
    longer = min(max(lengths), room - shorter)
    first, second = lengths
    return [longer, shorter] if first > second else [shorter, longer]


def _add_tokens(backend: Any, config: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that the config names and tokenizer.json lacks, in transformers' order."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder", {})
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            backend.add_tokens([AddedToken(**token)])
            known.add(token["content"])
    extra: Any = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        extra = cast("dict[str, Any]", extra).values()
    for content in (*named.values(), *map(_content, cast("Iterable[Any]", extra))):
        if content not in known:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
            known.add(content)


def _gives_types(config: dict[str, Any]) -> bool:
    """Check whether a pair's second text has another token type, as transformers gives it to the model.

    Without `model_input_names` the default of the tokenizer's class counts; a folder that names no class has its
    model's tokenizer.
    """
    names = config.get("model_input_names")
    if isinstance(names, list):
        return TYPES in names
    kind = config.get("tokenizer_class")
    return kind is None or str(kind).removesuffix("Fast") in TYPE_GIVERS


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files win over the config's entry, as in transformers."""
    found = {file.stem: file for file in path.glob("additional_chat_templates/*.jinja")}
    if (path / "chat_template.jinja").is_file():
        found["default"] = path / "chat_template.jinja"
    if found:
        return {name: read_text(file, "tokenizer") for name, file in found.items()}
    # Processors of before transformers 5 have their template in a file of its own.
    processor = read_object(path / "chat_template.json", "tokenizer") or {}
    entry: Any = processor.get("chat_template") or config.get("chat_template")
    if isinstance(entry, list):
        entry = {named["name"]: named["template"] for named in cast("list[Any]", entry)}
    elif entry is not None:
        entry = {"default": entry}
    return checked(entry or {}, dict[str, str], f"{TOKENIZER_CONFIG}: chat_template", "tokenizer")


def _load_hf(path: Path, needed_by: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"{needed_by} needs transformers ({error}): {install_hint('transformers')}"
        ) from error
    try:
        return cast("Any", AutoTokenizer).from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises nearly anything for a folder it cannot use
        raise _unreadable(path, "a tokenizer", error) from error


def _unreadable(path: Path, what: str, error: Exception) -> TrouperValidationError:
    reason = f"{type(error).__name__}: {error}"[:200]
    return TrouperValidationError(
        f"no tokenizer: {what} cannot be read ({reason})", parameter="tokenizer", value=str(path)
    )
