"""Kill a server with hundreds of open durable answers, and measure how a new one goes on with them.

    python -m tests.robustness.recovery [--streams 500] [--tokens 1000]

A server answers a few requests to their end.  Their records are then multiplied to a journal of many answers that have come as far as
`--tokens`, as a kill would have left it: one frame for each step, in the order of sampling.  A second server, with the prefix tier on
disk, goes on with all of them while each has a reader.  All events must be those of the first server, and the answers must go on in the order
of their admission.  Exits with 1 if not.
"""

import argparse
import http.client
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import anyio
import msgspec

from trouper.bench.report import percentile
from trouper.bench.serve import demo_of_length
from trouper.bench.studies.server.server_under_test import cpu_s
from trouper.frontends.server.durable.records import Tokens, decode_head
from trouper.frontends.server.durable.segments import FolderDisk, Segments
from trouper.frontends.server.generation.durable import SavedCall

from .durable_kills import KilledServer

# Requests that are answered for real, and tokens that each answer lacks.
NUM_BASES, NUM_MORE = 4, 8
MAX_NUM_SEQS = 32
MAX_BYTES = 2**28


def make_bases(server, num_tokens):
    """Answer some requests.  Returns the frames of each, behind their ids, by the id of its stream."""
    found = {}

    def ask(number):
        body = {
            "prompt": f"{number} It was", "stream": True, "temperature": 0.9, "seed": number,
            "max_tokens": num_tokens + NUM_MORE, "ignore_eos": True,
        }  # fmt: skip
        head = {"Idempotency-Key": str(number)}
        connection, answer = server.request("POST", "/v1/completions", body, head)
        assert answer.status == 200, answer.read()
        found[answer.headers["x-stream-id"]] = events_of(answer.read())
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_BASES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == NUM_BASES, "the first server has not answered"
    return found


def events_of(body):
    """Return the events of a stream behind their ids."""
    frames = [frame for frame in body.split(b"\n\n") if frame and not frame.startswith(b":")]
    pairs = [frame.split(b"\n", 1) for frame in frames]
    assert all(len(pair) == 2 for pair in pairs), f"not an event with an id: {frames[-1]}"
    return {id.removeprefix(b"id: "): data for id, data in pairs}


def segments_in(folder, fingerprint):
    return Segments(
        FolderDisk(str(folder)), fingerprint, lambda: os.urandom(16), max_bytes=MAX_BYTES
    )


def multiply(source, folder, num_streams, num_tokens):
    """Write a journal of many answers.  Returns the id of each with the id of that which it copies, in order of admission."""
    head = decode_head(sorted(source.glob("*.trj"))[-1].read_bytes())
    earlier = segments_in(source, head.fingerprint)
    earlier.begin()
    bases, copies = list(earlier.streams.values()), {}
    written = segments_in(folder, head.fingerprint)
    written.begin()
    for number in range(num_streams):
        base = bases[number % len(bases)]
        old = base.admitted
        saved = msgspec.msgpack.decode(old.request, type=SavedCall)
        unique = f"{number:032x}"
        name = old.id.replace(saved.unique_id, unique)
        request = msgspec.structs.replace(saved, unique_id=unique)
        written.write([
            msgspec.structs.replace(
                old, id=name, key=b"", at=old.at + number / 1000,
                request=msgspec.msgpack.encode(request),
            )
        ])  # fmt: skip
        copies[name] = old.id
    firsts = {base.admitted.id: base.tokens[0] for base in bases}
    for position in range(num_tokens):
        written.write([token_of(name, firsts[old], position) for name, old in copies.items()])
    written.close()
    written.release()
    return copies


def token_of(name, first, position):
    token = Tokens(name, position, [first.token_ids[position]])
    if position == 0:
        token.prompt, token.num_cached = first.prompt, first.num_cached
        token.prompt_token_ids = first.prompt_token_ids
    return token


def time_scan(folder, copy):
    """Return the processor time in which a server finds everything."""
    shutil.copytree(folder, copy)
    begin = time.process_time()
    found = segments_in(copy, bytes(32))
    found.begin()
    return time.process_time() - begin, len(found.streams)


class Reader:
    """Reads what one answer lacks.  `first_s` is the time of its first event."""

    def __init__(self, port, name, cursor):
        self.port, self.name, self.cursor = port, name, cursor
        self.first_s, self.frames = None, b""

    async def read(self):
        async with await anyio.connect_tcp("127.0.0.1", self.port) as link:
            path = f"/v1/streams/{self.name}?starting_after={self.cursor}"
            head = f"GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"
            await link.send(head.encode())
            received = b""
            while True:
                try:
                    received += await link.receive()
                except anyio.EndOfStream:
                    break
                if self.first_s is None and b"id: " in received:
                    self.first_s = time.monotonic()
        self.frames = b"".join(chunks_of(received.split(b"\r\n\r\n", 1)[1]))


def chunks_of(body):
    """Yield the contents of a body in chunks."""
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


async def read_all(readers):
    async with anyio.create_task_group() as tasks:
        for reader in readers:
            tasks.start_soon(reader.read)


def check_order(readers, max_ahead=MAX_NUM_SEQS):
    """Raise AssertionError if an answer went on before one that was admitted this many places earlier."""
    ranks = sorted(range(len(readers)), key=lambda i: readers[i].first_s)
    ahead = max(i - rank for rank, i in enumerate(ranks))
    assert ahead < max_ahead, f"an answer went on {ahead} places too early"


def run(num_streams, num_tokens):
    """Return what was measured.  Raises AssertionError if an event or the order differs."""
    length = num_tokens + NUM_MORE + 64
    with tempfile.TemporaryDirectory() as place, demo_of_length(length) as model:
        folder = Path(place)
        options = [
            "--model", model, "--max-model-len", str(length), "--max-num-seqs", str(MAX_NUM_SEQS),
            "--kv-tier-dir", str(folder / "tier"),
        ]  # fmt: skip
        server = KilledServer(folder / "source", options=options)
        server.start()
        load_s = cpu_s(server.process.pid)
        expected = make_bases(server, num_tokens)
        server.kill()
        copies = multiply(folder / "source", folder / "journal", num_streams, num_tokens)
        scan_s, num_found = time_scan(folder / "journal", folder / "copy")
        assert num_found == num_streams, f"only {num_found} answers are found"
        server = KilledServer(folder / "journal", options=options)
        server.start()
        try:
            began_s, begun = time.monotonic(), cpu_s(server.process.pid)
            readers = [Reader(server.port, name, num_tokens) for name in copies]
            watch = FirstToken(server.process.pid, readers)
            thread = threading.Thread(target=watch.wait)
            thread.start()
            anyio.run(read_all, readers)
            thread.join()
        finally:
            server.kill()
        for reader in readers:
            base = copies[reader.name]
            unique = reader.name.partition("-")[2].encode()
            found = events_of(reader.frames.replace(unique, base.partition("-")[2].encode()))
            wanted = dict(list(expected[base].items())[-len(found) :])
            assert len(found) >= NUM_MORE, f"{reader.name} has only {len(found)} events"
            assert list(found) == list(wanted), f"{reader.name}: {list(found)[:2]}"
            for id, data in found.items():
                assert same(data, wanted[id]), f"{reader.name}, {id}: {data} for {wanted[id]}"
        check_order(readers)
        waits = sorted(reader.first_s - began_s for reader in readers)
        return {
            "streams": num_streams, "tokens": num_tokens, "scan_cpu_s": round(scan_s, 2),
            "load_cpu_s": round(load_s, 2), "ready_cpu_s": round(begun, 2),
            "first_token_cpu_s": round(watch.cpu_s - begun, 2),
            "first_token_s": round(waits[0], 2), "p99_first_token_s": round(percentile(waits, 99), 2),
        }  # fmt: skip


class FirstToken:
    """Notes how much processor time the server had taken at the first new token of any answer."""

    def __init__(self, pid, readers):
        self.pid, self.readers, self.cpu_s = pid, readers, 0.0

    def wait(self):
        while all(reader.first_s is None for reader in self.readers):
            self.cpu_s = cpu_s(self.pid)
            time.sleep(0.01)


def same(found, wanted):
    """Whether two events are equal but for the time of their reply."""
    return strip(found) == strip(wanted)


def strip(data):
    text = data.removeprefix(b"data: ")
    if text == b"[DONE]":
        return text
    content = json.loads(text)
    content.pop("created", None)
    return content


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    try:
        found = run(args.streams, args.tokens)
    except (AssertionError, http.client.HTTPException) as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
