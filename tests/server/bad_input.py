"""What a server must refuse, and how: (name, method, path, headers, body, status, code, param)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from trouper.frontends.server.apis.openai.requests import ChatRequest
from trouper.frontends.server.shared.fields import CHAT, COMPLETION, verdict

C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
JSON = [("content-type", "application/json")]
VOCAB = 4096  # at least the demo's
USER = [{"role": "user", "content": "hi"}]


class Case(NamedTuple):
    name: str
    path: str
    body: bytes
    status: int
    code: str
    param: Any = ...  # … = not looked at
    method: str = "POST"
    headers: Any = JSON
    row: str = ""  # of the specification's table


def c(name, status=400, code="invalid_value", param=..., /, **fields):
    """A completion with these fields."""
    return Case(name, C, json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode(), status, code, param)  # fmt: skip


def h(name, status=400, code="invalid_value", param=..., /, **fields):
    """A chat with these fields."""
    return Case(name, H, json.dumps({"messages": USER, "max_tokens": 1, **fields}).encode(), status, code, param)  # fmt: skip


def r(name, status=400, code="invalid_value", param=..., /, **fields):
    """A response with these fields."""
    return Case(name, R, json.dumps({"input": "x", "max_output_tokens": 1, **fields}).encode(), status, code, param)  # fmt: skip


def g(kind, value, code="invalid_schema"):
    """A completion by a grammar of this kind."""
    return c(
        f"{kind} {value!r:.40}", 400, code, "structured_outputs", structured_outputs={kind: value}
    )


def two_each(levels):
    """An object of two, each of which is an object of two …"""
    found = {"type": "string"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found, "b": found}}
    return found


def chain(num):
    """An object that holds an object that holds …, by references."""
    links = {
        str(i): {"type": "object", "required": ["a"], "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}}
        for i in range(num)
    }  # fmt: skip
    return {"$ref": "#/$defs/0", "$defs": links | {str(num): {}}}


def lark_chain(num):
    """Rules of which each is part of the one before."""
    return "start: x0\n" + "".join(f'x{i}: "a" x{i + 1}\n' for i in range(num)) + f'x{num}: "a"'


LEAST_IN_LARK = 'start: %json {"const": -9223372036854775808}'


def raw(name, body, code="invalid_json", status=400, path=C, **more):
    return Case(name, path, body, status, code, **more)


def nested(depth):
    """A list in a list in a list …"""
    found = []
    for _ in range(depth):
        found = [found]
    return found


SUITE = {
    "B01": [
        raw("empty body", b""),
        raw("not json", b"prompt=x"),
        raw("truncated", b'{"prompt": "x"'),
        raw("trailing", b'{"prompt": "x"} {}'),
        raw("deep", b'{"zz": ' + b"[" * 100_000),
        raw("deep and closed", b'{"zz": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        raw("deep in a message", b'{"messages": [{"role": ' + b"[" * 100_000, path=H),
        raw("key twice", b'{"prompt": "x", "prompt": "y"}'),
        raw("key twice inside", b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}'),
        raw("too large a number", b'{"prompt": "x", "temperature": 1e400}'),
        raw("lone surrogate", b'{"prompt": "\\ud800"}'),
        raw("nan", b'{"prompt": "x", "temperature": NaN}'),
        raw("nan in an unknown field", b'{"prompt": "x", "zz": NaN}'),
        raw("infinity", b'{"prompt": "x", "zz": Infinity}'),
        raw("not utf-8", b'{"prompt": "\xff"}'),
        raw("not utf-8 in an unknown field", b'{"prompt": "x", "zz": "\xff"}'),
        *(
            raw(f"an encoded surrogate {where}", b'{"%b": "\xed\xa0\x80"}' % field, path=path)
            for where, field, path in (
                ("in the prompt", b"prompt", C), ("in an unknown field", b"zz", C),
                ("for any route", b"input", "/invocations"),
            )
        ),
        raw("long integer", b'{"prompt": "x", "zz": 1' + b"0" * 5000 + b"}"),
        *(
            raw(f"{depth} deep {where}", before + b"[" * depth + b"]" * depth + after)
            for depth in (129, 300, 901, 950)
            for where, before, after in (
                ("in a field", b'{"prompt": "x", "zz": ', b"}"), ("prompt", b'{"prompt": ', b"}"),
                ("in user data", b'{"prompt": "x", "metadata": {"a": ', b"}}"),
            )
        ),
        raw("a list", b"[]", "invalid_schema"),
        raw("values without end", b'{"prompt": [' + b"1," * (2**20 + 1) + b"1]}", "schema_too_complex"),
        raw("no messages", b"{}", "invalid_schema", path=H, param="messages"),
    ],
    "B02": [
        raw("gzip", b"\x1f\x8b", "encoded_body", 415, headers=[*JSON, ("content-encoding", "gzip")]),
        raw("form", b"prompt=x", "invalid_content_type", headers=[("content-type", "text/plain")]),
        raw("no content type", b'{"prompt": "x"}', "invalid_content_type", headers=[]),
    ],
    "B04": [
        raw("257 headers", b"{}", "headers_too_large", 431, headers=[*JSON] + [("x", "y")] * 257),
        raw("a header of 64 KiB", b"{}", "headers_too_large", 431, headers=[*JSON, ("x", "y" * 2**16)]),
        raw("a path of 10 KiB", b"", "path_too_long", 414, path="/" + "v" * 10_000),
    ],
    "B05": [
        *(
            raw(path, b"", "not_found", 404, path=path, method="GET", headers=[])
            for path in (
                "//v1/models", "/v1/../pause", "/v1/%2e%2e/pause", "/v1/models;x", "/v1/models/",
                "/V1/models", "/v1/models%00", "/health/", "/docs", "/openapi.yaml", "/v1",
            )
        ),
        raw("verb", b"", "method_not_allowed", 405, path="/v1/models", method="DELETE", headers=[]),
        raw("rare verb", b"", "method_not_allowed", 405, path=C, method="PROPFIND", headers=[]),
        raw("get", b"", "method_not_allowed", 405, path=C, method="GET", headers=[]),
    ],
    "B08": [
        *(
            raw(path, b"", "not_found", 404, path=path)
            for path in (
                "/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused",
                "/abort_requests", "/reset_prefix_cache", "/server_info", "/start_profile", "/stop_profile",
            )
        ),
    ],
    "B09": [
        c("unknown model", 404, "model_not_found", model="gpt-4"),
        c("a path as model", 404, "model_not_found", model="../../etc/passwd"),
        h("a long model", 404, "model_not_found", model="m" * 100_000),
    ],
    "B10": [
        h("no message", 400, "invalid_value", "messages", messages=[]),
        h("many messages", 400, "invalid_value", "messages", messages=USER * 4097),
        h("many parts", 400, "invalid_value", "messages[0].content",
          messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 257}]),
        h("role", 400, "invalid_value", "messages[0].role", messages=[{"role": 1, "content": "x"}]),
        h("no role", 400, "invalid_value", "messages[0].role", messages=[{"content": "x"}]),
        h("message", 400, "invalid_schema", "messages[0]", messages=["hi"]),
        h("long", 400, "context_length_exceeded", "messages",
          messages=[{"role": "user", "content": "x" * 200_000}]),
    ],
    "B11": [
        c("no prompt", 400, "invalid_value", "prompt", prompt=None),
        c("empty prompt", 400, "invalid_value", "prompt", prompt=""),
        c("empty list", 400, "invalid_value", "prompt", prompt=[]),
        c("empty in list", 400, "invalid_value", "prompt[0]", prompt=[""]),
        c("empty ids", 400, "invalid_value", "prompt[0]", prompt=[[]]),
        c("negative id", 400, "invalid_value", "prompt[0]", prompt=[[-1]]),
        c("id of the second", 400, "invalid_value", "prompt[1]", prompt=[[1], [10**6]]),
        c("large id", 400, "invalid_value", "prompt", prompt=[2**31]),
        c("true", 400, "invalid_value", "prompt[0]", prompt=[[True]]),
        c("float", 400, "invalid_value", "prompt[0]", prompt=[1.0]),
        c("mixed", 400, "invalid_value", "prompt[1]", prompt=["x", [1]]),
        c("null inside", 400, "invalid_value", "prompt[0]", prompt=[None]),
        c("1025 prompts", 400, "invalid_value", "prompt", prompt=["x"] * 1025),
        c("long", 400, "context_length_exceeded", "prompt", prompt="x" * 200_000),
        c("long ids", 400, "context_length_exceeded", "prompt", prompt=[1] * 512),
        c("prompt is an object", 400, "invalid_schema", "prompt", prompt={}),
    ],
    "B12": [
        *(c(f"n {n!r}", 400, "invalid_value", "n", n=n) for n in (0, -1, 10**9)),
        *(c(f"n {n!r}", 400, "invalid_schema", "n", n=n) for n in (1.5, "3.5", "x", "null", [])),
        c("n times prompts", 400, "invalid_value", "n", n=100, prompt=["x"] * 1000),
        c("greedy n", 400, "invalid_value", "n", n=2, temperature=0),
    ],
    "beams": [
        *(
            make(name, 400, "invalid_value", param, **{"use_beam_search": True, "n": 2, **fields})
            for make in (c, h)
            for name, param, fields in (
                ("a stream of beams", "stream", {"stream": True}), ("wide beams", "n", {"n": 11}),
                ("no beam", "n", {"n": 0}), ("hot beams", "temperature", {"temperature": 3}),
                ("beams and stops", "stop", {"stop": ["x"]}), ("beams and top_p", "top_p", {"top_p": 0.5}),
                ("beams and penalties", "repetition_penalty", {"repetition_penalty": 1.2}),
                ("beams and biases", "logit_bias", {"logit_bias": {"1": 1}}),
                ("beams and prompt logprobs", "prompt_logprobs", {"prompt_logprobs": 1}),
                ("beams of an id outside", "allowed_token_ids", {"allowed_token_ids": [10**6]}),
            )
        ),
        *(
            make("beams and a format", 400, "not_supported", "response_format", use_beam_search=True,
                 response_format={"type": "json_object"})
            for make in (c, h)
        ),
        c("long beams", 400, "context_length_exceeded", "max_tokens", use_beam_search=True, max_tokens=513),
        h("long beams", 400, "context_length_exceeded", "max_completion_tokens", use_beam_search=True, max_completion_tokens=513),
        c("no beams' tokens", 400, "invalid_value", "max_tokens", use_beam_search=True, max_tokens=0, echo=True),
        c("beams of an echo with logprobs", 400, "invalid_value", "echo", use_beam_search=True, echo=True, logprobs=1),
        c("beams of embeddings", 400, "invalid_value", "prompt_embeds", use_beam_search=True, prompt_embeds="AAAA"),
        c("beams with many logprobs", 400, "invalid_value", "logprobs", use_beam_search=True, logprobs=21),
        c("a penalty without beams", 400, "invalid_value", "length_penalty", length_penalty=2),
        h("beams and a forced call", 400, "not_supported", "tool_choice", use_beam_search=True,
          tools=[{"function": {"name": "f"}}], tool_choice="required"),
    ],
    "B13": [
        *(
            c(f"{name} {value!r}", 400, code, name, **{name: value})
            for name in (
                "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                "repetition_penalty",
            )
            for value, code in (
                (-1e308, "invalid_value"), ("x", "invalid_schema"), ("nan", "invalid_schema"),
            )
        ),
        c("hot", 400, "invalid_value", "temperature", temperature=2.0000001),
        c("top_p 0", 400, "invalid_value", "top_p", top_p=0),
    ],
    "B14": [
        c("top_k -2", 400, "invalid_value", "top_k", top_k=-2),
        c("top_k 2**63", 400, "invalid_value", "top_k", top_k=2**63),
        c("seed 2**63", 400, "invalid_value", "seed", seed=2**63),
        c("seed -2**63-1", 400, "invalid_value", "seed", seed=-(2**63) - 1),
        *(c(f"max_tokens {n}", 400, "invalid_value", "max_tokens", max_tokens=n) for n in (0, -1)),
        *(
            c(f"max_tokens {n}", 400, "context_length_exceeded", "max_tokens", max_tokens=n)
            for n in (513, 2**31, 2**63)
        ),
        h("max_completion_tokens", 400, "context_length_exceeded", "max_completion_tokens",
          max_completion_tokens=513),
        c("min over max", 400, "invalid_value", "min_tokens", min_tokens=2),
    ],
    "B15": [
        *(c(f"logprobs {n}", 400, "invalid_value", "logprobs", logprobs=n) for n in (21, -2, 10**6, -1)),
        c("prompt_logprobs", 400, "invalid_value", "prompt_logprobs", prompt_logprobs=21),
        c("streamed prompt_logprobs", 400, "invalid_value", "prompt_logprobs", prompt_logprobs=1, stream=True),
        c("logprobs of no ids", 400, "invalid_value", "logprob_token_ids", logprobs=1, logprob_token_ids=[]),
        h("logprobs of no ids", 400, "invalid_value", "logprob_token_ids", logprobs=True, logprob_token_ids=[]),
        h("no completion tokens", 400, "invalid_value", "max_completion_tokens", max_completion_tokens=0),
        h("top without logprobs", 400, "invalid_value", "top_logprobs", top_logprobs=1),
        h("top_logprobs", 400, "invalid_value", "top_logprobs", logprobs=True, top_logprobs=21),
        h("logprobs a number", 400, "invalid_schema", "logprobs", logprobs=2),
    ],
    "B16": [
        c("129 stops", 400, "invalid_value", "stop", stop=["a"] * 129),
        c("empty stop", 400, "invalid_value", "stop", stop=""),
        c("long stop", 400, "invalid_value", "stop", stop="x" * 257),
        c("10**4 stops", 400, "invalid_value", "stop", stop=["x"] * 10_000),
        *(
            c(f"stop_token_ids {id}", 400, "invalid_value", "stop_token_ids", stop_token_ids=[id], min_tokens=1)
            for id in (-1, 10**6, 2**40)
        ),
        c("65 stop_token_ids", 400, "invalid_value", "stop_token_ids", stop_token_ids=[1] * 65),
    ],
    "B17": [
        c("allowed none", 400, "invalid_value", "allowed_token_ids", allowed_token_ids=[]),
        c("allowed outside", 400, "invalid_value", "allowed_token_ids", allowed_token_ids=[10**6]),
        c("bias key", 400, "invalid_value", "logit_bias", logit_bias={"abc": 1}),
        *(
            c(f"bias key {key!r}", 400, "invalid_value", "logit_bias", logit_bias={key: 1})
            for key in ("1_0", "+5", "05", "-0", " 5", "5 ", "\u0665", "1e1", "0x1", "9" * 5000, "")
        ),
        c("bias outside", 400, "invalid_value", "logit_bias", logit_bias={"1000000": 1}),
        c("bias text", 400, "invalid_schema", "logit_bias.1", logit_bias={"0": 1, "1": "x"}),
        raw("bias text in no JSON", b'{"logit_bias": {"1": "x"}, "a": nan}', "invalid_json"),
        c("many biases", 400, "invalid_value", "logit_bias", logit_bias={str(i): 1 for i in range(1025)}),
        c("bad word", 400, "invalid_value", "bad_words", bad_words=[""]),
        c("many bad words", 400, "invalid_value", "bad_words", bad_words=["x"] * 129),
    ],
    "B25": [
        h("own template", 400, "invalid_value", "chat_template", chat_template="{{ 1 }}"),
        Case("own template of a count", "/tokenize", b'{"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}', 400, "invalid_value", "chat_template"),
    ],
    "B26": [
        raw("deep variables", b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": '
            + b"[" * 10_000 + b"]" * 10_000 + b"}}", path=H),
        raw("deep objects", b'{"messages": [], "chat_template_kwargs": ' + b'{"a": ' * 10_000 + b"1" + b"}" * 10_001, path=H),
    ],
    "B35": [
        *(
            h(url, status, code, "messages[0].content[0].image_url",
              messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
            for url, status, code in (
                ("http://169.254.169.254/", 403, "media_url_blocked"), ("http://127.0.0.1:1/", 403, "media_url_blocked"),
                ("file:///etc/passwd", 403, "media_url_blocked"), ("data:,x", 400, "invalid_image"),
                ("data:image/png;base64,????", 400, "invalid_image"), ("", 400, "invalid_value"),
            )
        ),
        h("audio from a metadata service", 403, "media_url_blocked", "messages[0].content[0].audio_url",
          messages=[{"role": "user", "content": [{"audio_url": {"url": "https://169.254.169.254/"}}]}]),
        h("audio for a model of texts", 400, "invalid_value", "messages[0].content[0]",
          messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}]}]),
        h("an image for a model of texts", 400, "invalid_value", "messages[0].content[0]",
          messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "data:;base64,AAAA"}]}]),
    ],
    "B31": [
        *(
            c(f"salt {salt[:5]!r}", 400, "invalid_value", "cache_salt", cache_salt=salt)
            for salt in ("", "x" * 129, "a@b", "a/b", "a\\b", "a\0b")
        ),
    ],
    "B44": [
        *(
            c(f"xargs {depth} deep", 400, "invalid_schema", "vllm_xargs.a[0]", vllm_xargs={"a": nested(depth)})
            for depth in (2, 100)
        ),
        raw("xargs 901 deep", json.dumps({"prompt": "x", "vllm_xargs": {"a": nested(901)}}).encode(), "invalid_schema"),
        c("long unknown field", 400, "invalid_schema", "zz", zz="u" * 20_000),
    ],
    "B45": [
        c("priority", 400, "invalid_schema", "priority", priority=2**63),
        *(
            raw(f"deadline {ms}", b'{"prompt": "x"}', "invalid_value",
                headers=[*JSON, ("x-request-timeout-ms", ms)], param="X-Request-Timeout-Ms")
            for ms in ("abc", "-1", "0", "1000000000000", "1.5", "")
        ),
    ],
    "pairs": [
        c("stream_options", 400, "invalid_value", "stream_options", stream_options={"include_usage": True}),
        c("truncate", 400, "invalid_value", "truncate_prompt_tokens", truncate_prompt_tokens=513),
        c("truncate side", 400, "invalid_value", "truncation_side", truncation_side="middle"),
    ],
    "B28": [
        c("embeds", 400, "invalid_value", "prompt_embeds", prompt_embeds="AAAA"),
        *(
            h(f"{name} as a part", 400, "invalid_value", "messages", messages=[{"role": "user", "content": [part]}])
            for name, part in (
                ("embeds", {"type": "prompt_embeds", "data": "AAAA"}), ("nothing", {"type": "prompt_embeds"}),
                ("a mark", {"type": "prompt_embeds", "index": 0}),
            )
        ),
    ],
    "unbuilt": [
        *(c(name, 400, "not_supported", name, **{name: "x"}) for name in COMPLETION.refused),
        *(
            h(name, 400, "not_supported", name, **{name: "x"})
            for name in CHAT.refused
            if verdict(ChatRequest, name) == "refused"
        ),
        c("best_of", 400, "not_supported", "best_of", best_of=2),
        c("no thinking", 400, "invalid_value", "thinking_token_budget", thinking_token_budget=0),
        h("no thinking", 400, "invalid_value", "thinking_token_budget", thinking_token_budget=3),
    ],
    "gaps": [
        c("a suffix for a model without marks", 400, "invalid_value", "suffix", suffix="x"),
        c("a suffix of ids", 400, "invalid_value", "prompt", prompt=[1], suffix="x"),
        c("a suffix of an echo", 400, "invalid_value", "echo", echo=True, suffix="x"),
        c("a suffix of beams", 400, "invalid_value", "suffix", use_beam_search=True, suffix="x"),
        c("a suffix that is a number", 400, "invalid_schema", "suffix", suffix=1),
        *(
            Case(f"infill: {name}", "/infill", json.dumps({"input_prefix": "x", "n_predict": 1, **fields}).encode(), 400, code, param)
            for name, code, param, fields in (
                ("a model without marks", "invalid_value", "input_suffix", {}),
                ("no text", "invalid_value", "input_prefix", {"input_prefix": ""}),
                ("many tokens", "context_length_exceeded", "n_predict", {"n_predict": 513}),
                ("fewer than none", "invalid_value", "n_predict", {"n_predict": -2}),
                ("a huge number", "context_length_exceeded", "n_predict", {"n_predict": 2**63}),
                ("many files", "invalid_value", "input_extra", {"input_extra": [{"text": "x"}] * 257}),
                ("a file without text", "invalid_schema", "input_extra[0].text", {"input_extra": [{"filename": "x"}]}),
                ("hot", "invalid_value", "temperature", {"temperature": 3}),
                ("long stop", "invalid_value", "stop", {"stop": "x" * 257}),
                ("grammar", "not_supported", "grammar", {"grammar": "root ::= x"}),
                ("probabilities", "not_supported", "n_probs", {"n_probs": 5}),
                ("a salt", "invalid_value", "cache_salt", {"cache_salt": "a@b"}),
            )
        ),
    ],
    "grammars": [
        c("a format", 400, "invalid_value", "response_format", response_format={"type": "xml"}),
        h("no schema", 400, "invalid_value", "response_format", response_format={"type": "json_schema"}),
        *(
            g(kind, value, "invalid_value")
            for kind, value in (("json", 1), ("choice", []), ("choice", [1]), ("xml", "a"), ("json_object", False))
        ),
        c("two kinds", 400, "invalid_value", "structured_outputs", structured_outputs={"regex": "a", "choice": ["a"]}),
        c("two ways", 400, "invalid_value", "guided_regex", structured_outputs={"regex": "a"}, guided_regex="a"),
    ],
    "B19": [
        g("json", {"const": "a" * 90_000}, "schema_too_complex"),
        *(
            g("json", schema)
            for schema in (
                {"type": "objec"}, "{", "[]", {"not": {}}, {"$ref": "http://a/b"}, {"$ref": "file:///etc/passwd"}, {"$ref": "#"},
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
                {"type": "string", "pattern": "("}, {"type": "array", "minItems": 5, "maxItems": 2},
                {"type": "string", "minLength": 5, "maxLength": 2}, {"type": "integer", "minimum": 5, "maximum": 2},
            )
        ),
        *(
            g("json", schema, "schema_too_complex")
            for schema in (
                "[" * 9999, '{"items":' * 100 + "{}" + "}" * 100, {"enum": [f"v{i}" * 9 for i in range(9999)]},
                {"properties": {f"p{i}": {"type": "string"} for i in range(30_000)}},
                {"properties": {f"p{i}": {} for i in range(5000)}}, {"type": "integer", "multipleOf": 1_000_003},
                {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, two_each(12),
                {"const": -(2**63)}, chain(1000),
            )
        ),
        h("the format's schema", 400, "invalid_schema", "response_format",
          response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}),
        h("a tool's schema", 400, "invalid_grammar", "tools", tool_choice="required",
          tools=[{"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}}]),
    ],
    "B20": [
        g("regex", "ab" * 60_000, "schema_too_complex"),
        *(g("regex", regex, "invalid_grammar") for regex in ("(", "(?<=a)b", r"(a)\1", "[z-a]", "a{4294967296}")),
        *(g("regex", regex, "schema_too_complex") for regex in ("a" * 2**19, "a?" * 40_000)),
    ],
    "B22": [
        c("too many steps", 400, "grammar_error", None, structured_outputs={"grammar": 'start: ("a"{1000}){1000}'}, max_tokens=9),
        *(
            g("grammar", grammar, "invalid_grammar")
            for grammar in ("", "start: foo", "root ::= (", "root ::= root", 'root ::= root "a"', "start: start")
        ),
        *(g("grammar", grammar, "schema_too_complex") for grammar in (lark_chain(3000), LEAST_IN_LARK)),
        *(g("structural_tag", tag, "invalid_grammar") for tag in ("", "{}", '{"structures": [], "triggers": []}')),
    ],
    "B23": [
        h("empty tools", 400, "invalid_value", "tool_choice", tools=[], tool_choice="required"),
        h("a call of a custom tool", 400, "not_supported", "messages[1].tool_calls[0].type", tools=None,
          messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"type": "custom", "id": "c", "custom": {"name": "f", "input": "x"}}]}]),
        h("a part of thinking without text", 400, "invalid_value", "messages[1].content[0].thinking", tools=None,
          messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}]),
        h("a bad part behind thinking", 400, "not_supported", "messages[1].content[1]", tools=None,
          messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, {"type": "x"}]}]),
        h("tool choice", 400, "invalid_value", "tool_choice", tool_choice="required"),
        h("many tools", 400, "invalid_value", "tools", tools=[{"function": {"name": "f"}}] * 1000),
        *(
            h(f"a tool named {name!r:.12}", 400, "invalid_value", "tools[0].function.name", tools=[{"function": {"name": name}}])
            for name in ("x" * 10_000, "a\nb", "", 3)
        ),
        h("parameters", 400, "invalid_value", "tools[0].function.parameters", tools=[{"function": {"name": "f", "parameters": []}}]),
        *(
            h(f"the choice {choice!r:.20}", 400, "invalid_value", "tool_choice", tools=[{"function": {"name": "f"}}], tool_choice=choice)
            for choice in ("maybe", {}, {"type": "function"}, {"type": "function", "function": {"name": "g"}}, {"type": "allowed_tools"})
        ),
        h("a tool without a function", 400, "invalid_value", "tools[0].function", tools=[{"type": "function"}]),
        *(
            h(f"{path} of tools", 400, code, "tools", tool_choice="required", tools=[{"function": {"name": "f", "parameters": schema}}])
            for path, code, schema in (
                ("a list", "invalid_value", {"type": "array"}), ("the work", "schema_too_complex", {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 1_000_003}}}),
            )
        ),
    ],
    "B33": [
        r("item", 404, "response_not_found", "input[0].id", input=[{"type": "item_reference", "id": "../x"}]),
        r("no item", 400, "invalid_value", "input[0].type", input=[{"type": {}}]),
        r("call id", 400, "invalid_value", "input[0].call_id",
          input=[{"type": "function_call_output", "call_id": "x" * 10**6, "output": ""}]),
        r("arguments", 400, "invalid_value", "input[0].arguments",
          input=[{"type": "function_call", "call_id": "a", "name": "f", "arguments": [1]}]),
        r("output", 400, "invalid_value", "input[1].output",
          input=[{"type": "function_call", "call_id": "a", "name": "f", "arguments": ""},
                 {"type": "function_call_output", "call_id": "a", "output": 1}]),
        r("many items", 400, "invalid_value", "input", input=[{"role": "user", "content": "x"}] * 4097),
        r("many tools", 400, "invalid_value", "tools", tools=[{"type": "function", "name": "f"}] * 513),
        r("built-in tool", 400, "not_supported", "tools[0].type", tools=[{"type": "x" * 10**5}]),
        r("tool", 400, "invalid_schema", "tools[0]", tools=[1]),
        r("unknown part to include", 400, "invalid_value", "include[1]", include=["reasoning.encrypted_content", "x"]),
        r("tool of no type", 400, "invalid_value", "tools[0].type", tools=[{"name": "f"}]),
        r("tool's name", 400, "invalid_value", "tools[0].name", tools=[{"type": "function", "name": "a\nb"}]),
        r("deep parameters", 400, "invalid_json", None,
          tools=[{"type": "function", "name": "f", "parameters": json.loads("[" * 200 + "]" * 200)}]),
        r("format", 400, "invalid_value", "text.format", text={"format": {"type": "xml"}}),
        r("no format", 400, "invalid_value", "text.format", text={"format": "json"}),
        *(
            r("follow-up of no response", 404, "response_not_found", "previous_response_id", previous_response_id=id)
            for id in ("../../etc/passwd", "\0" * 10**5)
        ),
        *(
            Case(f"{method} of no response", f"{R}/{id}", b"", 404, "response_not_found", "response_id", method, ())
            for method, id in (("GET", "x"), ("DELETE", "x"), ("POST", "x/cancel"), ("GET", "x/input_items"), ("GET", "%00"), ("GET", "x" * 4000))
        ),
    ],
    "tokens": [
        Case("tokenize nothing", "/tokenize", b"{}", 400, "invalid_value", "prompt"),
        Case("tokenize both", "/tokenize", b'{"prompt": "x", "messages": []}', 400, "invalid_value", "prompt"),
        Case("detokenize", "/detokenize", b'{"tokens": [-1]}', 400, "invalid_value", "tokens[0]"),
        Case("detokenize too many", "/detokenize", b'{"tokens": [' + b"1," * 500_000 + b"1]}", 400, "invalid_value", "tokens"),
        Case("detokenize text", "/detokenize", b'{"tokens": "x"}', 400, "invalid_schema", "tokens"),
    ],
}  # fmt: skip
TOO_MUCH = {  # templates that take more than a request's template may
    "10**10 turns": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "1 GB": "{{ 'a' * 10**9 }}",
    "1 GB that nobody sees": "{{ ('a' * 10**9) | length }}",
    "10 MB of text": "{{ 'a' * 10**7 }}",
    "doubled": "{% set ns = namespace(a='a' * 1000) %}{% for i in range(50) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
}
FORBIDDEN = {  # and those that the sandbox refuses
    "attribute walk": "{{ messages.__class__.__mro__ }}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no template": "{% for %}",
    "21 loops in each other": "{% for i in [] %}" * 21 + "{% endfor %}" * 21,
    "a number of 5000 digits": "{{ " + "9" * 5000 + " }}",
}
CASES = [case._replace(row=row) for row, cases in SUITE.items() for case in cases]


def check(case, status, headers, body):
    """The error contract, for every status."""
    assert status == case.status, (case.name, status, body[:300])
    assert len(body) <= 2048, case.name
    assert headers["content-type"] == "application/json", case.name
    assert headers["x-request-id"]
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == case.code, (case.name, error)
    assert case.param is ... or error["param"] == case.param, (case.name, error)
    assert 0 < len(error["message"]) <= 1024
    for secret in (
        "Traceback",
        str(Path(__file__).parents[2]),
        "site-packages",
        "0x7",
        ".py",
        "<function",
        "zip()",
        "set_int_max_str_digits",
    ):
        assert secret not in error["message"], (case.name, error)
    for letter in "mxu":
        assert letter * 201 not in error["message"], case.name
