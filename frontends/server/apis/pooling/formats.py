"""Declare the bodies of the pooling routes and build their replies, with arrays as numbers, base64 or bytes, in five dtypes.  Pure.

In a body, a null means that the field is not given; the table in `fields.py` decides about all other fields.  The engine checks
ranges, so they are not checked here a second time.

Many floats take long, so arrays and long replies are encoded in threads.  numpy has no bfloat16 and no 8-bit floats, so they are
computed here by torch's rules: rounding to nearest, ties to even; values beyond the largest become the largest (e4m3, which has no
infinity) or infinity.
"""

import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import pybase64

from trouper.actors.messages.requests import ClientOptions, RequestOptions
from trouper.frontends.python.scoring import MixedContent, Pooled, Side
from trouper.frontends.server.generation.request_fields import Int64
from trouper.frontends.server.http.context import JSON
from trouper.frontends.server.shared import fields
from trouper.outputs import Array
from trouper.pooling import PoolingParams

STEP = 2**12  # numbers written at once, in 0.3 ms
COHERE_TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")
as_json = msgspec.json.Encoder().encode


class Encoding(msgspec.Struct, frozen=True):
    """The format, dtype and byte order that a client wants for its numbers.

    OpenAI's clients use float or base64; the other values are vLLM's extensions.
    """

    format: str = "float"
    dtype: str = "float32"
    endianness: str = "native"

    @property
    def is_binary(self) -> bool:
        return self.format in ("bytes", "bytes_only")


def encode(array: Array, how: Encoding) -> bytes:
    """Return nested lists of numbers or a base64 string as JSON, or the bytes themselves.

    Base64 needs a third of the bytes of JSON numbers, and much less time.
    """
    if how.format == "float":
        return numbers(array)
    raw = to_bytes(array, how.dtype, how.endianness)
    return b'"%b"' % pybase64.b64encode(raw) if how.format == "base64" else raw


def numbers(array: Array) -> bytes:
    """Return an array as nested JSON lists.

    Other threads can run after every `STEP` numbers, because a large array takes long and holds the interpreter lock.
    """
    if array.ndim > 1:
        rows: list[bytes] = []
        for row in array:
            rows.append(numbers(row))
            time.sleep(0)  # releases the interpreter
        return listed(rows)
    parts: list[bytes] = []
    for begin in range(0, len(array), STEP):
        if begin:
            time.sleep(0)
        parts.append(as_json(array[begin : begin + STEP].tolist())[1:-1])
    return listed(parts)


def listed(parts: Sequence[bytes]) -> bytes:
    """Join encoded entries to a JSON list.  Joining more than 1 MB releases the interpreter lock."""
    return b"".join((b"[", b",".join(parts), b"]"))


def encode_cohere(array: Array, kind: str) -> bytes:
    """Return the JSON of one embedding in one of Cohere's types.

    int8 and uint8 are scaled by the largest number of each embedding, so they keep its direction but not its length.  Binary types
    contain the signs, eight in a number, the first in the highest bit.
    """
    match kind:
        case "float":
            return numbers(array)
        case "base64":
            return encode(array, Encoding("base64", endianness="little"))
        case "binary" | "ubinary":
            packed = np.packbits(array > 0).astype(np.int16)
            return as_json((packed - 128 if kind == "binary" else packed).tolist())
        case _:
            largest = np.abs(array).max() or np.float32(1)
            levels = np.rint(array / largest * np.float32(127)).astype(np.int16)
            return as_json((levels + 128 if kind == "uint8" else levels).tolist())


def to_bytes(array: Array, dtype: str, endianness: str = "native") -> bytes:
    match dtype:
        case "float32":
            made: np.ndarray[Any, Any] = np.ascontiguousarray(array, np.float32)
        case "float16":
            with np.errstate(over="ignore"):  # infinity is the answer
                made = array.astype(np.float16)
        case "bfloat16":
            made = _bfloat16(array)
        case _:
            made = _float8(array, 4 if dtype == "fp8_e4m3" else 5)
    if endianness not in ("native", sys.byteorder):
        made = made.byteswap()
    return made.tobytes()


def _bfloat16(array: Array) -> np.ndarray[Any, Any]:
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float8(array: Array, num_exponent_bits: int) -> np.ndarray[Any, Any]:
    values, middles, beyond = _float8_table(num_exponent_bits)
    size = np.abs(array)
    codes = np.searchsorted(middles, size)  # a tie goes to the lower one,
    is_tie = size == np.append(middles, np.inf)[codes]
    codes += is_tie & (codes % 2 == 1)  # unless that is odd
    codes = np.where(codes < len(values), codes, beyond)
    return (codes + 0x80 * np.signbit(array)).astype(np.uint8)


@lru_cache(2)
def _float8_table(num_exponent_bits: int) -> tuple[Array, Array, int]:
    """Return the finite values ≥ 0 by code, the midpoints between neighbours, and the code for larger values."""
    num_mantissa_bits = 7 - num_exponent_bits
    num_finite, beyond = (0x7F, 0x7E) if num_exponent_bits == 4 else (0x7C, 0x7C)
    codes = np.arange(num_finite)
    exponents, mantissas = codes >> num_mantissa_bits, codes & ((1 << num_mantissa_bits) - 1)
    bias = (1 << (num_exponent_bits - 1)) - 1
    fractions = mantissas / (1 << num_mantissa_bits) + (exponents > 0)
    finite = (fractions * 2.0 ** (np.maximum(exponents, 1) - bias)).astype(np.float32)
    last = 2 * finite[-1] - finite[-2]  # where the next one would be
    return finite, (finite + np.append(finite[1:], last)) / np.float32(2), beyond


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


OCTETS = b"application/octet-stream"


class PoolingServeContext(NamedTuple):
    """A checked request.  Its `pooling_params` always name a task.

    It contains everything for the reply, so the postprocessing can run in a thread without the service.
    """

    prompts: list[Any]
    places: list[str]  # the client's name for each prompt
    pooling_params: PoolingParams
    options: RequestOptions
    id: str
    model: str
    created: int


class Reply(NamedTuple):
    """An encoded reply.

    It is encoded already, because embeddings are converted in a thread and sent as they are.
    """

    body: bytes
    kind: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


def build_encoded(
    serving: PoolingServeContext,
    outputs: list[Pooled],
    how: Encoding,
    object_name: str,
    key: str,
) -> Reply:
    made = [encode(output.outputs.array, how) for output in outputs]
    if how.is_binary:
        return _build_bytes(serving, outputs, made, how)
    data = [
        b'{"index":%d,"object":"%b","%b":%b}' % (i, object_name.encode(), key.encode(), value)
        for i, value in enumerate(made)
    ]
    return _listed(serving, outputs, data)


def _build_bytes(
    serving: PoolingServeContext, outputs: list[Pooled], parts: list[bytes], how: Encoding
) -> Reply:
    """Put all values into one body.  The header `metadata` contains the start of each."""
    items: list[dict[str, Any]] = []
    start = 0
    for i, (part, output) in enumerate(zip(parts, outputs, strict=True)):
        items.append(
            {
                "index": i,
                "embed_dtype": how.dtype,
                "endianness": how.endianness,
                "start": start,
                "end": start + len(part),
                "shape": list(output.outputs.array.shape),
            }
        )
        start += len(part)
    head = {"id": serving.id, "created": serving.created, "model": serving.model}
    table = as_json({**head, "data": items, "usage": _usage(outputs)})
    headers = ((b"metadata", table),) if how.format == "bytes" else ()
    return Reply(b"".join(parts), OCTETS, headers)


def build_classes(
    serving: PoolingServeContext, outputs: list[Pooled], labels: tuple[str, ...]
) -> Reply:
    data: list[bytes] = []
    for i, output in enumerate(outputs):
        probs: list[float] = output.outputs.array.tolist()
        label = labels[probs.index(max(probs))]
        entry = {"index": i, "label": label, "probs": probs, "num_classes": len(probs)}
        data.append(as_json(entry))
    return _listed(serving, outputs, data)


def build_scores(serving: PoolingServeContext, outputs: list[Pooled]) -> Reply:
    data = [
        as_json({"index": i, "object": "score", "score": _number(output)})
        for i, output in enumerate(outputs)
    ]
    return _listed(serving, outputs, data)


def build_ranking(
    serving: PoolingServeContext, outputs: list[Pooled], texts: list[Side], num: int
) -> Reply:
    scores = [_number(output) for output in outputs]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:num]
    results = [
        {
            "index": i,
            "document": _shown(texts[i]),
            "relevance_score": scores[i],
        }
        for i in best
    ]
    num = _usage(outputs)["prompt_tokens"]
    usage = {"prompt_tokens": num, "total_tokens": num}
    reply = {"id": serving.id, "model": serving.model, "usage": usage, "results": results}
    return Reply(as_json(reply))


def _shown(side: Side) -> dict[str, Any]:
    if isinstance(side, MixedContent):
        return {"text": None, "multi_modal": side.parts}
    return {"text": side, "multi_modal": None}


def build_cohere(
    serving: PoolingServeContext, outputs: list[Pooled], kinds: Sequence[str]
) -> Reply:
    texts = [prompt for prompt in serving.prompts if isinstance(prompt, str)]
    head = as_json({"id": serving.id, "response_type": "embeddings_by_type", "texts": texts})
    tail = {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": _usage(outputs)["prompt_tokens"], "image_tokens": 0},
    }
    arrays = [output.outputs.array for output in outputs]
    found = [
        b'"%b":%b' % (kind.encode(), listed([encode_cohere(array, kind) for array in arrays]))
        for kind in kinds
    ]
    embeddings = b",".join(found)
    return Reply(
        b"".join((head[:-1], b',"embeddings":{', embeddings, b'},"meta":', as_json(tail), b"}"))
    )


def _listed(serving: PoolingServeContext, outputs: list[Pooled], data: list[bytes]) -> Reply:
    """Join encoded entries, which may be long, without parsing them."""
    head = {
        "id": serving.id, "object": "list", "created": serving.created, "model": serving.model
    }  # fmt: skip
    usage = as_json(_usage(outputs))
    return Reply(
        b"".join((as_json(head)[:-1], b',"data":', listed(data), b',"usage":', usage, b"}"))
    )


def _usage(outputs: list[Pooled]) -> dict[str, Any]:
    num = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": num, "total_tokens": num, "completion_tokens": 0,
        "prompt_tokens_details": None, "completion_tokens_details": None,
    }  # fmt: skip


def _number(output: Pooled) -> float:
    return float(output.outputs.array.reshape(()))
