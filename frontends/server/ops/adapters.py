"""Control routes for adapters: load and unload."""

from trouper.errors import (
    LoRAAdapterNotFoundError,
    OutsideRootError,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
)
from trouper.frontends.server.errors import NO_RETRY, HTTPError, clean, describe
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
        raise invalid("lora_name", "has already been loaded; set load_inplace to replace it", name)
    if name in service.model_names:
        raise invalid("lora_name", "is a model's", name)
    number = service.next_adapter_number() if known is None else known.lora_int_id
    adapter = LoRARequest(name, number, request.lora_path, load_inplace=request.load_inplace)
    try:
        await service.core.adapters.load_named(adapter, root)
    except OutsideRootError:
        raise
    except (TrouperValidationError, UnsupportedFeatureError) as error:
        raise _broken(error) from error
    await _tell(context, name, "added")


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
    await _tell(context, request.lora_name, "removed")


async def _tell(context: RequestContext, name: str, what: str) -> None:
    """Answer with vLLM's sentence, which clients match, and the name for those that read JSON."""
    message = f"Success: LoRA adapter '{name}' {what} successfully."
    await context.send_json({"status": "success", "message": message, "id": name})


def _broken(error: TrouperValidationError | UnsupportedFeatureError) -> HTTPError:
    """Return the error for files that are no adapter: a 500 as in vLLM, for the request itself is right."""
    problem = describe(error)
    return HTTPError(500, "broken_adapter", problem.message, param=problem.param, headers=NO_RETRY)
