"""The routes of a pooling model.  Source: spec sections 14.4, 16.2 and 16.3.

    pre-process (checks; rendering is the Renderers') -> one `encode` a prompt -> post-process, in a thread

The answer, with all its floats, base64 or bytes, is built in a thread; the loop only sends it.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.pooling import Encoding, Pooled, Scorer, as_pairs, collect
from trouper.frontends.server.chat import chat_prompt
from trouper.frontends.server.encodings import Encoding as HowEncoded
from trouper.frontends.server.encodings import encode
from trouper.frontends.server.exchange import JSON, Exchange
from trouper.frontends.server.exchange import encode as as_json
from trouper.frontends.server.pooling_wire import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    EncodedRequest,
    InputRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    Scoring,
    Shared,
)
from trouper.frontends.server.service import Service
from trouper.inputs import PoolingPrompt
from trouper.pooler_config import PoolerSpec
from trouper.pooling import PoolingParams

OCTETS = b"application/octet-stream"
MAX_INPUTS = 2048
SIDES = (("data_1", "data_2"), ("queries", "documents"), ("queries", "items"), ("text_1", "text_2"))
COHERE_TYPES = ("float",)


class PoolingServeContext(NamedTuple):
    """One request on its way; `pooling_params` is never left open."""

    prompts: list[Any]
    places: list[str]  # what the client calls each prompt
    pooling_params: PoolingParams
    options: dict[str, Any]  # of tokenising
    priority: int
    id: str
    model: str
    created: int


class Reply(NamedTuple):
    """A built answer."""

    body: bytes
    kind: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


async def create_embedding(service: Service, exchange: Exchange, request: EmbeddingRequest) -> None:
    context = _preprocess(service, exchange, request, "embd", "embed")
    outputs = await _encode(service, exchange, context)
    build = partial(_build_encoded, context, outputs, _how(request), "embedding", "embedding")
    await _send(service, exchange, build)


async def create_pooling(service: Service, exchange: Exchange, request: PoolingRequest) -> None:
    spec = _spec(service)
    context = _preprocess(service, exchange, request, "pooling", request.task or spec.engine_task)
    outputs = await _encode(service, exchange, context)
    build = partial(_build_encoded, context, outputs, _how(request), "pooling", "data")
    await _send(service, exchange, build)


async def create_classification(
    service: Service, exchange: Exchange, request: ClassifyRequest
) -> None:
    context = _preprocess(service, exchange, request, "classify", "classify")
    outputs = await _encode(service, exchange, context)
    build = partial(_build_classes, context, outputs, _spec(service).labels)
    await _send(service, exchange, build)


async def create_score(service: Service, exchange: Exchange, request: ScoreRequest) -> None:
    first, second = next(
        (pair for pair in SIDES if all(getattr(request, name) is not None for name in pair)),
        ("data_1", "data_2"),
    )
    if getattr(request, first) is None or getattr(request, second) is None:
        raise _bad("data_1", "give two sides: data_1 and data_2, or queries and documents")
    queries, documents = as_pairs(
        getattr(request, first), getattr(request, second), (first, second)
    )
    outputs, context = await _score(service, exchange, request, queries, documents)
    await _send(service, exchange, partial(_build_scores, context, outputs))


async def create_rerank(service: Service, exchange: Exchange, request: RerankRequest) -> None:
    texts = [d if isinstance(d, str) else d.text for d in request.documents]
    if not texts:
        raise _bad("documents", "must not be empty")
    if request.top_n is not None and request.top_n < 0:
        raise _bad("top_n", "must be at least 0")
    queries = [request.query] * len(texts)
    outputs, context = await _score(service, exchange, request, queries, texts)
    num = request.top_n or len(texts)
    await _send(service, exchange, partial(_build_ranking, context, outputs, texts, num))


async def create_cohere_embedding(
    service: Service, exchange: Exchange, request: CohereEmbedRequest
) -> None:
    if request.images or request.inputs:
        raise UnsupportedFeatureError("images and inputs are not supported yet; send texts")
    for kind in request.embedding_types or ():
        if kind not in COHERE_TYPES:
            raise _bad("embedding_types", f"{kind[:40]} is not supported; float is")
    side = {"START": "left", "END": "right"}.get(request.truncate or "END")
    inner = EmbeddingRequest(
        model=request.model,
        input=list(request.texts or ()),
        dimensions=request.output_dimension,
        priority=request.priority,
        truncate_prompt_tokens=None if side is None else request.max_tokens or -1,
        truncation_side=side,
    )
    context = _preprocess(service, exchange, inner, "embd", "embed", field="texts")
    outputs = await _encode(service, exchange, context)
    await _send(service, exchange, partial(_build_cohere, context, outputs))


# Before the engine


def _preprocess(
    service: Service,
    exchange: Exchange,
    request: InputRequest,
    prefix: str,
    task: str,
    *,
    field: str = "input",
) -> PoolingServeContext:
    """Checks, names and prompts: what takes no time.  The prompts are rendered by the engine's pool."""
    _spec(service)
    _check_shared(request)
    if request.messages is not None:
        if request.input is not None:
            raise _bad("input", "give either input or messages")
        prompts: list[Any] = [
            chat_prompt(request, trusts_template=service.settings.trust_request_chat_template)
        ]
        places = ["messages"]
    else:
        prompts, places = _inputs(request.input, field)
    params = PoolingParams(
        task=task,
        use_activation=request.use_activation,
        dimensions=request.dimensions if isinstance(request, EncodedRequest) else None,
    )
    return _context(service, exchange, request, prefix, prompts, places, params)


def _context(
    service: Service,
    exchange: Exchange,
    request: Shared,
    prefix: str,
    prompts: list[Any],
    places: list[str],
    params: PoolingParams,
) -> PoolingServeContext:
    model = service.check_model(request.model)
    if exchange.ticket is not None:
        exchange.ticket.resize(len(prompts))
    exchange.name_by(request.request_id)
    priority = request.priority or 0
    names = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")
    return PoolingServeContext(
        prompts=prompts,
        places=places,
        pooling_params=params,
        options={n: getattr(request, n) for n in names if getattr(request, n) is not None},
        priority=~priority if service.settings.is_smaller_priority_first else priority,
        id=f"{prefix}-{exchange.request_id}",
        model=model,
        created=int(time.time()),
    )


def _spec(service: Service) -> PoolerSpec:
    spec = service.config.pooler
    if spec is None:
        raise _bad("model", "this model generates; it does not pool")
    return spec


def _check_shared(request: Shared) -> None:
    if request.normalize is not None:
        raise _bad("normalize", "is no parameter any more: use use_activation")
    for name in ("padding", "mm_processor_kwargs"):
        if getattr(request, name):
            raise UnsupportedFeatureError(f"{name} is not supported yet")


def _inputs(given: str | list[Any] | None, field: str) -> tuple[list[PoolingPrompt], list[str]]:
    """The prompts in the engine's form, and what the client calls each."""
    if not given:
        raise _bad(field, "must not be empty")
    if isinstance(given, str) or all(type(id) is int for id in given):
        return [given], [field]
    if len(given) > MAX_INPUTS:
        raise _bad(field, f"at most {MAX_INPUTS} inputs")
    kind = type(given[0])
    for i, prompt in enumerate(given):
        if type(prompt) is not kind or kind not in (str, list):
            raise _bad(f"{field}[{i}]", "must be text, or a list of token ids, as the others")
        if not prompt:
            raise _bad(f"{field}[{i}]", "must not be empty")
    return given, [f"{field}[{i}]" for i in range(len(given))]


# Through the engine


async def _encode(
    service: Service, exchange: Exchange, context: PoolingServeContext
) -> list[Pooled]:
    encodings: list[Encoding] = [
        service.engine.encode(
            prompt,
            context.pooling_params,
            f"{exchange.id}-{i}",
            priority=context.priority,
            tokenization_kwargs=context.options,
        )
        for i, prompt in enumerate(context.prompts)
    ]
    service.note(encodings, exchange)
    try:
        return _whole(await collect(encodings, places=context.places))
    finally:
        service.forget(encodings)


async def _score(
    service: Service,
    exchange: Exchange,
    request: Scoring,
    queries: Sequence[str],
    documents: Sequence[str],
) -> tuple[list[Pooled], PoolingServeContext]:
    _spec(service)
    _check_shared(request)
    for name in ("max_tokens_per_query", "max_tokens_per_doc", "instruction"):
        if getattr(request, name):
            raise UnsupportedFeatureError(f"{name} is not supported yet")
    if len(documents) > MAX_INPUTS:
        raise _bad("documents", f"at most {MAX_INPUTS} pairs")
    params = PoolingParams(use_activation=request.use_activation)
    context = _context(service, exchange, request, "score", list(documents), [], params)
    scorer = Scorer(
        service.engine,
        params,
        name=exchange.id,
        priority=context.priority,
        options=context.options,
    )
    return _whole(await scorer.score(queries, documents)), context


def _whole(outputs: list[Pooled]) -> list[Pooled]:
    """Raises what ended one of them early."""
    for output in outputs:
        if output.error is not None:
            raise output.error.to_exception(output.request_id)
    return outputs


# After the engine: in a thread


async def _send(service: Service, exchange: Exchange, build: Callable[[], Reply]) -> None:
    reply = await anyio.to_thread.run_sync(build, limiter=service.threads)
    await exchange.send_body(reply.body, reply.kind, 200, reply.headers)


def _build_encoded(
    context: PoolingServeContext,
    outputs: list[Pooled],
    how: HowEncoded,
    object_name: str,
    key: str,
) -> Reply:
    made = [encode(output.outputs.array, how) for output in outputs]
    if how.is_binary:
        return _build_bytes(context, outputs, made, how)
    data = [{"index": i, "object": object_name, key: value} for i, value in enumerate(made)]
    return _listed(context, outputs, data)


def _build_bytes(
    context: PoolingServeContext, outputs: list[Pooled], parts: list[bytes], how: HowEncoded
) -> Reply:
    """All values in one body; the header `metadata` says where each begins."""
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
    head = {"id": context.id, "created": context.created, "model": context.model}
    table = as_json({**head, "data": items, "usage": _usage(outputs)})
    headers = ((b"metadata", table),) if how.format == "bytes" else ()
    return Reply(b"".join(parts), OCTETS, headers)


def _build_classes(
    context: PoolingServeContext, outputs: list[Pooled], labels: tuple[str, ...]
) -> Reply:
    data: list[dict[str, Any]] = []
    for i, output in enumerate(outputs):
        probs = output.outputs.array.tolist()
        label = labels[probs.index(max(probs))]
        data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
    return _listed(context, outputs, data)


def _build_scores(context: PoolingServeContext, outputs: list[Pooled]) -> Reply:
    data = [
        {"index": i, "object": "score", "score": _number(output)}
        for i, output in enumerate(outputs)
    ]
    return _listed(context, outputs, data)


def _build_ranking(
    context: PoolingServeContext, outputs: list[Pooled], texts: list[str], num: int
) -> Reply:
    scores = [_number(output) for output in outputs]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:num]
    results = [
        {"index": i, "document": {"text": texts[i]}, "relevance_score": scores[i]} for i in best
    ]
    reply = {
        "id": context.id, "model": context.model, "usage": _usage(outputs), "results": results
    }  # fmt: skip
    return Reply(as_json(reply))


def _build_cohere(context: PoolingServeContext, outputs: list[Pooled]) -> Reply:
    reply = {
        "id": context.id,
        "embeddings": {"float": [output.outputs.array.tolist() for output in outputs]},
        "texts": context.prompts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": _usage(outputs)["prompt_tokens"]},
        },
    }
    return Reply(as_json(reply))


def _listed(
    context: PoolingServeContext, outputs: list[Pooled], data: list[dict[str, Any]]
) -> Reply:
    reply = {
        "id": context.id,
        "object": "list",
        "created": context.created,
        "model": context.model,
        "data": data,
        "usage": _usage(outputs),
    }
    return Reply(as_json(reply))


def _usage(outputs: list[Pooled]) -> dict[str, Any]:
    num = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num, "total_tokens": num, "completion_tokens": 0}


def _number(output: Pooled) -> float:
    return float(output.outputs.array.reshape(()))


def _how(request: EncodedRequest) -> HowEncoded:
    return HowEncoded(
        request.encoding_format or "float",
        request.embed_dtype or "float32",
        request.endianness or "native",
    )


def _bad(name: str, rule: str) -> TrouperValidationError:
    return TrouperValidationError(f"{name}: {rule}", parameter=name)
