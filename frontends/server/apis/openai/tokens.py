"""Serve `POST /tokenize`, `/detokenize` and `/apply-template`, in worker threads, because long texts take long.

The path `/tokenize` has two forms, vLLM's and llama.cpp's.  The field `content` is llama.cpp's, `prompt` and `messages` are
vLLM's.
"""

from typing import Any

import anyio
import anyio.to_thread

from trouper.actors.messages.requests import Render, RequestId, RequestOptions
from trouper.actors.output.slot import ReplySlot
from trouper.actors.rendering.prompts.prompts import Prompts, Rendered
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import ContextLengthError, invalid
from trouper.frontends.server.apis.openai.requests import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from trouper.frontends.server.generation.transcript import chat_prompt
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError
from trouper.params import SamplingParams

# Fields of llama.cpp's form of `/tokenize`, beside `content`.
LLAMA_FIELDS = ("add_special", "parse_special", "with_pieces")


async def tokenize(service: Service, context: RequestContext, request: TokenizeRequest) -> None:
    """Convert a text or a conversation to token ids.

    A body with `content` is answered in llama.cpp's form, which adds no special tokens by default.
    """
    service.check_model(request.model)
    if request.content is not None:
        await _tokenize_content(service, context, request)
        return
    tokenizer = _tokenizer(service)
    for name in LLAMA_FIELDS:
        if getattr(request, name) is not None:
            raise invalid(name, "needs content; prompt and messages have add_special_tokens")
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give either prompt, messages or content")
    if request.prompt is not None:
        adds = request.add_special_tokens is not False
        ids = await _encoded(service, request.prompt, "prompt", adds=adds)
    else:
        prompt = chat_prompt(request, service.settings)
        ids = await conversation_ids(service, context, prompt, request.add_special_tokens)
    strings: list[str] | None = None
    if request.return_token_strs:
        strings = await anyio.to_thread.run_sync(
            tokenizer.vocabulary_strings, ids, limiter=service.threads
        )
    await context.send_json(
        {
            "count": len(ids),
            "max_model_len": service.config.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
    )


async def _tokenize_content(
    service: Service, context: RequestContext, request: TokenizeRequest
) -> None:
    for name in request.__struct_fields__:
        is_shared = name in ("model", "content", *LLAMA_FIELDS)
        if not is_shared and getattr(request, name) is not None:
            raise invalid(name, "cannot be combined with content")
    if request.parse_special is False:
        rule = "must be true: special tokens in a text always become these tokens"
        raise invalid("parse_special", rule, value=False)
    content = request.content or ""
    ids = await _encoded(service, content, "content", adds=bool(request.add_special))
    tokens: list[Any] = ids
    if request.with_pieces:
        tokens = [{"id": id, "piece": _piece(service.token_bytes(id))} for id in ids]
    await context.send_json({"tokens": tokens})


async def _encoded(service: Service, text: str, field: str, *, adds: bool) -> list[int]:
    """Encode a text in a thread.  Raises ContextLengthError if it cannot fit the model's length."""
    tokenizer = _tokenizer(service)
    limit = service.config.max_model_len * tokenizer.longest_token_chars
    if len(text) > limit:
        rule = f"{field}: at most {limit} characters (max_model_len)"
        raise ContextLengthError(rule, parameter=field, value=len(text))
    return await anyio.to_thread.run_sync(tokenizer.encode, text, adds, limiter=service.threads)


def _piece(data: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if they are only a part of a character, like llama.cpp."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def apply_template(
    service: Service, context: RequestContext, request: ApplyTemplateRequest
) -> None:
    """Render a conversation with the chat template, without tokenizing or generating.

    Clients of llama.cpp use it to see the prompt, or to send it to `/completion` with changes.
    """
    service.check_model(request.model)
    rendered = await _rendered(service, context, chat_prompt(request, service.settings))
    text = None if rendered.track is None else rendered.track.prompt
    if text is None:
        ids = list(rendered.admit.prompt_token_ids)
        text = await anyio.to_thread.run_sync(
            _tokenizer(service).decode, ids, False, limiter=service.threads
        )
    await context.send_json({"prompt": text})


async def detokenize(service: Service, context: RequestContext, request: DetokenizeRequest) -> None:
    service.check_model(request.model)
    tokenizer, most = _tokenizer(service), service.config.max_model_len
    if len(request.tokens) > most:
        raise invalid("tokens", f"at most {most} tokens (max_model_len)", len(request.tokens))
    text = await anyio.to_thread.run_sync(
        _text_of,
        tokenizer,
        request.tokens,
        service.config.model.vocab_size,
        limiter=service.threads,
    )
    await context.send_json({"prompt": text, "content": text})


def _text_of(tokenizer: Tokenizer, ids: list[int], vocab_size: int) -> str:
    for i, id in enumerate(ids):
        if not 0 <= id < vocab_size:
            raise invalid(f"tokens[{i}]", f"must be in [0, {vocab_size})", id)
    return tokenizer.decode(ids, False)


async def tokenizer_info(service: Service, context: RequestContext, _: None) -> None:
    """Show the settings of the tokenizer and the chat template.

    Raises:

        HTTPError: 404, because the server was not started with --enable-tokenizer-info-endpoint.
    """
    if not service.settings.shows_tokenizer_info:
        raise HTTPError(404, "not_found", "needs --enable-tokenizer-info-endpoint")
    tokenizer = _tokenizer(service)
    info = await anyio.to_thread.run_sync(tokenizer.describe, limiter=service.threads)
    await context.send_json(info)


async def conversation_ids(
    service: Service,
    context: RequestContext,
    prompt: dict[str, Any],
    add_special_tokens: bool | None = None,
) -> list[int]:
    """Render a conversation to token ids, without generating anything.

    Raises:
        TrouperValidationError: the template refuses the conversation, or it exceeds the context.
    """
    rendered = await _rendered(service, context, prompt, add_special_tokens)
    return list(rendered.admit.prompt_token_ids)


async def _rendered(
    service: Service,
    context: RequestContext,
    prompt: dict[str, Any],
    add_special_tokens: bool | None = None,
) -> Rendered:
    """Render a conversation in a thread with a limit of its own, so that it cannot delay other work."""
    prompts = service.engine.prompts or Prompts.for_engine(service.config, _tokenizer(service))
    options = RequestOptions(
        add_special_tokens=add_special_tokens,
        key=context.tenant,
        cache_scope=context.cache_scope,
    )
    downloads = service.engine.downloads
    if downloads is not None:
        prompt = await downloads.fill(prompt)
    message = _message(prompt, options)
    return await anyio.to_thread.run_sync(prompts.render, message, limiter=service.chat_threads)


def _message(prompt: Any, options: RequestOptions) -> Render:
    """Return a message for the renderer only.  Nothing is generated."""
    params = SamplingParams(max_tokens=1)
    slot = ReplySlot("tokenize", params)  # rendering only passes it on
    slot.close()
    return Render(
        id=RequestId(0),
        prompt=prompt,
        params=params,
        slot=slot,
        options=options,
        arrival_time=0.0,
    )


def _tokenizer(service: Service) -> Tokenizer:
    tokenizer = service.engine.tokenizer
    if tokenizer is None:
        raise invalid("prompt", "this engine has no tokenizer (skip_tokenizer_init)")
    return tokenizer
