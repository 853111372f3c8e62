"""Upgrade a server again and again under open streams, and compare what the clients get with a server that is left alone.

    python -m tests.robustness.take_over --upgrades 20 --streams 50 [--seed 1] [--loop trio]

A third of the clients reads ordinary streams, a third durable ones that stay connected, and a third durable ones that leave after a few events
and return by their key; all begin again when an answer is whole.  Half of the clients keep their connection for the next request.
The exit status is 1 if a connection was refused or broken, an answer differs or has an event twice, or a server has not ended with 0.
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

from trouper.frontends.server.program.hand_over import Predecessor, describe_server
from trouper.frontends.server.shared.settings import ServeSettings

from .durable_kills import free_port

# Seconds for a server to load beside another one under load, and for an answer.
LIMIT_S = 300
BODY = {"stream": True, "max_tokens": 40, "temperature": 0.9, "ignore_eos": True}
# Different prompts and seeds; each has one answer.
NUM_ANSWERS = 12


class Upgraded:
    """A server and its successors at one port, with a journal."""

    def __init__(self, folder, loop, *options):
        self.folder, self.port = Path(folder), free_port()
        self.control = self.folder / "control.sock"
        self.options = ["--port", str(self.port), "--loop", loop, "--dtype", "float32"]
        self.options += ["--max-model-len", "512", "--max-num-seqs", "64"]
        self.options += ["--num-gpu-blocks-override", "256", "--journal", str(self.folder / "j")]
        self.options += options
        self.processes = []

    def start(self):
        """Start the first server, or one that takes over from the last, and wait until it serves."""
        where = "--take-over" if self.processes else "--admin-uds"
        command = [sys.executable, "-m", "trouper", "serve", *self.options, where, self.control]
        log = self.folder / f"{len(self.processes)}.log"
        with open(log, "wb") as file:
            self.processes.append(subprocess.Popen(command, stderr=file))
        limit_s = time.monotonic() + LIMIT_S
        while "serving" not in (text := log.read_text()):
            assert self.processes[-1].poll() is None, text
            assert time.monotonic() < limit_s, text
            time.sleep(0.05)

    def wait_for_leavers(self):
        """Wait for the end of all servers but the last; return their exit statuses."""
        return [process.wait(LIMIT_S) for process in self.processes[:-1]]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()

    def refuse_to_take_over(self):
        """Begin to take over, and end before it is done: the server goes on."""
        settings = ServeSettings(
            port=self.port, admin_uds=str(self.control), journal=str(self.folder / "j")
        )
        predecessor = Predecessor.ask(str(self.control), describe_server(settings))
        predecessor.take(b"")
        predecessor.close()
        for copy in predecessor.sockets.values():
            copy.close()


class Client(threading.Thread):
    """Asks for answers until it is stopped.  It notes what goes wrong, and the texts."""

    def __init__(self, port, number, seed):
        super().__init__(daemon=True)
        self.port, self.number, self.dice = port, number, random.Random(f"{seed} {number}")
        self.is_durable, self.leaves = number % 3 > 0, number % 3 == 2
        self.keeps = number % 2 == 0
        self.connection = None
        self.is_stopped = False
        self.problems, self.texts = [], []

    def run(self):
        while not self.is_stopped:
            which = self.dice.randrange(NUM_ANSWERS)
            try:
                self.texts.append((which, self.ask(which)))
            except Exception as error:
                self.problems.append(f"client {self.number}: {error!r}")
                self.close()
        self.close()

    def ask(self, which):
        """The text of one answer, over as many connections as it takes."""
        head = {"content-type": "application/json"}
        if self.is_durable:
            head["Idempotency-Key"] = f"{self.number} {len(self.texts)} {which}"
        most = self.dice.randrange(2, 30) if self.leaves else None
        found, last, deadline = [], None, time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline, "the answer does not end"
            answer = self.send(which, head | ({"Last-Event-ID": last} if last else {}))
            if answer.status == 503 and self.is_durable:
                # The journal has just passed to the next server, which gets the next connection.
                answer.read()
                self.close()
                time.sleep(0.02)
                continue
            assert answer.status == 200, (answer.status, answer.read())
            events, is_whole = self.read(answer, most)
            found += events
            last = found[-1][0] if found else None
            if is_whole:
                break
            assert self.is_durable, "a stream was cut"
            self.close()
            most = None
        if not self.keeps:
            self.close()
        ids = [id for id, _ in found if id is not None]
        assert len(ids) == len(set(ids)), f"events came twice: {ids}"
        return "".join(text for _, text in found)

    def send(self, which, head):
        body = json.dumps({**BODY, "prompt": f"def f{which}(", "seed": which})
        is_new = self.connection is None
        if is_new:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            self.connection.request("POST", "/v1/completions", body, head)
            return self.connection.getresponse()
        except (ConnectionResetError, BrokenPipeError):
            self.close()
            # Any server may close a connection that was idle for some seconds.
            if is_new:
                raise
        return self.send(which, head)

    def read(self, answer, most):
        """The events up to a number, with their ids, and whether the answer is whole."""
        events, id = [], None
        try:
            for line in answer:
                if line.startswith(b"id: "):
                    id = line[4:].decode().strip()
                elif line.startswith(b"data: [DONE]"):
                    answer.read()
                    return events, True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "choices" in event, event
                    assert event["choices"][0]["finish_reason"] != "abort", "aborted"
                    if answer.readline() == b"\n":
                        events.append((id, event["choices"][0]["text"]))
                if most is not None and len(events) >= most:
                    return events, False
        except http.client.IncompleteRead:
            pass
        return events, False

    def close(self):
        if self.connection is not None:
            self.connection.close()
        self.connection = None


def run(num_upgrades, num_streams, seed=1, loop="asyncio", report=lambda line: None):
    """Play the upgrades.  Returns the problems, and the number of whole answers."""
    with tempfile.TemporaryDirectory() as folder:
        server = Upgraded(folder, loop)
        clients = [Client(server.port, number, seed) for number in range(num_streams)]
        try:
            server.start()
            server.refuse_to_take_over()
            first = Client(server.port, 0, seed)
            expected = [first.ask(which) for which in range(NUM_ANSWERS)]
            first.close()
            for client in clients:
                client.start()
            for number in range(num_upgrades):
                begun = time.monotonic()
                server.start()
                answers = sum(len(client.texts) for client in clients)
                failed = sum(len(client.problems) for client in clients)
                seconds = time.monotonic() - begun
                report(f"upgrade {number + 1}: {seconds:.1f} s, {answers} answers, {failed} failed")
            for client in clients:
                client.is_stopped = True
            for client in clients:
                client.join(LIMIT_S)
            problems = [problem for client in clients for problem in client.problems]
            problems += [f"client {c.number} does not end" for c in clients if c.is_alive()]
            texts = [pair for client in clients for pair in client.texts]
            problems += [f"answer {i}: {t!r}" for i, t in texts if t != expected[i]]
            statuses = server.wait_for_leavers()
            problems += [f"a server has ended with {status}" for status in statuses if status]
            return problems, len(texts)
        finally:
            server.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrades", type=int, default=20)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loop", default="asyncio")
    args = parser.parse_args()
    problems, num_answers = run(
        args.upgrades,
        args.streams,
        args.seed,
        args.loop,
        lambda line: sys.stdout.write(line + "\n") and sys.stdout.flush(),
    )
    sys.stdout.write("".join(f"{problem}\n" for problem in problems[:20]))
    sys.stdout.write(
        f"{args.upgrades} upgrades under {args.streams} streams: {num_answers} answers, {len(problems)} problems\n"
    )
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
