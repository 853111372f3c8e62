"""Bytes that no proper client would send: name -> (row, the bytes).  All are answered with 4xx, or the connection closes."""

GREETINGS = {
    "binary": ("B48", bytes(range(256))),
    "tls": ("B48", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
    "pickle": ("B48", b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94."),
    "zmq": ("B48", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)),
    "both lengths": (
        "B48",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /is_paused HTTP/1.1\r\nhost: x\r\n\r\n",
    ),
    "a coding beside chunks": (
        "B48",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    ),
    "a key in a trailer": (
        "B06",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\nauthorization: Bearer sesame\r\n\r\n",
    ),
    "path of 1 MiB": ("B04", b"GET /" + b"v" * 2**20 + b" HTTP/1.1\r\nhost: x\r\n\r\n"),
    "no such verb": ("B05", b"BREW /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n"),
    "no host": ("B05", b"GET /v1/models HTTP/1.1\r\n\r\n"),
    "absolute form": (
        "B05",
        b"GET http://x/../pause HTTP/1.1\r\nhost: a/b?c\r\nconnection: close\r\n\r\n",
    ),
    "websocket": (
        "B49",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    ),
    "body of 33 MiB": (
        "B02",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 34603008\r\n\r\n",
    ),
    "half a head": ("B03", b"GET /v1/models HTT"),
}
