"""The routes of Ollama's API, under /api.

They are translations: the same drivers answer as under /v1, and the same rules hold.  Routes that change which models
there are answer 501, since this server has the model that it was started with.
"""

from typing import Any

import anyio
import anyio.to_thread

from trouper import __version__
from trouper.actors.engine.admission import has_images
from trouper.config.model import ModelFiles
from trouper.errors import ContextLengthError, TrouperClientError, invalid
from trouper.frontends.server.apis.ollama import replies
from trouper.frontends.server.apis.ollama.replies import OllamaAdapter, OllamaTurn, reply_head
from trouper.frontends.server.apis.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaNamed,
    OllamaOptions,
    read_keep_alive,
    read_options,
)
from trouper.frontends.server.apis.openai.requests import ChatRequest
from trouper.frontends.server.apis.openai.tokens import conversation_ids
from trouper.frontends.server.apis.pooling.formats import EmbeddingRequest
from trouper.frontends.server.apis.pooling.routes import embed
from trouper.frontends.server.generation.driver import client_names, drive
from trouper.frontends.server.generation.transcript import chat_prompt
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.models.residency import residency_of
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import (
    MAX_MESSAGE,
    ErrorBody,
    ErrorForm,
    HTTPError,
    clean,
)

# Tokens that a shortened conversation leaves for the answer, as a share of the model's length.
ANSWER = 8


def _render_error(problem: ErrorBody, request_id: str) -> object:
    """Return an error as Ollama's clients read it: they print the text of `error`, and an object as [object Object]."""
    text = problem.message
    if problem.param is not None and problem.param not in text:
        text = f"{problem.param}: {text}"
    return {"error": clean(text, MAX_MESSAGE)}


OLLAMA_ERRORS = ErrorForm(_render_error, event=None, stream_end=b"", schema="TextError")


async def chat(service: Service, context: RequestContext, request: OllamaChatRequest) -> None:
    """Continue a conversation, as JSON lines or as one object.

    The request is converted and then served like a chat of the OpenAI API.
    """
    await _answer(service, context, request, is_empty=not request.messages)


async def generate(
    service: Service, context: RequestContext, request: OllamaGenerateRequest
) -> None:
    """Answer a prompt, continue it (`raw`), or fill the gap before a suffix."""
    await _answer(
        service, context, request, is_empty=not (request.prompt or request.suffix or request.images)
    )


async def _answer(
    service: Service,
    context: RequestContext,
    request: OllamaChatRequest | OllamaGenerateRequest,
    *,
    is_empty: bool,
) -> None:
    keep_alive_s = _keep_alive(service, request.keep_alive)
    options = _options(service, context, request.options)
    limit = service.config.max_model_len
    if options.num_ctx is not None and options.num_ctx > limit:
        context.own_headers += ((b"x-trouper-context", b"%d" % limit),)
    context.is_lines = request.stream is not False
    # Such a request only loads or unloads the model.
    if is_empty:
        name = service.check_model(request.model)
        text: dict[str, Any] = {"response": ""}
        if isinstance(request, OllamaChatRequest):
            text = {"message": {"role": "assistant", "content": ""}}
        reason = "unload" if keep_alive_s == 0 else "load"
        await context.send_json({**reply_head(name), **text, "done": True, "done_reason": reason})
        return
    turn = OllamaTurn(request, options, limit)
    if isinstance(turn.asked, ChatRequest) and request.truncate is not False:
        with client_names(turn.client_name):
            await _shorten(service, context, turn.asked)
    await drive(service, context, turn, OllamaAdapter)


def _keep_alive(service: Service, given: str | float | None) -> float | None:
    """Apply the time for which the model stays loaded after this request.  One model alone stays loaded."""
    seconds = read_keep_alive(given)
    residency = residency_of(service)
    if residency is not None:
        residency.keep(residency.table.of_service(service), seconds)
    return seconds


def _options(
    service: Service, context: RequestContext, given: dict[str, Any] | None
) -> OllamaOptions:
    """Read the options of a request; its answer names those that are not known."""
    options, unknown = read_options(given)
    if unknown:
        names = [f"options.{name}" for name in unknown]
        context.own_headers += service.unknown.note(context.path, names)
    return options


async def _shorten(service: Service, context: RequestContext, asked: ChatRequest) -> None:
    """Leave out the oldest turns, whole, until the conversation and an answer fit the model's length.

    Messages of the system stay, and so does the last turn, however long it is.
    """
    limit = service.config.max_model_len
    room = max(1, limit - min(asked.max_tokens or limit, limit // ANSWER))
    # No token is shorter than a byte, and few templates add as much to a message.
    most = sum(len(str(each)) + 64 for each in (*asked.messages, *(asked.tools or ())))
    is_short = most <= room and not has_images({"messages": asked.messages})
    if is_short or await _fits(service, context, asked, room):
        return
    kept = [each for each in asked.messages if each["role"] == "system"]
    turns = [each for each in asked.messages if each["role"] != "system"]
    starts = [i for i, each in enumerate(turns) if each["role"] == "user"][1:]
    # The first turn to keep is among these.
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        asked.messages = [*kept, *turns[starts[middle] :]]
        if await _fits(service, context, asked, room):
            high = middle
        else:
            low = middle + 1
    if starts:
        asked.messages = [*kept, *turns[starts[low] :]]


async def _fits(service: Service, context: RequestContext, asked: ChatRequest, room: int) -> bool:
    """Check the length of a conversation.  One that cannot be rendered stays whole, so that the request is refused for it."""
    try:
        ids = await conversation_ids(service, context, chat_prompt(asked, service.settings))
    except ContextLengthError:
        return False
    except TrouperClientError:
        return True
    return len(ids) <= room


async def create_embedding(
    service: Service, context: RequestContext, request: OllamaEmbedRequest
) -> None:
    """Embed texts: `/api/embed` answers with a list, the older `/api/embeddings` with one vector."""
    _keep_alive(service, request.keep_alive)
    _options(service, context, request.options)
    is_old = context.path == "/api/embeddings"
    given, field = (request.prompt, "prompt") if is_old else (request.input, "input")
    if given is None or (is_old and request.input is not None):
        raise invalid(field, "must be a text" if is_old else "must be a text or a list of texts")
    asked = EmbeddingRequest(
        model=request.model,
        input=list(given) if isinstance(given, list) else given,
        dimensions=request.dimensions,
        truncate_prompt_tokens=None if request.truncate is False else -1,
        use_activation=True,  # vectors of length 1
    )
    name, outputs = await embed(service, context, asked, field)
    vectors = [output.outputs.array for output in outputs]
    if is_old:
        reply: dict[str, Any] = {"embedding": vectors[0].tolist()}
    else:
        reply = {
            "model": name,
            "embeddings": await anyio.to_thread.run_sync(
                lambda: [vector.tolist() for vector in vectors], limiter=service.threads
            ),
            "total_duration": round(1e9 * context.age_s),
            "load_duration": 0,
            "prompt_eval_count": sum(len(output.prompt_token_ids) for output in outputs),
        }
    await context.send_json(reply)


async def version(service: Service, context: RequestContext, _: None) -> None:
    await context.send_json({"version": replies.OLLAMA_VERSION, "trouper": __version__})


async def list_tags(service: Service, context: RequestContext, _: None) -> None:
    """List the models, adapters among them.

    Clients use the list to offer a choice of models.
    """
    shown: list[dict[str, Any]] = []
    for each in _usable(service):
        files = await _files(each)
        names = [*each.model_names, *(adapter.lora_name for adapter in each.adapters)]
        shown += [replies.tag(each, files, name) for name in names]
    await context.send_json({"models": shown})


async def list_running(service: Service, context: RequestContext, _: None) -> None:
    """List the models that are loaded.

    The only model of a server is always loaded.
    """
    residency = residency_of(service)
    shown: list[dict[str, Any]] = []
    for each in _usable(service):
        status = None
        if residency is not None:
            model = residency.table.of_service(each)
            if not model.is_loaded:
                continue
            status = residency.table.status(model, anyio.current_time())
        shown.append(replies.running(each, await _files(each), each.model_names[0], status))
    await context.send_json({"models": shown})


async def show(service: Service, context: RequestContext, request: OllamaNamed) -> None:
    """Describe one model."""
    name = service.check_model(request.model or request.name)
    await context.send_json(replies.show(service, await _files(service), name))


async def pull(service: Service, context: RequestContext, request: OllamaNamed) -> None:
    """Say that a model that is served is there already; no other can be added to a running server."""
    name = request.model or request.name
    if name is None:
        raise invalid("model", "must be the name of a model")
    service.check_model(name)
    context.is_lines = True
    await context.start_events()
    await context.send_event({"status": "success"})
    await context.end_events(b"")


async def refuse(service: Service, context: RequestContext, _: object) -> None:  # noqa: ASYNC124  # a handler is async
    text = f"{context.path} is not supported: the server has the model that it was started with; start `trouper serve` with another"
    raise HTTPError(501, "not_supported", text)


def _usable(service: Service) -> list[Service]:
    """Return the services of the server, without models that cannot be served."""
    residency = residency_of(service)
    if residency is None:
        return [service]
    return [model.service for model in residency.table if model.plan.config is not None]


async def _files(service: Service) -> ModelFiles:
    """Return what the files show, which is read once: clients ask again every few seconds."""
    if service.model_files is None:
        service.model_files = await anyio.to_thread.run_sync(
            ModelFiles.of, service.config.model, limiter=service.threads
        )
    return service.model_files
