"""Kill a whole server at drawn moments while clients of all generating APIs read durable answers, and compare what they get in the end.

    python -m tests.robustness.durable_kills --kills 200 [--seed 1]

Each kill ends the process group by SIGKILL.  After half of the kills the end of the journal is cut or changed, as a loss of power may leave
it.  Clients come back with the place of their last event.  The exit status is 1 unless every event equals that of an undisturbed server and
comes exactly once.
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ENDS = ("response.completed", "response.incomplete", "response.failed")
TOPICS = ("cats", "rain", "the sea", "bread", "stars", "a road")
# Seconds for a server to load, and for an answer.
LIMIT_S = 120
# The process is killed this many seconds after it is ready, at most.
LIFE_S = 1.5


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class KilledServer:
    """A server with a journal, which is started again and again at the same port."""

    def __init__(
        self, folder, dice=None, options=("--max-model-len", "512", "--max-num-seqs", "8")
    ):
        self.folder, self.dice, self.port = Path(folder), dice, free_port()
        self.options = options
        self.process, self.num_safe = None, 0

    def start(self):
        command = [sys.executable, "-m", "trouper", "serve", "--port", str(self.port)]
        command += ["--dtype", "float32", "--journal", str(self.folder), *self.options]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(
                command, start_new_session=True, stdout=log, stderr=subprocess.STDOUT
            )
        limit_s = time.monotonic() + LIMIT_S
        while self.status("/health/ready") != 200:
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < limit_s, "the server is not ready"
            time.sleep(0.05)
        self.mark()

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def harm_journal(self):
        """Cut or change the last bytes.  Those up to the mark had reached the disk."""
        segment = self.segments()[-1]
        data = bytearray(segment.read_bytes())
        del data[self.dice.randrange(max(self.num_safe, len(data) - 600), len(data) + 1) :]
        if self.dice.random() < 0.4 and len(data) > self.num_safe:
            data[self.dice.randrange(self.num_safe, len(data))] ^= 16
        segment.write_bytes(data)

    def segments(self):
        return sorted(self.folder.glob("*.trj"))

    def mark(self):
        """Note how long the journal is.  The start of a segment is synchronised before the server is ready."""
        self.num_safe = self.segments()[-1].stat().st_size

    def request(self, method, path, body=None, headers=()):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        content = None if body is None else json.dumps(body)
        head = {"content-type": "application/json", **dict(headers)}
        connection.request(method, path, content, head)
        return connection, connection.getresponse()

    def status(self, path):
        try:
            connection, answer = self.request("GET", path)
        except OSError:
            return 0
        connection.close()
        return answer.status


class BackgroundClient:
    """Reads one background response to its end, however often the server ends before.

    It has an id before the first kill.  Odd ones read events, the others ask for the whole response.
    """

    def __init__(self, server, number):
        self.server = server
        self.body = {
            "input": f"Write about {TOPICS[number % len(TOPICS)]}.",
            "background": True,
            "stream": number % 3 != 2,
            "max_output_tokens": 120 + 20 * number,
            "temperature": 0.9 if number % 2 else 0,
            "seed": number,
        }
        self.events, self.name, self.response = [], None, None

    def begin(self):
        if self.body["stream"]:
            connection, answer = self.server.request("POST", "/v1/responses", self.body)
            self.read(answer, most=2)
            connection.close()
            self.name = self.events[0]["response"]["id"]
        else:
            connection, answer = self.server.request("POST", "/v1/responses", self.body)
            self.name = json.loads(answer.read())["id"]
            connection.close()

    def finish(self):
        while self.response is None:
            try:
                self.go_on()
            except (OSError, http.client.HTTPException, ValueError):
                pass
            time.sleep(0.02)

    def go_on(self):
        path = f"/v1/responses/{self.name}"
        if not self.body["stream"]:
            connection, answer = self.server.request("GET", path)
            found = json.loads(answer.read())
            if answer.status == 200 and found["status"] not in ("queued", "in_progress"):
                self.response = found
            elif answer.status not in (200, 503):
                self.response = {"status": "failed", "error": found}
            connection.close()
            return
        last = self.events[-1]["sequence_number"]
        path += f"?stream=true&starting_after={last}"
        connection, answer = self.server.request("GET", path)
        if answer.status == 200:
            self.read(answer)
        elif answer.status != 503:
            self.response = {"status": "failed", "error": answer.read().decode()}
        connection.close()

    def read(self, answer, most=None):
        for line in answer:
            if line.startswith(b"data: "):
                self.events.append(json.loads(line[6:]))
                if self.events[-1]["type"] in ENDS:
                    self.response = self.events[-1]["response"]
                    return
                if most is not None and len(self.events) == most:
                    return

    def result(self):
        assert self.response is not None, f"{self.name} does not end"
        assert self.response["status"] != "failed", self.response["error"]
        (item,) = self.response["output"]
        text = item["content"][0]["text"]
        if self.body["stream"]:
            numbers = [event["sequence_number"] for event in self.events]
            assert numbers == list(range(len(numbers))), f"events are lost or repeated: {numbers}"
            deltas = [e for e in self.events if e["type"] == "response.output_text.delta"]
            assert "".join(event["delta"] for event in deltas) == text, (
                "the events are another text"
            )
        return text


SAMPLED = {"stream": True, "temperature": 0.9, "max_tokens": 150, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Write about the sea."}], **SAMPLED}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"town": {"type": "string", "pattern": "^[a-z]{4,30}$"}},
    "required": ["town"]}}}  # fmt: skip
KEYED = (
    ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": ["It was", "It was"], **SAMPLED, "logprobs": 1, "echo": True}),
    ("/v1/completions", {"prompt": "A road", **SAMPLED, "stop": ["the"], "min_tokens": 40}),
    ("/v1/messages", {**CHAT, "model": "trouper-demo"}),
    ("/v1/responses", {"input": "Bread", **SAMPLED, "max_tokens": None, "max_output_tokens": 150}),
    ("/v1/chat/completions", {**CHAT, "tools": [WEATHER], "tool_choice": "required"}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"regex": "[a-f ]{120}"}}),
    ("/v1/chat/completions", {**CHAT, "stream": False, "n": 2, "frequency_penalty": 0.5}),
    ("/v1/messages", {**CHAT, "model": "trouper-demo", "stream": False, "temperature": 0}),
)  # fmt: skip


class KeyedClient:
    """Sends the same request with the same `Idempotency-Key` until it has the whole answer."""

    def __init__(self, server, number):
        self.server, (self.path, body) = server, KEYED[number]
        self.body = {name: value for name, value in body.items() if value is not None}
        self.body["seed"] = number
        if "tools" in body or "structured_outputs" in body:
            # The grammar ends the answer.
            self.body.pop("ignore_eos")
        self.head = {"Idempotency-Key": f"key {number}"}
        self.frames, self.ids, self.answer, self.name = [], [], None, ""

    def begin(self):
        """Let the server keep the request: the head of an answer comes only then."""
        connection, answer = self.server.request("POST", self.path, self.body, self.head)
        self.read(answer, most=2)
        connection.close()

    def finish(self):
        while self.answer is None:
            try:
                self.go_on()
            except (OSError, http.client.HTTPException, ValueError):
                pass
            time.sleep(0.02)

    def go_on(self):
        last = {"Last-Event-ID": self.ids[-1]} if self.ids else {}
        connection, answer = self.server.request("POST", self.path, self.body, self.head | last)
        if answer.status == 503:
            pass
        elif answer.status != 200:
            self.answer = f"{answer.status} {answer.read()}"
        elif self.body["stream"]:
            self.read(answer)
        else:
            self.name = answer.headers["x-stream-id"]
            self.frames, self.answer = [json.loads(answer.read())], "whole"
        connection.close()

    def read(self, answer, most=None):
        assert answer.status == 200, answer.read()
        self.name = answer.headers["x-stream-id"]
        id = None
        for line in answer:
            if line.startswith(b"id: "):
                id = line[4:].decode().strip()
            elif line.startswith(b"data: ") and line.endswith(b"\n"):
                # An event counts when the empty line behind it has come.
                if answer.readline() != b"\n":
                    return
                self.ids.append(id)
                data = line[6:].strip()
                if data == b"[DONE]":
                    self.answer = "whole"
                    return
                self.frames.append(json.loads(data))
                ends = ("message_stop", "response.completed", "response.incomplete", "error")
                if self.frames[-1].get("type") in ends:
                    self.answer = "whole"
                    return
                if len(self.ids) == most:
                    return

    def result(self):
        """Return the events of each choice.  After damage the choices may advance in another order."""
        assert self.answer == "whole", self.answer
        assert len(set(self.ids)) == len(self.ids), f"events are repeated: {self.ids}"
        unique = self.name.partition("-" if "-" in self.name else "_")[2]
        choices = {}
        for frame in self.frames:
            found = json.loads(json.dumps(neutral(frame)).replace(unique, "ID"))
            index = found["choices"][0]["index"] if found.get("choices") else 0
            choices.setdefault(index, []).append(found)
        return choices


def neutral(value):
    """Return a value without times, random ids of calls, and what depends on the cache."""
    if isinstance(value, dict):
        hidden = ("created", "created_at", "completed_at", "usage")
        hidden += ("id",) * ("function" in value)
        return {name: neutral(each) for name, each in value.items() if name not in hidden}
    return [neutral(each) for each in value] if isinstance(value, list) else value


NUM_BACKGROUND = 3
NUM_KINDS = NUM_BACKGROUND + len(KEYED)


def client_of(server, kind):
    if kind < NUM_BACKGROUND:
        return BackgroundClient(server, kind)
    return KeyedClient(server, kind - NUM_BACKGROUND)


def results(server, kinds, num_kills):
    """Read answers of these kinds while the server is killed.  Returns what the clients got, and the number of kills."""
    server.start()
    try:
        clients = [client_of(server, kind) for kind in kinds]
        begun = [client for client in clients if client.body["stream"] or needs_id(client)]
        for client in begun:
            client.begin()
        server.mark()
        readers = [threading.Thread(target=client.finish, daemon=True) for client in clients]
        for reader in readers:
            reader.start()
        num_killed = 0
        while any(reader.is_alive() for reader in readers) and num_killed < num_kills:
            time.sleep(0.2 + server.dice.random() * LIFE_S)
            server.kill()
            num_killed += 1
            if server.dice.random() < 0.5:
                server.harm_journal()
            server.start()
        for reader in readers:
            reader.join(LIMIT_S)
        return [client.result() for client in clients], num_killed
    finally:
        server.kill()


def needs_id(client):
    """Whether a client needs an id before the first kill.  A whole reply with a key is sent again."""
    return isinstance(client, BackgroundClient)


def run(num_kills, num_clients, seed):
    """Play rounds until so many kills are done.  Returns their number; raises AssertionError if an answer differs."""
    with tempfile.TemporaryDirectory() as folder:
        dice = random.Random(seed)
        kinds = list(range(NUM_KINDS))
        expected, _ = results(KilledServer(f"{folder}/quiet", dice), kinds, 0)
        num_done = number = 0
        while num_done < num_kills:
            number += 1
            server = KilledServer(f"{folder}/{number}", dice)
            drawn = dice.sample(kinds, num_clients)
            found, num_killed = results(server, drawn, min(6, num_kills - num_done))
            for kind, result in zip(drawn, found, strict=True):
                assert result == expected[kind], difference(kind, result, expected[kind])
            num_done += num_killed
        return num_done


def difference(kind, found, expected):
    if isinstance(found, str):
        return f"kind {kind}: {found!r} instead of {expected!r}"
    for choice, events in expected.items():
        got = found.get(choice, [])
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(got, events, strict=False)) if a != b]
        if pairs or len(got) != len(events):
            return f"kind {kind}, choice {choice}: {len(got)} of {len(events)} events, {pairs[:1]}"
    return f"kind {kind}: other choices"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    num_kills = run(args.kills, args.clients, args.seed)
    sys.stdout.write(
        f"{num_kills} kills, {args.clients} clients: all answers equal, no event twice\n"
    )


if __name__ == "__main__":
    main()
