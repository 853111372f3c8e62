"""Build the replies of pooling routes.  Pure; many floats take long, so long replies are built in a thread."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from trouper.actors.messages.requests import RequestOptions
from trouper.frontends.python.scoring import MixedContent, Pooled, Side
from trouper.frontends.server.http.context import JSON
from trouper.frontends.server.pooling.requests import (
    Encoding,
    as_json,
    encode,
    encode_cohere,
    listed,
)
from trouper.pooling import PoolingParams

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
