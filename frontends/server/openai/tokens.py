"""Serve `POST /tokenize` and `/detokenize`, in worker threads, because long texts take long."""

from typing import Any

import anyio
import anyio.to_thread

from trouper.actors.messages.requests import Render, RequestId, RequestOptions
from trouper.actors.rendering.prompts.prompts import Prompts
from trouper.actors.rendering.tokenizers.tokenizer import Tokenizer
from trouper.actors.replies.slot import ReplySlot
from trouper.errors import ContextLengthError, invalid
from trouper.frontends.server.generation.transcript import chat_prompt
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.requests import DetokenizeRequest, TokenizeRequest
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError
from trouper.params import SamplingParams


async def tokenize(service: Service, context: RequestContext, request: TokenizeRequest) -> None:
    service.check_model(request.model)
    tokenizer = _tokenizer(service)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if request.prompt is not None:
        adds = request.add_special_tokens is not False
        limit = service.config.max_model_len * tokenizer.longest_token_chars
        if len(request.prompt) > limit:
            text = f"prompt: at most {limit} characters (max_model_len)"
            raise ContextLengthError(text, parameter="prompt", value=len(request.prompt))
        ids = await anyio.to_thread.run_sync(
            tokenizer.encode, request.prompt, adds, limiter=service.threads
        )
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
    await context.send_json({"prompt": text})


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

    Rendering happens in a thread with a limit of its own, so it cannot delay other work.
    """
    prompts = service.engine.prompts or Prompts.for_engine(service.config, _tokenizer(service))
    options = RequestOptions(
        add_special_tokens=add_special_tokens,
        key=context.tenant,
        cache_scope=context.cache_scope,
    )
    message = _message(prompt, options)
    rendered = await anyio.to_thread.run_sync(prompts.render, message, limiter=service.chat_threads)
    return list(rendered.admit.prompt_token_ids)


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
