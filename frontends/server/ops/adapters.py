"""Control routes for adapters: load and unload."""

from trouper.errors import LoRAAdapterNotFoundError, invalid
from trouper.frontends.server.errors import HTTPError, clean
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.requests import LoadAdapterRequest, UnloadAdapterRequest
from trouper.frontends.server.service import MAX_ECHO, Service
from trouper.lora import LoRARequest


async def load_adapter(
    service: Service, context: RequestContext, request: LoadAdapterRequest
) -> None:
    """Load an adapter from a folder below --lora-root; from then on it is a model of that name."""
    root, name = service.settings.lora_root, request.lora_name
    if root is None:
        raise HTTPError(403, "not_allowed", "adapters are loaded by HTTP with --lora-root only")
    known = service.adapter(name)
    if known is not None and not request.load_inplace:
        rule = f"the adapter {clean(name, MAX_ECHO)!r} is loaded already"
        raise HTTPError(409, "conflict", rule, param="lora_name")
    if name in service.model_names:
        raise invalid("lora_name", "is a model's", name)
    number = service.next_adapter_number() if known is None else known.lora_int_id
    adapter = LoRARequest(name, number, request.lora_path, load_inplace=request.load_inplace)
    await service.core.adapters.load_named(adapter, root)
    await context.send_json({"status": "loaded", "id": name})


async def unload_adapter(
    service: Service, context: RequestContext, request: UnloadAdapterRequest
) -> None:
    """Unload an adapter; requests that use it finish first."""
    if not request.lora_name:
        raise invalid("lora_name", "must name an adapter")
    known = service.adapter(request.lora_name)
    if known is None:
        name = clean(request.lora_name, MAX_ECHO)
        rule = f"the adapter {name!r} does not exist"
        raise LoRAAdapterNotFoundError(rule, parameter="lora_name")
    service.core.adapters.unload(known.lora_int_id)
    await context.send_json({"status": "unloaded", "id": request.lora_name})
