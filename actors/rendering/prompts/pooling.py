"""Render the prompts of a pooling model for the engine.  Pure; runs in a renderer's thread.

In addition to the forms of generation, a prompt can be a pair: `{"prompt": …, "text_pair": …}`.  Truncation counts the
special tokens, like transformers, and removes the end of a text by default; of a pair, it shortens the longer text.
Queries and documents of late interaction get markers; every other text is encoded unchanged.

A late-interaction model (ColBERT) prescribes the form of its two kinds of texts:

    query     [CLS] [Q] w … w [SEP] [MASK] … [MASK]     filled up to its length; masks are scored, and mostly not seen
    document  [CLS] [D] w … w [SEP]                     cut at its length; words of the skip list are not scored

Source: Khattab and Zaharia 2020; the same ids as PyLate makes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import msgspec

from trouper.actors.messages.media import MediaItem
from trouper.actors.messages.requests import AdmitPooling, Render
from trouper.actors.messages.sinks import PoolingSink
from trouper.actors.rendering.media.items import MediaPreprocessor
from trouper.actors.rendering.prompts.prompts import (
    SPARE_TOKENS,
    Form,
    Prompts,
    Rendered,
    checked_ids,
    template_text,
)
from trouper.actors.rendering.prompts.sampling import ModelLimits
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.config.checkpoint.sentence_transformers import LateInteraction
from trouper.config.engine_config import EngineConfig
from trouper.config.media import modality_of
from trouper.errors import TrouperValidationError, invalid
from trouper.pooling import PoolingParams


class Marked(NamedTuple):
    ids: list[int]
    num_keys: int | None
    skipped_rows: tuple[int, ...]


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Rules by which a query, or a document, is turned into tokens.

    Queries and documents have different rules, both from the model's folder.
    """

    prefix: int | None  # the marker, where it is a token
    text: str  # the marker, where it is none
    length: int  # the most tokens, marker included
    expansion: int | None = None  # fills a shorter text up
    is_expansion_seen: bool = False
    skipped: frozenset[int] = frozenset()

    def room(self, wanted: int | None) -> int:
        """Number of tokens left for a text and its special tokens, at most `wanted` of them."""
        return min(self.length, wanted or self.length) - (self.prefix is not None)

    def mark(self, ids: Sequence[int], num_leading: int) -> Marked:
        """Put the marker behind the first `num_leading` of `ids`, and fill a short query up.

        `ids` are no more than `room` allows.
        """
        marker = () if self.prefix is None else (self.prefix,)
        marked = [*ids[:num_leading], *marker, *ids[num_leading:]]
        skipped = tuple(i for i, id in enumerate(marked) if id in self.skipped)
        num_real, num_more = len(marked), self.length - len(marked)
        if self.expansion is None or num_more <= 0:
            return Marked(marked, None, skipped)
        marked += [self.expansion] * num_more
        return Marked(marked, None if self.is_expansion_seen else num_real, skipped)


def marks_of(late: LateInteraction, tokenizer: Tokenizer, limits: ModelLimits) -> dict[str, Marks]:
    """Make the rules for queries and documents, by the mode of `LateInteractionParams`.

    Documents have their own length, or all of a `max_model_len` beyond both lengths.

    Raises:
        TrouperValidationError: the tokenizer lacks the mask token, or the model what the tokenizer marks with.
    """
    max_model_len = limits.max_model_len
    expansion = tokenizer.mask_token_id if late.do_query_expansion else None
    if late.do_query_expansion and expansion is None:
        rule = "the tokenizer lacks a mask token, with which queries are expanded"
        raise TrouperValidationError(rule, parameter="tokenizer")
    words = (tokenizer.token_id(word) for word in late.skiplist_words)
    query, document = (
        (found, "") if (found := tokenizer.token_id(prefix)) is not None else (None, prefix)
        for prefix in (late.query_prefix, late.document_prefix)
    )
    for id in (expansion, query[0], document[0]):
        if id is not None and id >= limits.vocab_size:
            rule = f"marks with token {id}, and the model has {limits.vocab_size}"
            raise TrouperValidationError(rule, parameter="tokenizer")
    return {
        "cache_query": Marks(
            prefix=query[0],
            text=query[1],
            length=min(late.query_length, max_model_len),
            expansion=expansion,
            is_expansion_seen=late.attend_to_expansion_tokens,
        ),
        "score_doc": Marks(
            prefix=document[0],
            text=document[1],
            length=max_model_len
            if max_model_len > max(late.query_length, late.document_length)
            else min(late.document_length, max_model_len),
            skipped=frozenset(id for id in words if id is not None),
        ),
    }


TYPES = "token_type_ids"
PAIR_KEYS = frozenset({"prompt", "text_pair"})


class PoolingEncoded(msgspec.Struct, frozen=True):
    ids: list[int]
    type_ids: list[int] | None
    num_keys: int | None = None
    skipped_rows: tuple[int, ...] = ()
    media: tuple[MediaItem, ...] = ()


class PoolingPrompts(Prompts):
    """Renders the prompts of one pooling model.

    It adds the forms that only pooling has, such as pairs of texts for cross-encoders. Truncation follows the model's
    own rules.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        spec: PoolerSpec,
        chat_template: str | None = None,
        images: MediaPreprocessor | None = None,
    ) -> None:
        super().__init__(tokenizer, limits, chat_template, images)
        self._spec = spec
        # What was given last, and what it came to: the texts of a request share their parameters, and to check
        # them takes as long as to tokenise some words.
        self._resolved: tuple[PoolingParams, PoolingParams] | None = None
        self._marks: dict[str, Marks] = {}
        if spec.late is not None and tokenizer is not None:
            self._marks = marks_of(spec.late, tokenizer, limits)

    @classmethod
    def for_engine(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        images: MediaPreprocessor | None = None,
    ) -> Self:
        assert config.pooler is not None
        limits = ModelLimits(
            name=config.shown_name,
            vocab_size=config.model.vocab_size,
            max_model_len=config.max_model_len,
            num_token_types=config.model.hf_config.get("type_vocab_size") or 0,
            room=0,
            no_images=config.no_media,
            modality=modality_of(config.model.source_config),
        )
        template = template_text(config.chat_template)
        return cls(tokenizer, limits, config.pooler, template, images)

    def render(self, message: Render) -> Rendered:
        assert isinstance(message.params, PoolingParams)
        params = self._resolve(message.params)
        encoded = self._encoded(message)
        ids, type_ids = encoded.ids, encoded.type_ids
        self._check_length(len(ids), encoded.media)
        # A pooling model computes whole prompts, so only a prompt without a needed image is refused.
        self._spans(encoded.media, len(ids))
        return Rendered(
            None,
            AdmitPooling(
                id=message.id,
                prompt_token_ids=tuple(ids),
                token_type_ids=tuple(type_ids) if type_ids and any(type_ids) else None,
                num_keys=encoded.num_keys,
                skipped_rows=encoded.skipped_rows,
                media=encoded.media,
                params=params,
                slot=cast("PoolingSink", message.slot),  # goes with the parameters
                options=message.options,
                arrival_time=message.arrival_time,
            ),
        )

    def _resolve(self, given: PoolingParams) -> PoolingParams:
        last = self._resolved  # another thread may write it meanwhile
        if last is None or last[0] != given:
            last = self._resolved = given, given.resolve(self._spec)
        return last[1]

    def _encoded(self, message: Render) -> PoolingEncoded:
        prompt: Any = message.prompt
        wanted, keeps_end = self._cut(message)
        if isinstance(prompt, str):
            return self._encode_plain(prompt, message, wanted, keeps_end)
        type_ids: Any = None
        if isinstance(prompt, Mapping):
            given: dict[str, Any] = dict(prompt)  # pyright: ignore[reportUnknownArgumentType]  # of whatever
            if "text_pair" in given:
                return self._encode_pair(given, message, wanted, keeps_end)
            type_ids = given.pop(TYPES, None)
            if "messages" in given:
                given.setdefault("add_generation_prompt", False)
            prompt = given
        form = self._form(prompt)
        if form.images:
            return self._encode_seen(form, message, type_ids)
        if form.ids is None:
            pieces = form.pieces or []
            if form.adds_special_tokens:
                return self._encode_plain("".join(pieces), message, wanted, keeps_end)
            adds = message.options.add_special_tokens is True
            # of a chat: the pieces stay apart
            return PoolingEncoded(self._encode(pieces, wanted, adds, keeps_end), None)
        return self._checked(form.ids, type_ids, wanted, keeps_end)

    def _checked(
        self, given: Any, type_ids: Any, wanted: int | None, keeps_end: bool
    ) -> PoolingEncoded:
        """Check the caller's own ids, and truncate them."""
        ids = checked_ids(given, self._limits.vocab_size)
        if type_ids is not None:
            num_types = self._limits.num_token_types or 2  # of a model without, which ignores them
            type_ids = checked_ids(type_ids, num_types, TYPES)
            if len(type_ids) != len(ids):
                raise invalid(TYPES, f"must be {len(ids)} in number", len(type_ids))
        if wanted is not None and len(ids) > wanted:
            kept = slice(-wanted, None) if keeps_end else slice(wanted)
            ids, type_ids = ids[kept], type_ids and type_ids[kept]
        return PoolingEncoded(ids, type_ids)

    def _encode_seen(self, form: Form, message: Render, type_ids: Any) -> PoolingEncoded:
        """Encode a prompt with images.  A plain text gets the prompt of sentence-transformers, as without images."""
        if type_ids is not None:
            raise invalid(TYPES, "not with images")
        if form.adds_special_tokens and form.pieces:
            first, *rest = form.pieces
            form = form._replace(pieces=[self._spec.default_prompt + first, *rest])
        ids, items = self._with_images(form, message)
        return PoolingEncoded(ids, None, media=items)

    def _form(self, prompt: Any) -> Form:
        form = super()._form(prompt)
        if form.gap is not None:
            raise invalid("suffix", "has no meaning for a model that pools")
        return form

    def _encode_plain(
        self, text: str, message: Render, wanted: int | None, keeps_end: bool
    ) -> PoolingEncoded:
        params: Any = message.params
        adds, late = message.options.add_special_tokens is not False, params.late_interaction_params
        max_each = message.options.max_text_tokens
        if late is not None and late.mode in self._marks:
            marks = self._marks[late.mode]
            return self._encode_marked(text, wanted, keeps_end, adds, marks, max_each)
        return self._encode_text(
            (self._spec.default_prompt + text if text else "",), wanted, keeps_end, adds, max_each
        )

    def _encode_pair(
        self, given: dict[str, Any], message: Render, wanted: int | None, keeps_end: bool
    ) -> PoolingEncoded:
        if unknown := given.keys() - PAIR_KEYS:
            raise invalid("prompt", "unknown keys beside 'text_pair'", sorted(map(str, unknown)))
        pair: tuple[Any, ...] = (given.get("prompt"), given["text_pair"])
        for part in pair:
            if not isinstance(part, str) or not part:
                raise invalid("prompt", "a pair needs two texts", type(part).__name__)
        adds = message.options.add_special_tokens is not False
        return self._encode_text(pair, wanted, keeps_end, adds, message.options.max_text_tokens)

    def _encode_marked(
        self,
        text: str,
        wanted: int | None,
        keeps_end: bool,
        adds: bool,
        marks: Marks,
        max_each: tuple[int | None, ...],
    ) -> PoolingEncoded:
        """Such a text is always cut: queries and documents have the lengths of the model's training."""
        tokenizer = self._needed_tokenizer("prompt")
        if max_each[:1] != () and marks.text:  # the marker is no part of the text
            num_marker = len(tokenizer.encode(marks.text, add_special_tokens=False))
            max_each = tuple(None if num is None else num + num_marker for num in max_each)
        whole = (marks.text + text,)
        ids = self._encode_text(whole, marks.room(wanted), keeps_end, adds, max_each).ids
        num_leading = int(adds and bool(ids) and ids[0] in tokenizer.special_ids)
        marked = marks.mark(ids, num_leading)
        return PoolingEncoded(marked.ids, None, marked.num_keys, marked.skipped_rows)

    def _encode_text(
        self,
        texts: tuple[str, ...],
        wanted: int | None,
        keeps_end: bool,
        adds: bool,
        max_each: tuple[int | None, ...] = (),
    ) -> PoolingEncoded:
        """Encode a text or a pair; each is cut to its own length first, then all to what is wanted."""
        tokenizer = self._needed_tokenizer("prompt")
        if not texts[0]:
            raise invalid("prompt", "the prompt must not be empty")
        if self._spec.lowers_case:
            texts = tuple(text.lower() for text in texts)
        lengths = [len(text) for text in texts]
        if max_each:
            longest = tokenizer.longest_token_chars
            each = tuple(zip(texts, max_each, strict=True))
            lengths = [len(t) if most is None else min(len(t), most * longest) for t, most in each]
            texts = tuple(
                text if most is None else _part(text, most, tokenizer, keeps_end=False)
                for text, most in each
            )
        if wanted is None:
            self._refuse_hopeless(sum(lengths), tokenizer)
        else:
            texts = tuple(_part(text, wanted, tokenizer, keeps_end=keeps_end) for text in texts)
        ids, type_ids = tokenizer.encode_within(
            *texts,
            add_special_tokens=adds,
            max_length=wanted,
            keeps_end=keeps_end,
            max_each=max_each,
        )
        num_types = self._limits.num_token_types
        if num_types <= 1 or not any(type_ids):
            type_ids = None
        else:  # a tokenizer's, which may know of more types than the model
            type_ids = checked_ids(type_ids, num_types, TYPES)
        if not self._fits:
            ids = checked_ids(ids, self._limits.vocab_size)
        return PoolingEncoded(ids, type_ids)

    def _keeps_end(self, side: str | None) -> bool:
        """A text is cut at its end unless the request, or else the tokenizer, decides otherwise."""
        own = None if self._tokenizer is None else self._tokenizer.truncation_side
        return super()._keeps_end(side or own or "right")


def _part(text: str, num_tokens: int, tokenizer: Tokenizer, *, keeps_end: bool) -> str:
    """Return a part of the text, long enough to become this many tokens."""
    keep = (num_tokens + SPARE_TOKENS) * tokenizer.longest_token_chars
    return text[-keep:] if keeps_end else text[:keep]
