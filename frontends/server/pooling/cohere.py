"""Serve `/v2/embed`, Cohere's route of embeddings: texts, images, or both in one input."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial

import msgspec

from trouper.errors import TrouperValidationError, invalid
from trouper.frontends.python.scoring import MixedContent
from trouper.frontends.server.generation.transcript import MAX_PARTS
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.pooling.encodings import COHERE_TYPES
from trouper.frontends.server.pooling.replies import build_cohere
from trouper.frontends.server.pooling.requests import CohereEmbedRequest, EmbeddingRequest
from trouper.frontends.server.pooling.routes import (
    MAX_INPUTS,
    encode_all,
    preprocess,
    send_reply,
    serving_context,
    spec_for,
)
from trouper.frontends.server.service.service import Service
from trouper.pooling import PoolingParams

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
