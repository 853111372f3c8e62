"""Check every byte of the generation routes' replies against the recordings in `golden/`.

The engine is scripted, so nothing depends on timing.  A recording that is missing is written, and its
test fails once: read what was written before you commit it.
"""

import json
import re
from pathlib import Path

import msgspec
import pytest

from trouper.errors import ExecutionError, GenerationError, TrouperValidationError
from trouper.frontends.server.asgi.app import create_app
from trouper.frontends.server.shared.settings import ServerSettings
from trouper.params import RequestOutputKind, SamplingParams

from .client import Client
from .scripted import ScriptedEngine, completion, logprobs, output

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parent / "golden"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ANTHROPIC = "/v1/messages"
FILES = {COMPLETIONS: "completions", CHAT: "chat", RESPONSES: "responses", ANTHROPIC: "messages"}
END = "\n======\n"  # of a recording; no reply holds it
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ALWAYS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
HI = {"messages": [{"role": "user", "content": "hi"}]}
PREFILL = {
    "messages": [*HI["messages"], {"role": "assistant", "content": "Sure:"}],
    "add_generation_prompt": False, "continue_final_message": True, "echo": True,
}  # fmt: skip


def script(number, params):
    """Four pieces of each completion, one of them without text, then the end; or all at once."""
    with_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
    fields = {"number": number, "num_cached_tokens": 1}
    if params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [None, *logprobs(41 + number)]
    pieces = [("Hel", (1, 2)), ("", (3,)), ("lo\n", (4,)), (" \u2028é", (5, 6))]
    ends = [("stop", None), ("stop", "é"), ("length", None)]
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        text, ids = "".join(t for t, _ in pieces), [id for _, more in pieces for id in more]
        yield output(
            *(
                completion(text, *ids, index=i, with_logprobs=with_logprobs,
                           finish_reason=ends[i][0], stop_reason=ends[i][1])
                for i in range(params.n)
            ),
            is_last=True, **fields,
        )  # fmt: skip
        return
    for place, (text, ids) in enumerate(pieces):
        is_last = place == len(pieces) - 1
        yield output(
            *(
                completion(text, *ids, index=i, with_logprobs=with_logprobs,
                           finish_reason=ends[i][0] if is_last else None,
                           stop_reason=ends[i][1] if is_last else None)
                for i in range(params.n)
            ),
            is_last=is_last, **fields,
        )  # fmt: skip


def broken(error):
    """A piece, then this error; or the error at once."""

    def script(number, params):
        if params.output_kind is not RequestOutputKind.FINAL_ONLY:
            yield output(completion("Hel", 1, 2))
        yield error

    return script


def refused(parameter):
    def script(number, params):
        yield TrouperValidationError("is wrong", parameter=parameter)

    return script


def aborted(number, params):
    yield output(completion("Hel", 1, 2, finish_reason="abort"), is_last=True)


CASES = {
    "completion": (COMPLETIONS, {"prompt": "a"}),
    "completion-stream": (COMPLETIONS, {"prompt": "a", **STREAM}),
    "completion-stream-usage": (COMPLETIONS, {"prompt": "a", **USAGE}),
    "completion-stream-usage-always": (COMPLETIONS, {"prompt": "a", "n": 2, **ALWAYS}),
    "completion-ids": (COMPLETIONS, {"prompt": [40, 41], "return_token_ids": True}),
    "completion-ids-stream": (
        COMPLETIONS,
        {"prompt": [40, 41], "return_token_ids": True, **STREAM},
    ),
    "completion-many": (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "cache_salt": "s"}),
    "completion-many-stream": (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, **USAGE}),
    "completion-echo": (COMPLETIONS, {"prompt": "a", "echo": True, "n": 2}),
    "completion-echo-stream": (COMPLETIONS, {"prompt": "a", "echo": True, "n": 2, **STREAM}),
    "completion-echo-logprobs": (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}),
    "completion-echo-logprobs-stream": (
        COMPLETIONS,
        {"prompt": "a", "echo": True, "logprobs": 2, **STREAM},
    ),
    "completion-logprobs": (COMPLETIONS, {"prompt": "a", "logprobs": 0}),
    "completion-logprobs-as-ids-stream": (
        COMPLETIONS,
        {"prompt": "a", "logprobs": 2, "return_tokens_as_token_ids": True, **STREAM},
    ),
    "completion-logprobs-by-id": (
        COMPLETIONS,
        {"prompt": "a", "logprobs": 1, "logprob_token_ids": [7, 8]},
    ),
    "completion-prompt-only": (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}),
    "completion-prompt-only-logprobs-stream": (
        COMPLETIONS,
        {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1, **USAGE},
    ),
    "completion-prompt-logprobs": (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}),
    "completion-cached": (
        COMPLETIONS,
        {"prompt": "a", "request_id": "mine and yours", **STREAM},
        {"enable_prompt_tokens_details": True, "force_include_usage": True},
    ),
    "completion-bad-field": (COMPLETIONS, {"prompt": "a", "top_p": 3}),
    "completion-bad-prompt": (COMPLETIONS, {"prompt": ["a", ""]}),
    "chat": (CHAT, HI),
    "chat-stream": (CHAT, {**HI, **STREAM}),
    "chat-stream-usage-always": (CHAT, {**HI, "n": 2, **ALWAYS}),
    "chat-many": (CHAT, {**HI, "n": 3}),
    "chat-many-stream": (CHAT, {**HI, "n": 3, **USAGE}),
    "chat-logprobs": (CHAT, {**HI, "logprobs": True, "top_logprobs": 2}),
    "chat-logprobs-stream": (CHAT, {**HI, "logprobs": True, "top_logprobs": 1, **STREAM}),
    "chat-logprobs-by-id": (CHAT, {**HI, "logprobs": True, "logprob_token_ids": [7, 8]}),
    "chat-logprobs-as-ids": (
        CHAT,
        {**HI, "logprobs": True, "return_tokens_as_token_ids": True},
    ),
    "chat-ids": (CHAT, {**HI, "return_token_ids": True}),
    "chat-ids-stream": (CHAT, {**HI, "return_token_ids": True, "n": 2, **STREAM}),
    "chat-prompt-logprobs": (CHAT, {**HI, "prompt_logprobs": 1}),
    "chat-echo": (CHAT, PREFILL),
    "chat-echo-stream": (CHAT, {**PREFILL, "n": 2, **ALWAYS}),
    "chat-cached": (
        CHAT,
        HI,
        {"enable_prompt_tokens_details": True, "response_role": "helper"},
    ),
    "chat-bad-top-logprobs": (CHAT, {**HI, "logprobs": True, "top_logprobs": -2}),
    "chat-bad-max-tokens": (CHAT, {**HI, "max_completion_tokens": -1}),
    "chat-bad-messages": (CHAT, {"messages": []}),
    "responses": (RESPONSES, {"input": "hi", "metadata": {"a": "b"}}),
    "responses-stream": (RESPONSES, {"input": "hi", "instructions": "be brief", **STREAM}),
    "responses-limits": (RESPONSES, {"input": "hi", "max_output_tokens": 6, "top_p": 0.5}),
    "responses-bad-max-tokens": (RESPONSES, {"input": "hi", "max_output_tokens": -1}),
    "responses-bad-input": (RESPONSES, {"input": []}),
    "messages": (ANTHROPIC, {**HI, "max_tokens": 6, "system": "be brief"}),
    "messages-stream": (ANTHROPIC, {**HI, "max_tokens": 6, "metadata": {"user_id": "u"}, **STREAM}),
    "messages-sampling": (
        ANTHROPIC,
        {
            **HI,
            "max_tokens": 6,
            "stop_sequences": ["x"],
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 5,
        },
    ),
    "messages-bad-max-tokens": (ANTHROPIC, {**HI, "max_tokens": -1}),
    "messages-bad-tools": (ANTHROPIC, {**HI, "max_tokens": 6, "tools": [{"name": "f"}]}),
}

FAILURES = {
    "fails": broken(GenerationError("internals")),
    "poisoned": broken(ExecutionError("internals", ["r"])),
    "numerical": broken(GenerationError("the logits are not finite", "numerical_error")),
    "refused": refused("prompt"),
    "refused-messages": refused("messages[0].content"),
    "refused-max-tokens": refused("max_tokens"),
    "aborted": aborted,
}
ASKED = {
    COMPLETIONS: {"prompt": ["a"]},
    CHAT: HI,
    RESPONSES: {"input": "hi"},
    ANTHROPIC: {**HI, "max_tokens": 6},
}


@pytest.fixture
def record(engine):
    async def record(script, path, fields, settings=None):
        scripted = ScriptedEngine(engine, script)
        app = create_app(scripted, ServerSettings(**(settings or {})))
        headers = [] if "request_id" in fields else [("x-request-id", "golden")]
        answer = await Client(app).post(path, fields, headers)
        lines = [f"POST {path} {json.dumps(fields)}"]
        for prompt, params, options in scripted.asked:
            options = {
                name: value
                for name, value in msgspec.structs.asdict(options).items()
                if value not in (None, "", b"", ())
            }
            asked = [prompt, chosen(params), options]
            lines.append(f"engine {json.dumps(asked, default=repr, sort_keys=True)}")
        lines.append(f"{answer.status} {answer.headers['content-type']}")
        lines.append(f"x-request-id {answer.headers['x-request-id']}")
        return "\n".join(lines) + "\n\n" + ordered(answer.body.decode())

    return record


def chosen(params):
    """The parameters that are not the defaults of `SamplingParams`."""
    usual = msgspec.to_builtins(SamplingParams())
    return {
        name: value for name, value in msgspec.to_builtins(params).items() if value != usual[name]
    }


def ordered(body):
    """Without clocks and drawn ids; frames of several choices by choice, for their order is drawn."""
    body = re.sub(r'"(created|created_at)":\d+', r'"\1":0', body)
    body = re.sub(r"(msg|resp|call|fc|rs)_[0-9a-f]{32}", r"\1_0", body)
    if '"object":"text_completion"' not in body or "\n\n" not in body:
        return body

    def choice(frame):
        found = re.match(r'data: .*?"choices":\[\{"index":(\d+)', frame)
        return int(found[1]) if found else 99

    return "\n\n".join(sorted(body.split("\n\n"), key=choice))


def check(path, name, found):
    file = GOLDEN / f"{FILES[path]}.txt"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    _, heading, rest = text.partition(f"### {name}\n")
    if not heading:
        file.write_text(f"{text}### {name}\n{found}{END}", encoding="utf-8")
        pytest.fail(f"{name} was missing in {file.name} and is written now")
    assert found == rest.partition(END)[0]


@pytest.mark.parametrize("name", CASES)
async def test_a_reply_is_as_recorded(record, name):
    check(CASES[name][0], name, await record(script, *CASES[name]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_told_as_recorded(record, name, path, stream):
    found = await record(FAILURES[name], path, {**ASKED[path], "stream": stream})
    check(path, f"{name}{' in a stream' if stream else ''}", found)
