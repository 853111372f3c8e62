"""Queries and documents of a late-interaction model: markers, lengths, expansion, what is not scored.  Pure.

    query     [CLS] [Q] w … w [SEP] [MASK] … [MASK]     filled up to its length; masks are scored, and mostly not seen
    document  [CLS] [D] w … w [SEP]                     cut at its length; words of the skip list are not scored

Source: Khattab and Zaharia 2020; the same ids as PyLate makes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from trouper.actors.rendering.prompts.sampling import ModelLimits
from trouper.actors.rendering.tokenizers.tokenizer import Tokenizer
from trouper.config.checkpoint.sentence_transformers import LateInteraction
from trouper.errors import TrouperValidationError


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
