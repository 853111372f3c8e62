"""Kill a whole server at drawn moments while clients read background responses, and compare what they get in the end.

    python -m tests.robustness.durable_kills --kills 200 [--seed 1]

Each kill ends the process group by SIGKILL.  After half of the kills the end of the journal is cut or changed, as a loss of power may leave
it.  Clients come back with the number of their last event.  The exit status is 1 unless every text equals that of an undisturbed server and
every event number comes exactly once.
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

    def __init__(self, folder, dice):
        self.folder, self.dice, self.port = Path(folder), dice, free_port()
        self.process, self.num_safe = None, 0

    def start(self):
        command = [sys.executable, "-m", "trouper", "serve", "--port", str(self.port)]
        command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
        command += ["--journal", str(self.folder)]
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

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"content-type": "application/json"})
        return connection, connection.getresponse()

    def status(self, path):
        try:
            connection, answer = self.request("GET", path)
        except OSError:
            return 0
        connection.close()
        return answer.status


class Client:
    """Reads one response to its end, however often the server ends before.

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

    def text(self):
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


def texts(server, num_clients, num_kills):
    """Read all responses while the server is killed.  Returns their texts, and the number of kills."""
    server.start()
    try:
        clients = [Client(server, number) for number in range(num_clients)]
        for client in clients:
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
        return [client.text() for client in clients], num_killed
    finally:
        server.kill()


def run(num_kills, num_clients, seed):
    """Play rounds until so many kills are done.  Returns their number; raises AssertionError if a text differs."""
    with tempfile.TemporaryDirectory() as folder:
        dice = random.Random(seed)
        expected, _ = texts(KilledServer(f"{folder}/quiet", dice), num_clients, 0)
        num_done = number = 0
        while num_done < num_kills:
            number += 1
            server = KilledServer(f"{folder}/{number}", dice)
            found, num_killed = texts(server, num_clients, min(6, num_kills - num_done))
            assert found == expected, (found, expected)
            num_done += num_killed
        return num_done


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    num_kills = run(args.kills, args.clients, args.seed)
    sys.stdout.write(
        f"{num_kills} kills, {args.clients} clients: all texts equal, no event twice\n"
    )


if __name__ == "__main__":
    main()
