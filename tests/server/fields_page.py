"""The table of `docs/fields.md`, made of what the code says: `python -m tests.server.fields_page` writes it."""

import re
from pathlib import Path

from trouper.frontends.server.apis.anthropic.conversation import MessagesRequest
from trouper.frontends.server.apis.openai.requests import ChatRequest, CompletionRequest
from trouper.frontends.server.apis.responses.conversation import ResponsesRequest
from trouper.frontends.server.shared import fields

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
APIS = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
SIGNS = {"honoured": "yes", "refused": "400", "harmless": "–", "unknown": ""}


def names():
    """Every field that an API has, refuses or passes over."""
    own = {name for api in APIS for name in api.__struct_encode_fields__}
    return sorted(own.union(*(rows for api in APIS for rows in api.OTHERS)))


def row(name):
    verdicts = [fields.verdict(api, name) for api in APIS]
    reasons = []
    for kind, column in (("refused", 0), ("harmless", 1)):
        found = [
            api.OTHERS[column][name] for api, v in zip(APIS, verdicts, strict=True) if v == kind
        ]
        reasons += dict.fromkeys(found)
    signs = " | ".join(SIGNS[verdict] for verdict in verdicts)
    return f"| `{name}` | {signs} | {'; '.join(reasons)} |"


def rendered(page):
    """Return the page with its table as the code has it."""
    head = "| field | chat | completions | responses | messages | instead of it, or why it is harmless |"
    table = "\n".join(["", head, "|---|---|---|---|---|---|", *map(row, names()), ""])
    mark = "<!-- table -->"
    return re.sub(rf"(?<={mark}\n).*?(?=\n{mark})", lambda _: table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
