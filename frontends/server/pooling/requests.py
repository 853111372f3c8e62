"""Declare the bodies of the pooling routes.

A null means that the field is not given; the table in `fields.py` decides about all other fields.  The engine checks ranges, so they
are not checked here a second time.
"""

from typing import Any, ClassVar, Literal

import msgspec

from trouper.actors.messages.requests import ClientOptions
from trouper.frontends.server.generation.requests import Int64
from trouper.frontends.server.shared import fields

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]


class PoolingRequestFields(ClientOptions, frozen=False, kw_only=True):  # pyright: ignore[reportGeneralTypeIssues]  # msgspec allows it
    """The fields that all pooling requests share.

    The engine's scheduling treats them like generating requests of the same priority.
    """

    OTHERS: ClassVar[fields.Others] = fields.POOLING

    model: str | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    use_activation: bool | None = None
    # Accepted without effect, because pooling has no prefix cache.
    cache_salt: str | None = None
    normalize: Any = None


class InputRequest(PoolingRequestFields, kw_only=True):
    """The input of a pooling request: texts, token ids, or a conversation.

    A list of token ids, or of lists of them, is not tokenized again.  A conversation is rendered by the chat
    template.
    """

    input: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    # Of images in `messages`; no other input has any.
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class EncodedRequest(InputRequest, kw_only=True):
    """The fields that choose the encoding of arrays.

    They change only the representation in the reply, except for `dimensions`, which truncates embeddings.
    """

    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Endianness | None = None


class EmbeddingRequest(EncodedRequest, kw_only=True):
    """`POST /v1/embeddings`."""


class PoolingRequest(EncodedRequest, kw_only=True):
    """`POST /pooling`."""

    task: str | None = None


class ClassifyRequest(InputRequest, kw_only=True):
    """`POST /classify`."""


class ScoringFields(PoolingRequestFields, kw_only=True):
    """Fields of requests that compare texts.

    Long texts are truncated to the given numbers of tokens, the query and the document separately.
    """

    OTHERS: ClassVar[fields.Others] = fields.SCORING

    max_tokens_per_query: int | None = None  # 0: all
    max_tokens_per_doc: int | None = None  # the same


class RerankDocument(msgspec.Struct, kw_only=True):
    """A text in Cohere's form, or the parts of a message, with images."""

    text: str | None = None
    content: list[dict[str, Any]] | None = None


Scored = str | RerankDocument
ScoredSide = Scored | list[Scored]


class ScoreRequest(ScoringFields, kw_only=True):
    """The body of `POST /score`: two sides of pairs, under any of four names."""

    data_1: ScoredSide | None = None
    data_2: ScoredSide | None = None
    queries: ScoredSide | None = None
    documents: ScoredSide | None = None
    items: ScoredSide | None = None
    text_1: ScoredSide | None = None
    text_2: ScoredSide | None = None


class RerankRequest(ScoringFields, kw_only=True):
    """`POST /rerank`, `/v1/rerank`, `/v2/rerank`."""

    query: Scored
    documents: list[Scored]
    top_n: int | None = None
    return_documents: bool | None = None


class CohereInput(msgspec.Struct, kw_only=True):
    """Texts and images that have one embedding."""

    content: list[dict[str, Any]]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """`POST /v2/embed`, Cohere's form."""

    OTHERS: ClassVar[fields.Others] = fields.COHERE

    texts: list[str] | None = None
    # URLs of images, each of which is embedded.
    images: list[str] | None = None
    # Each is embedded as a whole: `{"content": [parts of a message]}`.
    inputs: list[CohereInput] | None = None
    model: str | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None
    priority: Int64 | None = None
