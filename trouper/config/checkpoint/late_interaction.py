"""How a late-interaction model was trained to read queries and documents, from its folder.

PyLate stores this in `config_sentence_transformers.json`, with the names and defaults used here; sentence-transformers in
the configs of its modules; and Stanford's ColBERT in `artifact.metadata`.  Without any of them texts are read unchanged.
"""

import string
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from trouper.errors import UnsupportedFeatureError

UNLIMITED = 2**31
STANFORD = {"query_prefix": "[unused0]", "document_prefix": "[unused1]", "document_length": 220}
STANFORD_NAMES = {
    "query_token_id": "query_prefix", "doc_token_id": "document_prefix", "query_maxlen": "query_length",
    "doc_maxlen": "document_length", "attend_to_mask_tokens": "attend_to_expansion_tokens",
}  # fmt: skip


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """Markers and lengths with which a late-interaction model was trained.

    Lengths are in tokens, including everything added.  A marker missing from the vocabulary is inserted as text.  The
    defaults are PyLate's.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    # Whether queries are filled up to their length with mask tokens.
    do_query_expansion: bool = True
    # Whether attention sees the added mask tokens.
    attend_to_expansion_tokens: bool = False
    # Tokens that do not count in the scores of documents.
    skiplist_words: tuple[str, ...] = tuple(string.punctuation)

    @classmethod
    def of_pylate(cls, config: Mapping[str, Any]) -> Self | None:
        """Read PyLate's config_sentence_transformers.json.

        Returns None for a config without any of PyLate's fields.

        Raises:

            msgspec.ValidationError: a field has the wrong type.
        """
        given = {n: config[n] for n in cls.__struct_fields__ if config.get(n) is not None}
        return msgspec.convert(given, cls) if given else None

    @classmethod
    def of_sentence_transformers(
        cls,
        config: Mapping[str, Any],
        transformer: Mapping[str, Any],
        mask: Mapping[str, Any],
        max_length: int | None,
    ) -> Self:
        """Read the configs of a MultiVectorEncoder: its own, its Transformer's and its MultiVectorMask's.

        Raises:
            UnsupportedFeatureError: an unsupported option.
        """
        prompts: dict[str, Any] = config.get("prompts") or {}
        expansion: dict[str, Any] = transformer.get("query_expansion") or {}
        longest = max_length or UNLIMITED
        for name, value, known in (
            ("query_expansion.strategy", expansion.get("strategy"), (None, "fixed")),
            ("query_expansion.token", expansion.get("token"), (None,)),
            ("skiplist_tasks", mask.get("skiplist_tasks"), (None, ["document"])),
            ("keep_only_token_ids", mask.get("keep_only_token_ids"), (None,)),
        ):
            if value not in known:
                raise UnsupportedFeatureError(f"{name}={value!r} of a MultiVectorEncoder")
        given = {
            "query_prefix": prompts.get("query") or "",
            "document_prefix": prompts.get("document") or "",
            "query_length": expansion.get("length") or transformer.get("query_length") or longest,
            "document_length": transformer.get("document_length") or longest,
            "do_query_expansion": bool(expansion),
            "attend_to_expansion_tokens": expansion.get("attend", False),
            "skiplist_words": mask.get("skiplist_words") or (),
        }
        return msgspec.convert(given, cls)

    @classmethod
    def of_stanford(cls, metadata: Mapping[str, Any]) -> Self | None:
        """Read the artifact.metadata of Stanford's ColBERT.

        Its names are translated to PyLate's.  Fields that the file lacks get ColBERT's defaults,
        which differ from PyLate's.  Returns None for an empty file.
        """
        if not metadata:
            return None
        config: dict[str, Any] = dict(STANFORD)
        for theirs, name in STANFORD_NAMES.items():
            if metadata.get(theirs) is not None:
                config[name] = metadata[theirs]
        if metadata.get("mask_punctuation") is False:
            config["skiplist_words"] = ()
        return cls.of_pylate(config)
