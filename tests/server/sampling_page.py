"""The table of `docs/sampling.md`, made from the declarations: `python -m tests.server.sampling_page` writes it."""

import dataclasses
import re
from pathlib import Path

from trouper.frontends.cli.options import SamplingOptions
from trouper.frontends.server.apis.anthropic.conversation import MessagesRequest
from trouper.frontends.server.apis.openai.requests import ChatRequest, CompletionRequest
from trouper.frontends.server.apis.responses.conversation import ResponsesRequest
from trouper.params import SamplingParams
from trouper.sampling_fields import FIELDS, NOT_IMPLEMENTED

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
# Names of a field in an API, where it has another there.
OTHER_NAMES = {
    "completions": {},
    "chat": {"max_tokens": "max_tokens, max_completion_tokens"},
    "responses": {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"},
    "messages": {"stop": "stop_sequences"},
}
REQUESTS = {
    "completions": CompletionRequest, "chat": ChatRequest,
    "responses": ResponsesRequest, "messages": MessagesRequest,
}  # fmt: skip


def page_rows():
    """Write the rows of the page's table: field, default, range, and its name for each API."""
    options = {field.name for field in dataclasses.fields(SamplingOptions)} | {"n"}
    ranges = {name: field.rule for name, field in FIELDS.items()}
    names, values = SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__
    defaults = dict(zip(names, values, strict=True))
    for name in (*FIELDS, *NOT_IMPLEMENTED):
        value = defaults[name]
        cells = [f"`{name}`", f"`{getattr(value, 'name', value)}`"]
        cells.append(ranges.get(name, "" if name not in NOT_IMPLEMENTED else "only the default"))
        cells.append(f"`--{name.replace('_', '-')}`" if name in options else "")
        for api, request in REQUESTS.items():
            shown = OTHER_NAMES[api].get(name, name)
            known = set(shown.split(", ")) <= set(request.__struct_fields__)
            cells.append(f"`{shown}`" if known else "")
        yield f"| {' | '.join(cells)} |"


def rendered(page):
    """Return the page with its table as the code has it."""
    head = re.escape("| field | default | range |")
    table = "\n".join(page_rows()) + "\n"
    return re.sub(rf"({head}[^\n]*\n[^\n]*\n)(?:\|[^\n]*\n)*", lambda found: found[1] + table, page)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
