"""Record a mixed load at a server, and compute it again by `trouper replay`.

    python -m tests.robustness.replayed_mix --requests 1000 [--dtype bfloat16] [--alone] [--seed 1]

The requests go to all generating APIs, 24 at a time: greedy and sampled, streamed and whole, with schemas, tools, adapters, penalties, biases,
stop strings and several choices; one client in forty leaves in the middle.  The exit status is that of the replay: in float32 no request may
differ.
"""

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.support.adapters import random_tensors, write_adapter

from .durable_kills import LIMIT_S, free_port

WORDS = ["def", "return", "x", "foo", "bar", "if", "import", "class", "(", ":"]
NUM_CLIENTS = 24
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
MODEL, ADAPTER = "trouper-demo", "poet"


def drawn_request(dice, number):
    """The path and the body of a request."""
    words = " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, 60)))
    body = {
        "model": ADAPTER if dice.random() < 0.2 else MODEL,
        "max_tokens": dice.randint(1, 60),
        "temperature": dice.choice([0, 0.7, 1.3]),
        "stream": dice.random() < 0.5,
    }
    chat = [{"role": "user", "content": words}]
    kind = dice.random()
    if kind < 0.1:
        options = {"num_predict": body.pop("max_tokens"), "temperature": body.pop("temperature")}
        return "/api/chat", {**body, "messages": chat, "options": options}
    if kind < 0.2:
        return "/v1/messages", {**body, "messages": chat}
    if kind < 0.3:
        body["max_output_tokens"] = body.pop("max_tokens")
        return "/v1/responses", {**body, "input": words}
    further = {
        "seed": number,
        "top_k": dice.choice([1, 5, 40]),
        "top_p": 0.8,
        "min_p": 0.05,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
        "stop": ["return", "\n"],
        "logit_bias": {"300": 3, "17": -100},
    }
    body |= {name: value for name, value in further.items() if dice.random() < 0.25}
    if body["max_tokens"] > 5 and dice.random() < 0.2:
        body["min_tokens"] = 5
    if body["temperature"] and dice.random() < 0.1:
        body["n"] = 3
    if kind < 0.6:
        if dice.random() < 0.1:
            body["logprobs"] = 2
        return "/v1/completions", {**body, "prompt": words}
    body["messages"] = chat
    if kind < 0.7:
        body["response_format"] = FORMAT
    elif kind < 0.8:
        body |= {"tools": [TOOL], "tool_choice": dice.choice(["auto", "required"])}
    return "/v1/chat/completions", body


def send(port, path, body, *, leaves):
    """Send a request; read its whole answer, or leave after the first event."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    if leaves:
        body |= {"stream": True, "max_tokens": 200}
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if leaves:
            answer.readline()
        else:
            text = answer.read()
            assert answer.status == 200, (path, body, text)
    finally:
        connection.close()


def send_all(port, num_requests, seed):
    """Send the whole load.  Returns what has failed."""
    dice, problems = random.Random(seed), []
    drawn = [(i, *drawn_request(dice, i)) for i in range(num_requests)]

    def work():
        while drawn:
            try:
                number, path, body = drawn.pop()
            except IndexError:
                return
            leaves = number % 40 == 7 and path == "/v1/completions"
            try:
                send(port, path, body, leaves=leaves)
            except Exception as error:
                problems.append(f"request {number}: {error!r}")

    clients = [threading.Thread(target=work) for _ in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return problems


def record(folder, num_requests, seed, dtype):
    """Record the load in `folder/records`."""
    adapter = write_adapter(folder / ADAPTER, random_tensors(scale=0.3))
    port = free_port()
    command = [sys.executable, "-m", "trouper", "serve", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", "1024", "--max-num-seqs", "32", "--enable-lora"]
    command += ["--lora-modules", f"{ADAPTER}={adapter}"]
    command += ["--record", str(folder / "records"), "--record-content"]
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(command, stderr=log)
    try:
        limit_s = time.monotonic() + LIMIT_S
        while "serving" not in (text := (folder / "log").read_text()):
            assert server.poll() is None, text
            assert time.monotonic() < limit_s, text
            time.sleep(0.05)
        problems = send_all(port, num_requests, seed)
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0
    finally:
        server.kill()
        server.wait()
    assert not problems, problems[:3]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record(folder, args.requests, args.seed, args.dtype)
        (file,) = (folder / "records").glob("*.jsonl")
        num_records = len(file.read_bytes().splitlines()) - 1
        sys.stdout.write(f"{args.requests} requests sent, {num_records} records\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "trouper", "replay", str(file)]
        command += ["--alone"] if args.alone else []
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
