"""Serve llama.cpp's read-only routes about the server: `GET /props` and `GET /slots`.

Editors and monitors written for llama.cpp ask them for the length of the context and for free slots.  A slot of llama.cpp
corresponds to one of the `max_num_seqs` sequences that run at once.  Slots have no state of their own here, so nothing can be
saved to or restored from one.
"""

from typing import Any

from trouper import __version__
from trouper.actors.rendering.prompts.prompts import template_text
from trouper.config.media import AUDIO, IMAGE
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError, unavailable

SLOT = "/slots/{id}"


async def props(service: Service, context: RequestContext, _: None) -> None:
    """Describe the model and the limits of the server in llama.cpp's form.

    The model's path is its served name, because a path would only describe this machine.
    """
    config, tokenizer = service.config, service.engine.tokenizer
    name = service.model_names[0]
    special = (
        (None, None) if tokenizer is None else (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    bos, eos = ("" if id is None else service.token_text(id) for id in special)
    await context.send_json(
        {
            "default_generation_settings": {
                "n_ctx": config.max_model_len,
                "params": dict(config.model.default_sampling),
            },
            "total_slots": _num_slots(service),
            "model_alias": name,
            "model_path": name,
            "chat_template": _template(service),
            "bos_token": bos,
            "eos_token": eos,
            "modalities": {
                "vision": config.media is not None and config.media.modality == IMAGE,
                "audio": config.media is not None and config.media.modality == AUDIO,
            },
            "is_sleeping": service.engine.lifecycle.is_sleeping,
            "build_info": f"trouper-{__version__}",
        }
    )


async def slots(service: Service, context: RequestContext, _: None) -> None:
    """List the slots: first those of running sequences, then idle ones.

    `?fail_on_no_slot=1` fails with 503 if none is idle.  Prompts and outputs are not shown.
    """
    num_slots, busy = _num_slots(service), _running(service)
    must_be_free = context.query().get("fail_on_no_slot", ["0"])[0] not in ("", "0")
    if must_be_free and len(busy) >= num_slots:
        raise unavailable("no_slot", f"all {num_slots} slots are in use")
    idle = [_slot(service, -1, None) for _ in range(num_slots - len(busy))]
    await context.send_json([{"id": i, **slot} for i, slot in enumerate([*busy, *idle])])


async def refuse_change(service: Service, context: RequestContext, _: None) -> None:  # noqa: ASYNC124  # a handler is async
    """Refuse to change a property of the server, or to save, restore or erase a slot."""
    text = (
        f"{context.path} cannot be changed; prefixes of prompts are kept and reused without slots"
    )
    raise HTTPError(501, "not_supported", text)


def _num_slots(service: Service) -> int:
    return service.config.scheduler.max_num_seqs * service.config.data_parallel_size


def _running(service: Service) -> list[dict[str, Any]]:
    """Describe each running sequence, with the number of its request's tokens so far."""
    engine = service.engine
    tokens = {slot.request_id: slot.stats.num_generation_tokens for slot in engine.requests.slots}
    found = engine.snapshot()
    requests = {int(each.id): tokens.get(each.request_id, 0) for each in found.requests}
    running = (id for policy in found.scheduler.policies for id in policy.running)
    return [_slot(service, id, requests.get(id)) for id in running]


def _slot(service: Service, id_task: int, num_tokens: int | None) -> dict[str, Any]:
    """Describe a slot.  `num_tokens` is None for an idle slot, and for a further choice of a request."""
    return {
        "id_task": id_task,
        "n_ctx": service.config.max_model_len,
        "speculative": service.config.speculation is not None,
        "is_processing": id_task >= 0,
        "next_token": [{"has_next_token": id_task >= 0, "n_decoded": num_tokens or 0}],
    }


def _template(service: Service) -> str:
    """Return the chat template of the server, else the model's own default one."""
    tokenizer = service.engine.tokenizer
    own = None if tokenizer is None else tokenizer.chat_templates.get("default")
    return template_text(service.config.chat_template) or own or ""
