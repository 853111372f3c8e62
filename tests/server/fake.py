"""A server that answers one way, whatever it is asked, and may break off."""

import json
import socketserver
import threading
from contextlib import contextmanager

MODELS = b'{"data": [{"id": "fake"}]}'


def response(body, status="200 OK", kind="application/json"):
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def error(status, message="not today"):
    return response(json.dumps({"error": {"message": message, "code": "x"}}).encode(), status)


def events(*frames, is_whole=True):
    """A stream of these frames; not whole, the connection breaks before the end of its last chunk."""
    body = "".join(f"data: {frame}\n\n" for frame in frames).encode()
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return head + b"%x\r\n%b\r\n" % (len(body), body) + (b"0\r\n\r\n" if is_whole else b"")


def chunk(text=None, finish_reason=None):
    return json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]})


def is_complete(answer):
    """Return whether a client can see where this answer ends, so that it may use the connection again."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    return f"content-length: {len(body)}\r\n".encode() in head + b"\r\n"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        try:
            self._answer()
        except OSError:
            pass  # the client has left

    def _answer(self):
        while head := self.rfile.readline():
            headers = {}
            while (line := self.rfile.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            length = int(headers.get("content-length", 0))
            body = self.rfile.read(length)
            self.server.asked.append((head.decode().split()[:2], headers, body))
            if head.startswith(b"GET"):
                self.wfile.write(self.server.models)
            else:
                self.wfile.write(self.server.answer)
                if self.server.hold:
                    self.rfile.read()  # until the client leaves
                if not is_complete(self.server.answer):
                    return  # the connection ends with it


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    hold = False  # whether an answer is left open behind its last byte


@contextmanager
def serving(answer, models=None):
    """`.url` is where it is; `.asked` holds (method and path, headers, body) of each request."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.answer, server.models = answer, models or response(MODELS)
        server.asked = []
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
