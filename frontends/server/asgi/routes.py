"""List all routes of the server in one table.  Authentication and routing use the same entry, so they cannot disagree."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from trouper.frontends.server.apis.anthropic.conversation import CountTokensRequest, MessagesRequest
from trouper.frontends.server.apis.anthropic.messages import (
    ANTHROPIC_ERRORS,
    count_tokens,
    create_message,
)
from trouper.frontends.server.apis.ollama import routes as ollama
from trouper.frontends.server.apis.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaNamed,
)
from trouper.frontends.server.apis.ollama.routes import OLLAMA_ERRORS
from trouper.frontends.server.apis.openai import tokens
from trouper.frontends.server.apis.openai.chat import create_chat, create_chat_batch
from trouper.frontends.server.apis.openai.completions import create_completion
from trouper.frontends.server.apis.openai.llama_cpp import (
    InfillReply,
    InfillRequest,
    LlamaCompletionReply,
    LlamaCompletionRequest,
    create_infill,
    create_llama_completion,
)
from trouper.frontends.server.apis.openai.requests import (
    ApplyTemplateRequest,
    ChatBatchRequest,
    ChatReply,
    ChatRequest,
    CompletionReply,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from trouper.frontends.server.apis.openai.transcriptions import (
    Transcription,
    TranscriptionRequest,
    create_transcription,
    refuse_translation,
)
from trouper.frontends.server.apis.pooling import routes
from trouper.frontends.server.apis.pooling.formats import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from trouper.frontends.server.apis.responses.conversation import (
    MAX_ITEMS,
    CompactRequest,
    ResponsesRequest,
)
from trouper.frontends.server.apis.responses.routes import (
    RESPONSES,
    RESPONSES_ERRORS,
    cancel_response,
    compact_response,
    count_input_tokens,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from trouper.frontends.server.generation.stream_readers import (
    STREAMS,
    delete_stream,
    get_stream,
    list_streams,
)
from trouper.frontends.server.http.context import Access, Handler, Route
from trouper.frontends.server.ops import control, models, operations
from trouper.frontends.server.ops.control import (
    AbortRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from trouper.frontends.server.ops.models import LoadModelRequest, UnloadModelRequest
from trouper.frontends.server.ops.openapi import describe
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import OPENAI_ERRORS, ErrorForm

MODE = {"enum": ["abort", "wait", "keep"]}
TAGS = {"type": "array", "items": {"enum": ["weights", "kv_cache", "scheduling"]}}
BOOL = {"type": "boolean"}
EVENTS = {"stream": BOOL, "starting_after": {"type": "integer", "minimum": 0}}
PAGES: tuple[tuple[str, Handler, Literal["text", "file"]], ...] = (
    ("/", operations.welcome, "text"),
    ("/ui", operations.to_folder, "file"),
    (operations.FOLDER, operations.send_file, "file"),
    (operations.FILE, operations.send_file, "file"),
)
RATE = {"type": "integer", "minimum": 1, "maximum": 4}
PAGE = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
MODEL = f"{models.MODELS}{{id}}"
RESPONSE = f"{RESPONSES}{{id}}"
STREAM = f"{STREAMS}{{id}}"
AFTER = {"starting_after": {"type": "string"}}
GENERATING = (
    ("/v1/completions", create_completion, CompletionRequest, CompletionReply, "cmpl-"),
    ("/v1/chat/completions", create_chat, ChatRequest, ChatReply, "chatcmpl-"),
    ("/infill", create_infill, InfillRequest, InfillReply, ""),
    ("/completion", create_llama_completion, LlamaCompletionRequest, LlamaCompletionReply, ""),
)
OLLAMA_GENERATING = (
    ("chat", ollama.chat, OllamaChatRequest),
    ("generate", ollama.generate, OllamaGenerateRequest),
    ("embed", ollama.create_embedding, OllamaEmbedRequest),
    ("embeddings", ollama.create_embedding, OllamaEmbedRequest),
)
OLLAMA_READING: tuple[tuple[str, Access, Handler], ...] = (
    ("version", "public", ollama.version),
    ("tags", "user", ollama.list_tags),
    ("ps", "user", ollama.list_running),
)
OLLAMA_NAMED = (
    ("POST", "show", ollama.show),
    ("POST", "pull", ollama.pull),
    ("DELETE", "delete", ollama.refuse),
    ("POST", "create", ollama.refuse),
    ("POST", "copy", ollama.refuse),
    ("POST", "push", ollama.refuse),
)


class InvocationKeys(msgspec.Struct, kw_only=True):
    """The body of `POST /invocations`: only the fields that distinguish the bodies of several routes.

    SageMaker sends all requests to one path, so the body must decide; its values are not decoded twice.
    """

    messages: msgspec.Raw | UnsetType = UNSET
    query: msgspec.Raw | UnsetType = UNSET
    queries: msgspec.Raw | UnsetType = UNSET
    text_1: msgspec.Raw | UnsetType = UNSET
    data_1: msgspec.Raw | UnsetType = UNSET


def choose_invoked(service: Service, body: bytes | memoryview) -> Route:
    """Return the route for a body sent to /invocations, by its fields and the task of the model.

    A malformed body gets the default route of the model, whose decoder explains the error.
    """
    try:
        keys = msgspec.json.decode(body, type=InvocationKeys)
    except msgspec.DecodeError:
        # The decoding of the route itself explains the error.
        keys = InvocationKeys()
    spec = service.config.pooler
    if spec is None:
        path = "/v1/completions" if keys.messages is UNSET else "/v1/chat/completions"
    elif keys.query is not UNSET:
        path = "/rerank"
    elif not all(key is UNSET for key in (keys.text_1, keys.data_1, keys.queries)):
        path = "/score"
    else:
        path = {"embed": "/v1/embeddings", "classify": "/classify"}.get(spec.task, "/pooling")
    return TABLE[path]["POST"]


ROUTES = (
    *(
        Route(method, path, "public", handler, kind=kind)
        for path, handler, kind in PAGES
        for method in ("GET", "HEAD")
    ),
    Route("GET", operations.STATE, "user", operations.stream_state, kind="events", query={"hz": RATE}),
    Route("GET", "/health", "public", operations.ready, kind="empty"),
    Route("GET", "/health/live", "public", operations.live, kind="empty"),
    Route("GET", "/health/ready", "public", operations.ready, kind="empty"),
    Route("GET", "/health/step", "public", operations.step_age),
    Route("GET", "/ping", "public", operations.ready, kind="empty"),
    Route("POST", "/ping", "public", operations.ready, kind="empty"),
    Route("GET", "/version", "public", operations.version),
    Route("GET", "/metrics", "public", operations.metrics, kind="text"),
    Route("GET", "/openapi.json", "user", describe),
    Route("GET", "/load", "user", operations.load),
    Route("GET", "/v1/models", "user", models.list_models),
    Route("GET", MODEL, "user", models.show_model),
    Route("GET", "/models", "user", models.list_models),
    *(
        Route("GET", path, "user", models.watch_models, kind="events")
        for path in ("/models/events", "/models/sse")
    ),
    Route("POST", "/models/load", "admin", models.load_model, LoadModelRequest),
    Route("POST", "/models/unload", "admin", models.unload_model, UnloadModelRequest),
    Route("POST", "/models/reload", "admin", models.reload_models),
    *(
        Route("POST", path, "user", handler, body, generates=True, reply=reply, stream_prefix=prefix)
        for path, handler, body, reply, prefix in GENERATING
    ),
    Route(
        "POST", "/v1/responses", "user", create_response, ResponsesRequest, generates=True,
        errors=RESPONSES_ERRORS, stream_prefix="resp_",
    ),
    Route(
        "POST", f"{RESPONSES}compact", "user", compact_response, CompactRequest, generates=True,
        errors=RESPONSES_ERRORS,
    ),
    Route(
        "POST", f"{RESPONSES}input_tokens", "user", count_input_tokens, CompactRequest,
        tokenizes=True,
    ),
    Route(
        "GET", RESPONSE, "user", retrieve_response, query=EVENTS, errors=RESPONSES_ERRORS
    ),
    Route("DELETE", RESPONSE, "user", delete_response),
    Route("POST", f"{RESPONSE}/cancel", "user", cancel_response),
    Route("GET", f"{RESPONSE}/input_items", "user", list_input_items, query=PAGE),
    Route(
        "POST", "/v1/messages", "user", create_message, MessagesRequest, generates=True,
        errors=ANTHROPIC_ERRORS, stream_prefix="msg_",
    ),
    Route(
        "POST", "/v1/messages/count_tokens", "user", count_tokens, CountTokensRequest,
        tokenizes=True, errors=ANTHROPIC_ERRORS,
    ),
    Route(
        "POST", "/v1/chat/completions/batch", "user", create_chat_batch, ChatBatchRequest,
        generates=True, reply=ChatReply,
    ),
    Route(
        "POST", "/invocations", "user", create_chat, InvocationKeys, generates=True,
        choose=choose_invoked,
    ),
    Route("GET", "/v1/streams", "user", list_streams),
    Route("GET", STREAM, "user", get_stream, query=AFTER, kind="events"),
    Route("DELETE", STREAM, "user", delete_stream),
    Route("GET", "/tokenizer_info", "user", tokens.tokenizer_info),
    Route("POST", "/v1/embeddings", "user", routes.create_embedding, EmbeddingRequest, True, pools=True),
    Route("POST", "/pooling", "user", routes.create_pooling, PoolingRequest, True, pools=True),
    Route("POST", "/classify", "user", routes.create_classification, ClassifyRequest, True, pools=True),
    Route("POST", "/score", "user", routes.create_score, ScoreRequest, True, pools=True),
    Route("POST", "/v1/score", "user", routes.create_score, ScoreRequest, True, pools=True),
    Route("POST", "/rerank", "user", routes.create_rerank, RerankRequest, True, pools=True),
    Route("POST", "/v1/rerank", "user", routes.create_rerank, RerankRequest, True, pools=True),
    Route("POST", "/v2/rerank", "user", routes.create_rerank, RerankRequest, True, pools=True),
    Route("POST", "/v2/embed", "user", routes.create_cohere_embedding, CohereEmbedRequest, True, pools=True),
    Route(
        "POST", "/v1/audio/transcriptions", "user", create_transcription, TranscriptionRequest, True,
        reply=Transcription, takes_form=True,
    ),
    Route(
        "POST", "/v1/audio/translations", "user", refuse_translation, TranscriptionRequest, True,
        takes_form=True,
    ),
    Route("POST", "/tokenize", "user", tokens.tokenize, TokenizeRequest, tokenizes=True),
    Route("POST", "/detokenize", "user", tokens.detokenize, DetokenizeRequest, tokenizes=True),
    Route("POST", "/apply-template", "user", tokens.apply_template, ApplyTemplateRequest, tokenizes=True),
    Route("GET", "/props", "user", operations.props),
    Route("POST", "/props", "admin", operations.refuse_change),
    Route("GET", "/slots", "admin", operations.slots, query={"fail_on_no_slot": {"type": "integer"}}),
    Route("POST", operations.SLOT, "admin", operations.refuse_change),
    Route(
        "POST", "/sleep", "admin", control.sleep,
        query={"level": {"enum": [0, 1, 2]}, "mode": MODE},
    ),
    Route("POST", "/wake_up", "admin", control.wake_up, query={"tags": TAGS}),
    Route("GET", "/is_sleeping", "admin", control.is_sleeping),
    Route("POST", "/pause", "admin", control.pause, query={"mode": MODE, "clear_cache": BOOL}),
    Route("POST", "/resume", "admin", control.resume),
    Route("GET", "/is_paused", "admin", control.is_paused),
    Route("GET", "/server_info", "admin", operations.server_info),
    Route("POST", "/abort_requests", "admin", control.abort_requests, AbortRequest),
    Route(
        "POST", "/reset_prefix_cache", "admin", control.reset_prefix_cache,
        query={"reset_running_requests": BOOL, "reset_external": BOOL},
    ),
    *(
        Route(
            "POST", f"/api/{name}", "user", handler, body, generates=True, errors=OLLAMA_ERRORS,
            takes_any_type=True, pools="embed" in name,
        )
        for name, handler, body in OLLAMA_GENERATING
    ),
    *(
        Route(method, f"/api/{name}", access, handler, errors=OLLAMA_ERRORS)
        for name, access, handler in OLLAMA_READING
        for method in ("GET", "HEAD")
    ),
    *(
        Route(method, f"/api/{name}", "user", handler, OllamaNamed, errors=OLLAMA_ERRORS, takes_any_type=True)
        for method, name, handler in OLLAMA_NAMED
    ),
    Route("POST", "/v1/load_lora_adapter", "admin", control.load_adapter, LoadAdapterRequest),
    Route("POST", "/v1/unload_lora_adapter", "admin", control.unload_adapter, UnloadAdapterRequest),
    Route("POST", "/start_profile", "admin", control.start_profile, kind="empty"),
    Route("POST", "/stop_profile", "admin", control.stop_profile, kind="empty"),
)  # fmt: skip
TABLE: dict[str, dict[str, Route]] = {}
for _route in ROUTES:
    TABLE.setdefault(_route.path, {})[_route.method] = _route


# Paths of other APIs and of other programs, each with the path here that does the same.
ELSEWHERE = {
    "/generate": "/v1/completions",
    "/embedding": "/v1/embeddings",
    "/docs": "/openapi.json",
}
# A longer path is not compared with the existing ones.
MAX_COMPARED = 100


def nearest(path: str, served: Iterable[Route]) -> str | None:
    """Return the existing path that a client most likely meant, or None.

    Typical errors are a missing or doubled `/v1`, a final slash and typing errors.  Used in the text of a 404 only.
    """
    paths = dict.fromkeys(route.path for route in served if route.path != "/")
    plain = "/" + re.sub(r"/+", "/", path[:MAX_COMPARED]).strip("/").lower()
    if len(path) > MAX_COMPARED or "%" in path or ".." in path:
        return None
    bare = re.sub(r"^(/v1)+(?=/|$)", "", plain)
    for candidate in (plain, f"/v1{bare}", bare, ELSEWHERE.get(plain)):
        if candidate in paths:
            return candidate
    return next(iter(difflib.get_close_matches(plain, paths, n=1, cutoff=0.75)), None)


def find(path: str) -> Mapping[str, Route]:
    """Return the routes of a path by method.

    Paths with an id in them are found by their template.  Returns an empty mapping for an unknown path.
    """
    return TABLE.get(path) or TABLE.get(_template(path), {})


def durable_route(path: str) -> Route | None:
    """Return the route of this path whose answers may be durable."""
    route = TABLE.get(path, {}).get("POST")
    return None if route is None or not route.stream_prefix else route


def path_of(path: str) -> str | None:
    """Return the path of the table to which a path belongs, or None for an unknown one."""
    methods = find(path)
    return next(iter(methods.values())).path if methods else None


def _template(path: str) -> str:
    """Return the path of the table for a path with a variable part."""
    if path.startswith(models.MODELS) and path != models.MODELS:
        return MODEL
    if path.startswith(STREAMS) and path != STREAMS:
        return STREAM
    if path.startswith(operations.FOLDER):
        return operations.FILE
    if path.startswith("/slots/"):
        return operations.SLOT
    if path.startswith(RESPONSES) and path != RESPONSES:
        _, slash, action = path.removeprefix(RESPONSES).partition("/")
        return RESPONSE + slash + action
    return path


def errors_at(path: str) -> ErrorForm:
    """Return the error format of the API to which a path belongs.

    Even an error before routing, such as a missing key, thus has the form that the API's clients parse.
    """
    return next((route.errors for route in find(path).values()), OPENAI_ERRORS)
