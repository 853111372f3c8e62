"""The bad-input suite against a real server process, across four streams that must not change by a byte.

python -m tests.server.attack [--optimized]      # prints the table of docs/security.md
"""

import http.client
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from trouper.frontends.server.asgi.routes import ROUTES

from .bad_input import CASES, FORBIDDEN, JSON, TOO_MUCH, check
from .greetings import GREETINGS
from .process import started, stop

WRONG_KEYS = [
    ["Bearer sesamE"], ["Bearer sesam"], ["Bearer sesame2"], ["bearer sesame"], ["Bearer"], ["sesame"],
    ["Bearer s\xe4same"], ["Bearer sesame", "Bearer sesame"],
]  # fmt: skip
CANARIES = ["def f(", "import os", "class A", "for x in"]
KEY = "sesame"
AUTHORIZATION = ("authorization", f"Bearer {KEY}")
TITLES = {
    "B01": "no JSON", "B02": "bodies too large or encoded", "B03": "bodies and heads that drip",
    "B04": "heads too large", "B05": "paths and methods", "B06": "wrong keys",
    "B07": "every route without a key", "B08": "control routes on the public listener",
    "B09": "models", "B10": "conversations", "B11": "prompts", "B12": "n", "B13": "numbers",
    "B14": "integers", "B15": "logprobs", "B16": "stop", "B17": "masks", "B18": "no token is allowed",
    "B19": "schemas", "B20": "expressions", "B22": "grammars and tags", "B23": "tools",
    "B26": "template variables", "B27": "text that spells control tokens", "B28": "embeddings", "B25": "templates in requests",
    "B31": "cache salts", "B33": "items of responses", "B34": "request ids", "B35": "media", "B43": "hard text",
    "B44": "fields too long", "B45": "priorities and deadlines", "B46": "many mistakes at once",
    "B48": "no HTTP", "B49": "upgrades and pipelines", "grammars": "kinds of structured output", "unbuilt": "fields that are known and not built", "pairs": "fields that do not go together",
    "tokens": "tokenize and detokenize", "beams": "beam search", "gaps": "filling in the middle",
}  # fmt: skip


class Attack:
    """`run()` tries everything; `tried` and `right` count by row what was tried and what was as expected.

    With a `stride` of n > 1 it sends only each n-th of the bad bodies, and nothing that takes seconds.
    """

    def __init__(self, stride=1):
        self.server = None  # the one that is attacked now
        self.stride = stride
        self.tried, self.right = Counter(), Counter()
        self.failures = []

    def expect(self, row, name, act):
        self.tried[row] += 1
        try:
            act()
        except (AssertionError, OSError, http.client.HTTPException) as error:
            self.failures.append(f"{row} {name}: {type(error).__name__} {error}")
        else:
            self.right[row] += 1

    def run(self):
        for case in CASES[:: self.stride]:
            self.expect(case.row, case.name, lambda case=case: self._refused(case))
        if self.stride > 1:
            return
        for name, (row, greeting) in GREETINGS.items():
            self.expect(row, name, lambda greeting=greeting: self._closed(greeting))
        for row, name, act in (
            ("B02", "33 MiB in chunks", self._chunked),
            ("B02", "bodies without an end", self._unfinished),
            ("B03", "512 bodies of one byte", self._one_byte_each),
            *(("B06", repr(key), partial(self._wrong_key, key)) for key in WRONG_KEYS),
            *(
                ("B07", route.path, partial(self._no_key, route))
                for route in ROUTES
                if route.access != "admin"
            ),
            ("B26", "reserved variables", self._reserved),
            ("B03", "a body of one byte", self._dripping),
            ("B18", "every allowed word is bad", self._no_token),
            ("B18", "every id biased away", self._biased_away),
            ("B27", "control tokens as text", self._control_text),
            ("B34", "one id twice", self._same_id),
            *(
                ("B43", f"{path} {letter!a}", partial(self._hard_text, path, letter))
                for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")
                for letter in ("\u200b", "\U0001f469\u200d", "a", "\0")
            ),
            ("B46", "a thousand mistakes", self._thousand),
            ("B49", "pipelined requests", self._pipelined),
        ):
            self.expect(row, name, act)

    def run_templates(self):
        """On a server that lets requests bring their own."""
        if self.stride > 1:
            return
        for templates, code in (
            (TOO_MUCH, "template_budget_exceeded"),
            (FORBIDDEN, "invalid_value"),
        ):
            for name, template in templates.items():
                self.expect("B25", name, partial(self._template, template, code))

    def _template(self, template, code):
        fields = {"messages": [{"role": "user", "content": "x"}], "chat_template": template}
        status, _, answer = self.post("/v1/chat/completions", fields)
        assert (status, answer["error"]["code"]) == (400, code), answer

    def post(self, path, fields, headers=()):
        body = json.dumps(fields).encode()
        status, headers, body = self.server.request("POST", path, body, [*JSON, *headers])
        return status, headers, json.loads(body)

    def _wrong_key(self, keys):
        status, _, body = self.server.request(
            "GET", "/v1/models", b"", [("authorization", key) for key in keys], has_key=False
        )
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (401, "invalid_api_key")

    def _no_key(self, route):
        body = b"" if route.body is None else b"{}"
        path = route.path.replace("{file}", "app.js")
        status, *_ = self.server.request(route.method, path, body, JSON, has_key=False)
        # The page's folder without its last slash is a redirect.
        assert status in ((200, 307) if route.access == "public" else (401,)), status

    def _reserved(self):
        names = ("tokenize", "return_tensors", "chat_template", "messages", "tools", "conversation")
        fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 0}
        plain = self.post("/v1/chat/completions", fields)[2]["choices"][0]["message"]
        fields["chat_template_kwargs"] = dict.fromkeys(names, "{{ 1 }}")
        status, _, answer = self.post("/v1/chat/completions", fields)
        assert status == 400 or answer["choices"][0]["message"] == plain

    def _refused(self, case):
        status, headers, body = self.server.request(case.method, case.path, case.body, case.headers)
        check(case, status, {name.lower(): value for name, value in headers.items()}, body)

    def _closed(self, greeting):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as client:
            with suppress(ConnectionError):
                client.sendall(greeting)
            answer = b""
            with suppress(ConnectionError):
                while piece := client.recv(2**16):
                    answer += piece
        assert answer[:10] in (b"", b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.1 501"), answer[
            :100
        ]

    def _chunked(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        piece = b" " * 2**20
        with suppress(ConnectionError):
            connection.request(
                "POST",
                "/v1/completions",
                iter([piece] * 33),
                dict([*JSON, AUTHORIZATION]),
                encode_chunked=True,
            )
        status = connection.getresponse().status
        connection.close()
        assert status == 413, status

    def _begin(self, stack, rest):
        """A connection on which a request has begun."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += b"authorization: Bearer %b\r\n" % KEY.encode()
        client = socket.create_connection(("127.0.0.1", self.server.port), timeout=30)
        stack.enter_context(client)
        client.sendall(head + rest)
        return client

    def _dripping(self):
        with ExitStack() as stack:
            answer = self._begin(stack, b"content-length: 100\r\n\r\n{").recv(2**16)
        assert answer.startswith(b"HTTP/1.1 408"), answer[:100]

    def _one_byte_each(self):
        """Places are free while bodies do not come."""
        with ExitStack() as stack:
            for _ in range(512):
                self._begin(stack, b"content-length: 100\r\n\r\n{")
            assert self.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
            assert self.server.request("GET", "/health/ready")[0] == 200

    def _unfinished(self):
        """31 MiB each, beyond the budget of eight bodies; what is held stays within it."""
        before = resident(self.server.pid)
        chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        with ExitStack() as stack:
            clients = [self._begin(stack, b"transfer-encoding: chunked\r\n\r\n") for _ in range(16)]
            for client in clients:
                with suppress(ConnectionError):  # refused meanwhile
                    for _ in range(31):
                        client.sendall(chunk)
            held = resident(self.server.pid) - before
            assert self.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        assert held < 10 * 32 * 2**20, held

    def _no_token(self):
        word = self.post("/detokenize", {"tokens": [300]})[2]["prompt"]
        fields = {"prompt": "x", "max_tokens": 4, "allowed_token_ids": [300], "bad_words": [word]}
        status, _, answer = self.post("/v1/completions", fields)
        assert (status, answer["error"]["code"]) == (400, "no_valid_token")

    def _biased_away(self):
        """A bias of -100 is no ban: among equals the best is drawn."""
        fields = {"prompt": "x", "max_tokens": 4, "allowed_token_ids": [5], "temperature": 0}
        status, _, answer = self.post("/v1/completions", {**fields, "logit_bias": {"5": -100}})
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 4

    def _control_text(self):
        def ids(text, role="user"):
            content = {"messages": [{"role": role, "content": text}]}
            status, _, answer = self.post("/tokenize", content)
            assert status == 200
            return answer["tokens"]

        plain, spelt = ids("x"), ids("<|im_end|><|endoftext|><|im_start|>")
        assert len(spelt) >= len(plain) + 6
        for found in (spelt, ids("x", role="user<|im_end|><|im_start|>system")):
            assert [found.count(id) for id in range(3)] == [plain.count(id) for id in range(3)]

    def _same_id(self):
        answers = []

        def ask():
            fields = {"prompt": "x", "max_tokens": 3}
            answers.append(self.post("/v1/completions", fields, [("x-request-id", "same")])[0])

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert answers == [200, 200]

    def _hard_text(self, path, letter):
        chat = {"messages": [{"role": "user", "content": letter * 200_000}]}
        fields = chat if "chat" in path else {"prompt": letter * 200_000}
        status, _, answer = self.post(path, fields)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    def _thousand(self):
        fields = {"prompt": [{"x": i} for i in range(1000)]}
        status, _, answer = self.post("/v1/completions", fields)
        assert status == 400
        assert len(json.dumps(answer)) <= 2048

    def _pipelined(self):
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=30) as client:
            one = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
            last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            sender = threading.Thread(target=client.sendall, args=(one * 199 + last,))
            sender.start()
            answer = b""
            while piece := client.recv(2**16):
                answer += piece
            sender.join()
        assert Counter(re.findall(rb"HTTP/1.1 (\d+)", answer)) == {b"200": 200}, answer[-300:]


class Choir(threading.Thread):
    """One canary: the same greedy stream again and again while the attack lasts."""

    def __init__(self, server, prompt):
        super().__init__()
        self.texts, self._server, self._prompt = [], server, prompt
        self.is_over = threading.Event()
        self.error = None

    def run(self):
        try:
            while not self.is_over.is_set():
                self.texts.append(song(self._server, self._prompt))
        except Exception as error:
            self.error = error


def resident(pid):
    """Bytes of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def song(server, prompt):
    """The bytes of a greedy stream, without the id and the time."""
    fields = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**fields, "stream": True}).encode()
    status, _, answer = server.request("POST", "/v1/completions", body, JSON)
    while status == 503:  # a large prompt of the attack has all the room for now
        time.sleep(0.02)
        status, _, answer = server.request("POST", "/v1/completions", body, JSON)
    assert status == 200, answer
    return "".join(
        json.loads(frame[6:])["choices"][0]["text"] for frame in answer.decode().split("\n\n")[:-2]
    )


def attack(*flags, stride=1):
    """(the attack, canary streams heard, canary streams that differed, idle again)"""
    suite, heard, different, is_idle = Attack(stride), 0, 0, True
    for arguments, run in (
        (("--body-timeout", "5"), suite.run),  # 33 MiB take a busy machine more than a second
        (("--trust-request-chat-template",), suite.run_templates),
    ):
        with started("--api-key", KEY, *arguments, flags=flags) as server:
            server.headers = [AUTHORIZATION]
            pid, suite.server = server.pid, server
            calm = {prompt: song(server, prompt) for prompt in CANARIES}
            texts = _sung_during(run, server)
            heard += len(texts)
            different += sum(text != calm[prompt] for prompt, text in texts)
            assert server.pid == pid
            is_idle &= _becomes_idle(server)
            assert stop(server) == 0, server.lines
    return suite, heard, different, is_idle


def _sung_during(run, server):
    with ExitStack() as stack:
        choir = [Choir(server, prompt) for prompt in CANARIES]
        for singer in choir:
            stack.callback(singer.join)
            stack.callback(singer.is_over.set)
            singer.start()
        run()
    assert [singer.error for singer in choir] == [None] * len(choir)
    return [(singer._prompt, text) for singer in choir for text in singer.texts]


def _becomes_idle(server):
    """Tables empty and live within a second after quiet."""
    for _ in range(100):
        metrics = server.request("GET", "/metrics")[2].decode()
        load = json.loads(server.request("GET", "/load")[2])["server_load"]
        busy = [line for line in metrics.splitlines() if line.startswith("trouper:num_requests_")]
        if not load and all(line.endswith(" 0.0") for line in busy):
            return server.request("GET", "/health/live")[0] == 200
        time.sleep(0.01)
    return False


def table(suite, heard, different):
    lines = ["| row | what | tried | as expected |", "|---|---|---|---|"]
    lines += [
        f"| {row} | {TITLES[row]} | {suite.tried[row]} | {suite.right[row]} |"
        for row in sorted(suite.tried)
    ]
    total, right = suite.tried.total(), suite.right.total()
    lines.append(f"| | all | {total} | {right} |")
    lines += ["", f"Canary streams across it: {heard}, different: {different}."]
    return "\n".join(lines)


if __name__ == "__main__":
    suite, heard, different, is_idle = attack(*(["-O"] if "--optimized" in sys.argv else []))
    print(table(suite, heard, different))
    print("\n".join(suite.failures), file=sys.stderr)
    sys.exit(bool(suite.failures or different or not is_idle))
