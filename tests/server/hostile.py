"""Connections that mean harm, by name and drawn, against every listener of a server.

    python -m tests.server.hostile [--connections 10000] [--seed 0] [--loop asyncio]

starts a server process, attacks its public and its admin listener, and exits with 0 if the process is the same one, answers
within a second throughout, and has its descriptors and places back in the end.
"""

import argparse
import json
import math
import random
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from .greetings import GREETINGS
from .process import started, stop

KEY = "sesame"
CLOSE = ("connection", "close")  # else a connection may stay some seconds after its client
RESET = struct.pack("ii", 1, 0)  # closing throws away what is under way, and says so
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
PATIENCE_S = 0.05
MAX_WAIT_S = 1.0  # of a request that means no harm


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(stream, *fields, flags=END_HEADERS):
    """A HEADERS frame whose fields are neither compressed nor indexed."""
    block = b"".join(b"\0%c%b%c%b" % (len(n), n, len(v), v) for n, v in fields)
    return frame(HEADERS, flags, stream, block)


def h2(*frames, settings=b""):
    return PREFACE + frame(SETTINGS, payload=settings) + b"".join(frames)


def asked(method=b"GET", path=b"/v1/models", *more):
    scheme = (b":scheme", b"http"), (b":authority", b"x")
    return ((b":method", method), (b":path", path), *scheme, *more)


def h1(head, *lines, body=b""):
    return b"\r\n".join([head, b"host: x", *lines, b"", body])


def websocket(*lines):
    upgrade = b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13"
    return h1(
        b"GET /v1/models HTTP/1.1", *upgrade, b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", *lines
    )


PROMPTS = json.dumps({"prompt": ["x"] * 600, "max_tokens": 99, "stream": True}).encode()
JSON = (b"content-type", b"application/json")
POST = b"POST /v1/completions HTTP/1.1"
PACKETS = {
    **{name: packet for name, (_, packet) in GREETINGS.items() if len(packet) < 2**16},
    "websocket extensions": websocket(b"sec-websocket-extensions: \xff"),
    "websocket protocols": websocket(b"sec-websocket-protocol: \xff"),
    "websocket frames": websocket() + b"\x81\xfe\xff\xff" + bytes(500),
    "upgrade to h2c": h1(
        b"GET / HTTP/1.1", b"connection: upgrade, http2-settings", b"upgrade: h2c",
        b"http2-settings: AAAA",
    ),
    "upgrade to h2c, no settings": h1(b"GET / HTTP/1.1", b"connection: upgrade", b"upgrade: h2c"),
    "upgrade with a body": h1(
        POST, b"connection: upgrade", b"upgrade: h2c", b"content-length: 3", body=b"abc"
    ),
    "h2": h2(headers(1, *asked(), flags=END_HEADERS | END_STREAM)),
    "h2 path": h2(headers(1, *asked(path=b"/\xff"), flags=END_HEADERS | END_STREAM)),
    "h2 connect": h2(headers(1, (b":method", b"CONNECT"), (b":authority", b"x"))),
    "h2 priorities": h2(*(frame(PRIORITY, 0, 2 * i + 1, bytes(5)) for i in range(1001))),
    "h2 data after the answer": h2(
        headers(1, *asked(b"POST", b"/v1/completions", JSON)), frame(DATA, 0, 1, b"x" * 1000)
    ),
    "h2 window of 0": h2(
        headers(1, *asked(b"POST", b"/v1/completions", JSON)),
        frame(DATA, END_STREAM, 1, PROMPTS),
        settings=struct.pack(">HI", INITIAL_WINDOW_SIZE, 0),
    ),
    "h2 reset": h2(headers(1, *asked(b"POST")), frame(RST_STREAM, 0, 1, bytes(4))),
    "h2 frame of the wrong size": h2(frame(SETTINGS, payload=b"abc")),
    "h2 preface alone": PREFACE,
    "connect": h1(b"CONNECT x:1 HTTP/1.1"),
    "options of the server": h1(b"OPTIONS * HTTP/1.1"),
    "no path": h1(b"GET HTTP/1.1"),
    "a path of bytes": h1(b"GET /\xff\xfe HTTP/1.1"),
    "a path that ends in a percent": h1(b"GET /%f%ff%80% HTTP/1.1"),
    "no URL": h1(b"GET //:x@[::1 HTTP/1.1"),
    "version 9": h1(b"GET / HTTP/9.9"),
    "version 0.9": b"GET /\r\n\r\n",
    "a zero in a header": h1(b"GET / HTTP/1.1", b"a: \0"),
    "a folded header": h1(b"GET / HTTP/1.1", b"a: b", b" c"),
    "lone line feeds": b"GET / HTTP/1.1\nhost: x\n\n",
    "negative length": h1(POST, b"content-length: -1"),
    "a length beyond all": h1(POST, b"content-length: " + b"9" * 40),
    "two lengths": h1(POST, b"content-length: 1", b"content-length: 2", body=b"ab"),
    "a chunk beyond all": h1(POST, b"transfer-encoding: chunked", body=b"f" * 40 + b"\r\n"),
    "no chunk": h1(POST, b"transfer-encoding: chunked", body=b"zz\r\n"),
    "a chunk's extension": h1(
        POST, b"transfer-encoding: chunked", body=b"1;" + b"x" * 5000 + b"\r\na\r\n0\r\n\r\n"
    ),
    "trailers": h1(
        POST, b"transfer-encoding: chunked", body=b"0\r\n" + b"a: b\r\n" * 5000 + b"\r\n"
    ),
    "codings": h1(POST, b"transfer-encoding: gzip, chunked"),
    "expects to go on": h1(POST, b"expect: 100-continue", b"content-length: 100"),
    "expects the impossible": h1(POST, b"expect: the spanish inquisition"),
    "requests in a row": h1(b"GET /version HTTP/1.1") * 600,
    "a request and garbage": h1(b"GET /version HTTP/1.1") + bytes(100),
    "body of an answered request": h1(POST, b"content-length: 60000", body=b"x" * 30000),
    "headers without end": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10000,
}  # fmt: skip


def drawn(draw):
    """One packet as it is, or cut, spliced and damaged."""
    packet = draw.choice(list(PACKETS.values()))
    if draw.random() < 0.3:
        packet += draw.choice(list(PACKETS.values()))
    if draw.random() < 0.5:
        damaged = bytearray(packet)
        for _ in range(draw.choice((1, 3, 30))):
            at = draw.randrange(len(damaged))
            match draw.randrange(3):
                case 0:
                    damaged[at] = draw.randrange(256)
                case 1:
                    damaged[at:at] = draw.randbytes(draw.randrange(9))
                case _ if len(damaged) > 9:
                    del damaged[at : at + draw.randrange(4)]
        packet = bytes(damaged)
    if draw.random() < 0.2:
        packet = packet[: draw.randrange(len(packet))]
    return packet


def attack(address, packet, draw):
    """One connection: the packet in pieces, perhaps a look at the answer, and one of three endings."""
    with suppress(OSError), socket.create_connection(address, timeout=0.02) as client:
        cuts = sorted(draw.randrange(len(packet) + 1) for _ in range(draw.choice((0, 0, 1, 3))))
        for begin, end in zip([0, *cuts], [*cuts, len(packet)], strict=True):
            client.sendall(packet[begin:end])
        ending = draw.randrange(4)
        if ending == 0:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        elif ending == 1:
            client.shutdown(socket.SHUT_WR)
        if ending:
            client.recv(2**12)


def attack_patiently(address, packet):
    """One connection that stays for a while, and then resets."""
    with suppress(OSError), socket.create_connection(address, timeout=PATIENCE_S) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        client.sendall(packet)
        while client.recv(2**12):
            pass


def attack_all(addresses, num, seed=0, look=lambda: None, num_threads=16):
    """Every packet of the table at every listener, and `num` drawn ones; `look` is called in between."""
    draws = [random.Random(f"{seed} {i}") for i in range(num)]

    def act(draw):
        attack(draw.choice(addresses), drawn(draw), draw)

    for address in addresses:
        for packet in PACKETS.values():
            attack_patiently(address, packet)
        look()
    with ThreadPoolExecutor(num_threads) as threads:
        for begin in range(0, num, 250):
            list(threads.map(act, draws[begin : begin + 250]))
            look()


def answer_s(address):
    """The seconds until a request that means no harm has its answer; infinity if that is wrong."""
    begin = time.monotonic()
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(2**12), b""))
    return time.monotonic() - begin if answer.startswith(b"HTTP/1.1 200") else math.inf


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loop", default="asyncio")
    options = parser.parse_args()
    flags = ["--api-key", KEY, "--admin-port", "0", "--loop", options.loop]
    with started(*flags) as server:
        server.headers = [("authorization", f"Bearer {KEY}")]
        addresses = [("127.0.0.1", port) for port in server.ports]
        longest_s, begin = 0.0, time.monotonic()

        def look():
            nonlocal longest_s
            longest_s = max(longest_s, *map(answer_s, addresses))

        look()
        before = num_descriptors(server)
        attack_all(addresses, options.connections, options.seed, look)
        took_s = time.monotonic() - begin
        is_idle = wait_idle(server, before)
        code = stop(server)
        print(
            f"{options.loop}: {options.connections} drawn connections in {took_s:.0f} s, "
            f"{len(addresses)} listeners; longest wait of another request {longest_s:.2f} s; "
            f"idle again: {is_idle}; exit code after SIGTERM: {code}"
        )
        strange = [line for line in server.lines if "Traceback" in line]
        return bool(longest_s > MAX_WAIT_S or code or strange or not is_idle)


def num_descriptors(server):
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def wait_idle(server, num_before, timeout_s=30.0):
    """True once descriptors and places are back."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        load = json.loads(server.request("GET", "/load", headers=[CLOSE])[2])["server_load"]
        if not load and num_descriptors(server) <= num_before + 2:
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    sys.exit(main())
