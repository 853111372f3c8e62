"""Serve `POST /v1/responses/compact` and `/v1/responses/input_tokens`: shorten or measure a conversation."""

from functools import partial
from typing import Any

import msgspec

from trouper.frontends.server.generation.driver import client_names, prepare
from trouper.frontends.server.generation.transcript import chat_prompt, seal
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.tokens import conversation_ids
from trouper.frontends.server.responses.adapter import ResponsesAdapter
from trouper.frontends.server.responses.conversation import Page, listed
from trouper.frontends.server.responses.memory import recall
from trouper.frontends.server.responses.turn import CompactRequest, ResponsesTurn
from trouper.frontends.server.service.service import Service
from trouper.frontends.server.shared.errors import HTTPError

JSONObject = dict[str, Any]
INSTRUCTION = (
    "Write a summary of the conversation above, from which another model can go on with it without seeing anything "
    "else of it. Keep the task and every wish of the user, what was decided and done, the names of files, commands "
    "and results that matter, and what is left to do. Write nothing but the summary."
)


async def count_input_tokens(
    service: Service, context: RequestContext, request: CompactRequest
) -> None:
    """Count the tokens of a conversation of items.

    The result is the exact length of the prompt after rendering, and includes tools and instructions.
    """
    service.check_model(request.model)
    turn = await _recalled(service, context, request)
    with client_names(partial(ResponsesAdapter.client_name, turn)):
        ids = await conversation_ids(
            service, context, chat_prompt(turn.as_chat(), service.settings)
        )
    await context.send_json({"object": "response.input_tokens", "input_tokens": len(ids)})


async def compact_response(
    service: Service, context: RequestContext, request: CompactRequest
) -> None:
    """Let the model summarise a conversation.  Returns the user's messages with the summary.

    Raises:
        HTTPError: the model wrote no summary.
    """
    turn = await _recalled(service, context, request)
    turn.transcript.append("input", "user", INSTRUCTION)
    with client_names(partial(ResponsesAdapter.client_name, turn)):
        driver = prepare(service, context, turn, ResponsesAdapter)
        await driver.complete()
    response = driver.adapter.response
    summary = "\n".join(_texts(response["output"])).strip()
    if not summary:
        raise HTTPError(500, "no_summary", "the model wrote no summary; try again")
    name = response["id"].removeprefix("resp_")
    said = [item for item in (*turn.history, *turn.items) if _is_of_user(item)]
    compaction = {
        "id": f"cmp_{name}_0",
        "type": "compaction",
        "encrypted_content": seal("compaction", summary),
    }
    await context.send_json(
        {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [*listed(said, name, Page(len(said), False))["data"], compaction],
            "usage": response["usage"],
        }
    )


async def _recalled(
    service: Service, context: RequestContext, request: CompactRequest
) -> ResponsesTurn:
    """Return the conversation for one use, without storing it.

    The tools stay in the prompt, so that it shares its prefix with the conversation, but none is called.
    """
    choice = "none" if request.tools else None
    given = [] if request.input is None else request.input
    body = msgspec.structs.replace(
        request, input=given, stream=None, background=None, store=False, text=None, tool_choice=choice
    )  # fmt: skip
    return await recall(service, context, body)


def _is_of_user(item: JSONObject) -> bool:
    return item.get("type", "message") == "message" and item.get("role") == "user"


def _texts(output: list[JSONObject]) -> list[str]:
    messages = [item for item in output if item["type"] == "message"]
    return [part["text"] for item in messages for part in item["content"]]
