"""Control routes: sleep, pause, abort, profile.  Admin only.  Source: spec section 16.1."""

from contextlib import contextmanager
from typing import TYPE_CHECKING

from trouper.errors import TrouperError, TrouperValidationError
from trouper.frontends.server.errors import Refusal
from trouper.frontends.server.http.exchange import Exchange
from trouper.frontends.server.openai.requests import AbortRequest
from trouper.frontends.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Generator


async def sleep(service: Service, exchange: Exchange, _: None) -> None:
    engine = service.engine
    query = exchange.query()
    level, mode = _one(query, "level", "1"), _one(query, "mode", "abort")
    if level not in ("0", "1", "2"):
        raise _bad_query("level", "must be 0, 1 or 2")
    with _transition():
        await engine.engine.sleep(int(level), mode)
    await exchange.send_json({"status": "sleeping", "level": int(level)})


async def wake_up(service: Service, exchange: Exchange, _: None) -> None:
    tags = exchange.query().get("tags")
    with _transition():
        is_awake = await service.engine.wake_up(tags)
    await exchange.send_json({"status": "awake" if is_awake else "sleeping", "tags": tags})


async def is_sleeping(service: Service, exchange: Exchange, _: None) -> None:
    await exchange.send_json({"is_sleeping": await service.engine.is_sleeping()})


async def pause(service: Service, exchange: Exchange, _: None) -> None:
    query = exchange.query()
    clears = _flag(query, "clear_cache", "true")
    with _transition():
        await service.engine.pause_generation(_one(query, "mode", "abort"), clear_cache=clears)
    await exchange.send_json({"status": "paused"})


async def resume(service: Service, exchange: Exchange, _: None) -> None:
    with _transition():
        await service.engine.resume_generation()
    await exchange.send_json({"status": "resumed"})


async def is_paused(service: Service, exchange: Exchange, _: None) -> None:
    await exchange.send_json({"is_paused": await service.engine.is_paused()})


async def abort_requests(service: Service, exchange: Exchange, request: AbortRequest) -> None:
    num_aborted = service.abort(request.request_ids or None)
    await exchange.send_json({"status": "aborted", "aborted": num_aborted})


async def reset_prefix_cache(service: Service, exchange: Exchange, _: None) -> None:
    resets_running = _flag(exchange.query(), "reset_running_requests", "false")
    with _transition():
        is_done = await service.engine.reset_prefix_cache(resets_running)
    await exchange.send_json({"success": is_done})


async def start_profile(service: Service, exchange: Exchange, _: None) -> None:
    """Trace the device, into the folder that --profiler-config names."""
    await service.engine.start_profile()
    await exchange.send_empty()


async def stop_profile(service: Service, exchange: Exchange, _: None) -> None:
    """Write the trace."""
    await service.engine.stop_profile()
    await exchange.send_empty()


@contextmanager
def _transition() -> "Generator[None]":
    """What the engine says of an illegal call, in the words of the query."""
    try:
        yield
    except TrouperValidationError as error:
        raise _bad_query(str(error.parameter), error.message) from None
    except RuntimeError as error:
        if isinstance(error, TrouperError | NotImplementedError):
            raise
        raise Refusal(409, "illegal_transition", str(error)) from None


def _one(query: dict[str, list[str]], name: str, default: str) -> str:
    return query.get(name, [default])[-1]


def _flag(query: dict[str, list[str]], name: str, default: str) -> bool:
    value = _one(query, name, default).lower()
    if value not in ("true", "1", "false", "0"):
        raise _bad_query(name, "must be true or false")
    return value in ("true", "1")


def _bad_query(name: str, rule: str) -> Refusal:
    return Refusal(400, "invalid_value", f"{name}: {rule}", param=f"query.{name}")
