"""The routes of the Responses API."""

from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.openai.driver import drive
from trouper.frontends.server.responses.adapter import ResponsesAdapter, ResponsesTurn
from trouper.frontends.server.responses.requests import ResponsesRequest
from trouper.frontends.server.service import Service


async def create_response(
    service: Service, context: RequestContext, request: ResponsesRequest
) -> None:
    """Continue a conversation of items, whole or as typed events."""
    await drive(service, context, ResponsesTurn(request), ResponsesAdapter)
