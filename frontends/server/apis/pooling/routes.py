"""Serve the routes of a pooling model, Cohere's `/v2/embed` for texts and images among them.

    preprocess (checks; the engine renders) → one `encode` for each prompt → postprocess, in a thread

A thread builds each reply, with all its floats, base64 or bytes, unless it is short.  The event loop only sends it.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import anyio
import anyio.to_thread
import msgspec

from trouper.actors.engine.admission import check_place
from trouper.actors.messages.requests import RequestOptions, client_options
from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.python.scoring import (
    MixedContent,
    Places,
    Pooled,
    PoolingGeneration,
    Scorer,
    Side,
    as_pairs,
    collect,
)
from trouper.frontends.server.apis.pooling.formats import (
    COHERE_TYPES,
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    EncodedRequest,
    Encoding,
    InputRequest,
    PoolingRequest,
    PoolingRequestFields,
    PoolingServeContext,
    Reply,
    RerankRequest,
    ScoredSide,
    ScoreRequest,
    ScoringFields,
    build_classes,
    build_cohere,
    build_encoded,
    build_ranking,
    build_scores,
)
from trouper.frontends.server.generation.streams import final_outputs
from trouper.frontends.server.generation.transcript import MAX_PARTS, chat_prompt
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.http.headers import read_placement
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import aborted
from trouper.inputs import PoolingPrompt
from trouper.pooling import PoolingParams, unsupported_task

COHERE_INPUTS = ("search_document", "search_query", "classification", "clustering", "image")
COHERE_NAMES = {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}


async def create_cohere_embedding(
    service: Service, context: RequestContext, request: CohereEmbedRequest
) -> None:
    kinds = tuple(dict.fromkeys(request.embedding_types or ("float",)))
    for kind in kinds:
        if kind not in COHERE_TYPES:
            rule = f"must be one of {', '.join(COHERE_TYPES)}, not {kind[:40]!r}"
            raise invalid("embedding_types", rule)
    spec = spec_for(service, "embed")
    size = request.output_dimension or spec.dimensions or spec.embedding_size
    if size % 8 and ("binary" in kinds or "ubinary" in kinds):
        rule = f"binary needs a multiple of 8 dimensions, but the embeddings have {size}"
        raise invalid("embedding_types", rule)
    if request.input_type is not None and request.input_type not in COHERE_INPUTS:
        text = f"Unsupported input_type {request.input_type[:40]!r}. Supported values: {', '.join(COHERE_INPUTS)}"
        raise TrouperValidationError(text, parameter="input_type")
    side = {"START": "left", "END": "right"}.get(request.truncate or "END")
    max_tokens = -1 if request.max_tokens is None else request.max_tokens
    inner = EmbeddingRequest(
        model=request.model,
        input=list(request.texts or ()),
        dimensions=request.output_dimension,
        priority=request.priority,
        truncate_prompt_tokens=None if side is None else max_tokens,
        truncation_side=side,
    )
    seen = _cohere_contents(request)
    with _named_as(COHERE_NAMES):
        if seen is None:
            serving = preprocess(service, context, inner, "embd", "embed", field="texts")
        else:
            contents, places = seen
            params = PoolingParams(task="embed", dimensions=request.output_dimension)
            prompts = [content.prompt for content in contents]
            serving = serving_context(service, context, inner, "embd", [*prompts], places, params)
            untruncated = {"truncate_prompt_tokens": None, "truncation_side": None}
            options = msgspec.structs.replace(serving.options, **untruncated)
            serving = serving._replace(options=options)
        outputs = await encode_all(service, context, serving)
    await send_reply(service, context, partial(build_cohere, serving, outputs, kinds))


def _cohere_contents(
    request: CohereEmbedRequest,
) -> tuple[list[MixedContent], list[str]] | None:
    """Return the contents of `images` or `inputs`, and the client's name for each; None for a request of texts.

    Raises:
        TrouperValidationError: several of the three fields are given, or a field of texts is given for images.
    """
    names = ("texts", "images", "inputs")
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) > 1:
        raise invalid(given[1], f"give only one of {', '.join(names)}")
    if not given or given == ["texts"]:
        return None
    for name in ("truncate", "max_tokens"):
        if getattr(request, name) not in (None, "NONE"):
            raise invalid(name, "not with images, whose tokens must stay whole")
    (name,) = given
    contents = [
        MixedContent([{"type": "image_url", "image_url": url}]) for url in request.images or ()
    ]
    for i, each in enumerate(request.inputs or ()):
        if not each.content or len(each.content) > MAX_PARTS:
            raise invalid(f"inputs[{i}].content", f"must contain 1 to {MAX_PARTS} parts")
        contents.append(MixedContent(each.content))
    if not 0 < len(contents) <= MAX_INPUTS:
        raise invalid(name, f"must contain 1 to {MAX_INPUTS} inputs", len(contents))
    return contents, [f"{name}[{i}]" for i in range(len(contents))]


@contextmanager
def _named_as(names: Mapping[str, str]) -> Generator[None]:
    """Errors of a parameter name the field by which the client gave it."""
    try:
        yield
    except TrouperValidationError as error:
        ours = error.parameter
        if ours is None or ours not in names:
            raise
        message = error.message.replace(ours, names[ours])
        value = error.value
        raise TrouperValidationError(message, parameter=names[ours], value=value) from error


MAX_INPUTS = 2048
# numbers, written in 0.3 ms; those of one text in 30 µs, less than a hop to a thread and back
QUICK = 2**12
QUICK_BASE64 = 2**15  # numbers as they are, in base64: 0.1 ms
SIDES = (("data_1", "data_2"), ("queries", "documents"), ("queries", "items"), ("text_1", "text_2"))


async def create_embedding(
    service: Service, context: RequestContext, request: EmbeddingRequest
) -> None:
    serving = preprocess(service, context, request, "embd", "embed")
    outputs = await encode_all(service, context, serving)
    build = partial(build_encoded, serving, outputs, _how(request), "embedding", "embedding")
    await send_reply(service, context, build, is_quick=_is_quick(outputs, _how(request)))


async def embed(
    service: Service, context: RequestContext, request: EmbeddingRequest, field: str
) -> tuple[str, list[Pooled]]:
    """Return the model's name and the embedding of each input, for another API's reply.

    Args:
        field: the client's name of the input.
    """
    serving = preprocess(service, context, request, "embd", "embed", field=field)
    return serving.model, await encode_all(service, context, serving)


async def create_pooling(
    service: Service, context: RequestContext, request: PoolingRequest
) -> None:
    task = request.task or spec_for(service, "encode").task
    serving = preprocess(service, context, request, "pooling", task)
    outputs = await encode_all(service, context, serving)
    build = partial(build_encoded, serving, outputs, _how(request), "pooling", "data")
    await send_reply(service, context, build, is_quick=_is_quick(outputs, _how(request)))


async def create_classification(
    service: Service, context: RequestContext, request: ClassifyRequest
) -> None:
    serving = preprocess(service, context, request, "classify", "classify")
    outputs = await encode_all(service, context, serving)
    build = partial(build_classes, serving, outputs, spec_for(service, "classify").labels)
    await send_reply(service, context, build)


async def create_score(service: Service, context: RequestContext, request: ScoreRequest) -> None:
    first, second = next(
        (pair for pair in SIDES if all(getattr(request, name) is not None for name in pair)),
        ("data_1", "data_2"),
    )
    if getattr(request, first) is None or getattr(request, second) is None:
        rule = "give two sides: text_1 and text_2, data_1 and data_2, or queries and documents"
        raise invalid("data_1", rule)
    one, two = (_sides(getattr(request, name), name) for name in (first, second))
    queries, documents, places = as_pairs(one, two, (first, second))
    outputs, serving = await _score(service, context, request, queries, documents, places)
    await send_reply(service, context, partial(build_scores, serving, outputs))


async def create_rerank(service: Service, context: RequestContext, request: RerankRequest) -> None:
    texts: list[Side] = _sides(request.documents, "documents")
    query = _sides(request.query, "query")
    if request.top_n is not None and request.top_n < 0:
        raise invalid("top_n", "must be at least 0", request.top_n)
    queries, _, places = as_pairs(query, texts, ("query", "documents"))
    outputs, serving = await _score(service, context, request, queries, texts, places)
    num = request.top_n or len(texts)
    await send_reply(service, context, partial(build_ranking, serving, outputs, texts, num))


def _sides(given: ScoredSide, place: str) -> Any:
    """Return texts and contents of one side, each in the form that the scorer takes."""
    if isinstance(given, list):
        return [_sides(each, f"{place}[{i}]") for i, each in enumerate(given)]
    if isinstance(given, str):
        return given
    if (given.text is None) == (given.content is None):
        raise invalid(place, "must have one of text and content")
    if given.text is not None:
        return given.text
    if not given.content or len(given.content) > MAX_PARTS:
        raise invalid(f"{place}.content", f"must contain 1 to {MAX_PARTS} parts")
    return MixedContent(given.content)


# Before the engine


def preprocess(
    service: Service,
    context: RequestContext,
    request: InputRequest,
    prefix: str,
    task: str,
    *,
    field: str = "input",
) -> PoolingServeContext:
    """Check a request and collect its prompts.  The engine renders them later."""
    spec_for(service, task)
    _check_shared(request)
    if request.messages is not None:
        if request.input is not None:
            raise invalid("input", "give either input or messages")
        prompts: list[Any] = [chat_prompt(request, service.settings)]
        places = ["messages"]
    else:
        prompts, places = _inputs(request.input, field)
    params = PoolingParams(
        task=task,
        use_activation=request.use_activation,
        dimensions=request.dimensions if isinstance(request, EncodedRequest) else None,
    )
    return serving_context(service, context, request, prefix, prompts, places, params)


def serving_context(
    service: Service,
    context: RequestContext,
    request: PoolingRequestFields,
    prefix: str,
    prompts: list[Any],
    places: list[str],
    params: PoolingParams,
) -> PoolingServeContext:
    model = service.check_model(request.model)
    context.name_by(request.request_id)
    priority = service.size(context, len(prompts), 1, 1, request.priority or 0)
    # no cache makes it worth while to keep a session together
    placement = read_placement(context, request.data_parallel_rank)
    check_place(*placement, service.config.data_parallel_size)
    options: dict[str, Any] = {
        **client_options(request),
        "data_parallel_rank": placement.data_parallel_rank,
        "priority": priority,
        "key": context.tenant,
        "cache_scope": context.cache_scope,
    }
    return PoolingServeContext(
        prompts=prompts,
        places=places,
        pooling_params=params,
        options=RequestOptions(**options),
        id=f"{prefix}-{context.request_id}",
        model=model,
        created=int(time.time()),
    )


def spec_for(service: Service, task: str) -> PoolerSpec:
    """Return the pooler's settings.  Raises TrouperValidationError if the model generates text."""
    spec = service.config.pooler
    if spec is None:
        raise unsupported_task(task, "This model can generate.", "model")
    return spec


def _check_shared(request: PoolingRequestFields) -> None:
    if request.normalize is not None:
        raise invalid("normalize", "was replaced: use use_activation")


def _inputs(given: str | list[Any] | None, field: str) -> tuple[list[PoolingPrompt], list[str]]:
    """Return the prompts in the engine's form, and the client's name for each."""
    if not given:
        raise invalid(field, "must not be empty")
    if isinstance(given, str) or all(type(id) is int for id in given):
        return [given], [field]
    if len(given) > MAX_INPUTS:
        raise invalid(field, f"must contain at most {MAX_INPUTS} inputs", len(given))
    kind = cast("type[object]", type(given[0]))
    for i, prompt in enumerate(given):
        if type(prompt) is not kind or kind not in (str, list):
            raise invalid(
                f"{field}[{i}]",
                "must have the type of the other inputs: either all are texts or all are lists of token ids",
            )
        if not prompt:
            raise invalid(f"{field}[{i}]", "must not be empty")
    return given, [f"{field}[{i}]" for i in range(len(given))]


# Through the engine


async def encode_all(
    service: Service, context: RequestContext, serving: PoolingServeContext
) -> list[Pooled]:
    encodings = (
        service.engine.encode(prompt, serving.pooling_params, f"{context.id}-{i}", serving.options)
        for i, prompt in enumerate(serving.prompts)
    )
    return _whole(await final_outputs(service, context, encodings, serving.places))


async def _score(
    service: Service,
    context: RequestContext,
    request: ScoringFields,
    queries: Sequence[Side],
    documents: Sequence[Side],
    places: Places,
) -> tuple[list[Pooled], PoolingServeContext]:
    spec_for(service, "score")
    _check_shared(request)
    if len(documents) > MAX_INPUTS:
        raise invalid(
            places[1][0].partition("[")[0], f"must give at most {MAX_INPUTS} pairs", len(documents)
        )
    params = PoolingParams(use_activation=request.use_activation)
    serving = serving_context(service, context, request, "score", list(documents), [], params)

    def encode(prompt: Any, params: PoolingParams, name: str, *, max_text_tokens: Any) -> Any:
        options = msgspec.structs.replace(serving.options, max_text_tokens=max_text_tokens)
        return service.engine.encode(prompt, params, name, options)

    scorer = Scorer(
        encode,
        service.config.pooler,
        params,
        name=context.id,
        run=partial(_run_listed, service, context),
        places=places,
        max_tokens_per_query=_most(request, "max_tokens_per_query"),
        max_tokens_per_doc=_most(request, "max_tokens_per_doc"),
    )
    if context.ticket is not None:
        await context.ticket.wait_turn()
    return _whole(await scorer.score(queries, documents)), serving


def _most(request: ScoringFields, name: str) -> int | None:
    """Return the maximum number of tokens to read from each text, or None without a limit."""
    num: int | None = getattr(request, name)
    if num is not None and num < 0:
        text = f"{name} must be a non-negative integer (0 means no limit)"
        raise TrouperValidationError(text, parameter=name, value=num)
    return num or None


async def _run_listed(
    service: Service,
    context: RequestContext,
    encodings: Iterable[PoolingGeneration],
    bar: Any,
    places: Sequence[str],
) -> list[Pooled]:
    """Run some of the requests for a score, and register them so that they can be aborted."""
    ticket = context.ticket
    noted: list[Any] = [] if ticket is None else [*ticket.generations]

    def note() -> Iterator[PoolingGeneration]:
        for encoding in encodings:
            if context.is_aborted:
                raise aborted()
            service.note(encoding, context)
            noted.append(encoding)
            yield encoding

    if ticket is not None:
        ticket.generations = noted
    try:
        return await collect(note(), bar, places)
    finally:
        for encoding in noted:
            service.forget(encoding)


def _whole(outputs: list[Pooled]) -> list[Pooled]:
    """Return the outputs, or raise the error of one that ended early."""
    for output in outputs:
        if output.error is not None:
            raise output.error.to_exception(output.request_id)
    return outputs


# After the engine


async def send_reply(
    service: Service, context: RequestContext, build: Callable[[], Reply], *, is_quick: bool = False
) -> None:
    if is_quick:
        reply = build()
    else:
        reply = await anyio.to_thread.run_sync(build, limiter=service.threads)
    await context.send_body(reply.body, reply.kind, 200, reply.headers)


def _is_quick(outputs: list[Pooled], how: Encoding) -> bool:
    num_numbers = sum(output.outputs.array.size for output in outputs)
    is_copied = how.format != "float" and how.dtype == "float32"
    return num_numbers <= (QUICK_BASE64 if is_copied else QUICK)


def _how(request: EncodedRequest) -> Encoding:
    return Encoding(
        request.encoding_format or "float",
        request.embed_dtype or "float32",
        request.endianness or "native",
    )
