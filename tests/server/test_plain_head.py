"""Which heads of requests are read without h11, and that h11 would read them so."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.frontends.server.http1 import answer_head, plain_head


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n",  # not all of it
        b"GET / HTTP/1.0\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\na: b\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n",
        b"GET /\x80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http://x/ HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n",
        b" GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\rc: d\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1, 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: \xb2\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length:\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close, te\r\n\r\n",
    ],
)
def test_what_is_not_plain_is_left_to_h11(head):
    assert plain_head(head) is None


WORDS = [
    b"GET", b"POST", b"PUT", b" ", b"  ", b"/", b"/a%20b?c=d", b"*", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n", b"\r",
    b"Host", b"content-length", b"Transfer-Encoding", b"connection", b"x-y", b":", b": ", b":\t", b"5", b"0", b"05",
    b"chunked", b"close", b"keep-alive", b"v\xff", b"\x00", b"\x7f", b'"a, b"', b"host: x\r\n", b"content-length: 3\r\n",
    b"connection: Close\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n", b"POST /x HTTP/1.1\r\nHost: y\r\n", b"\r\n\r\n", b"abc",
]  # fmt: skip


SOME = st.lists(st.sampled_from(WORDS), max_size=5).map(b"".join)
BEGINS = (
    b"GET / HTTP/1.1\r\nhost: x\r\n",
    b"POST /x?y HTTP/1.1\r\nHost: y\r\ncontent-length: 3\r\n",
)


@given(st.sampled_from(BEGINS), SOME, st.sampled_from((b"\r\n", b"")), SOME)
def test_what_is_plain_is_what_h11_makes_of_it(begin, more, end, beyond):
    data = begin + more + end + beyond
    head = plain_head(data)
    if head is None:
        return
    theirs = h11.Connection(h11.SERVER)
    theirs.receive_data(data)
    request = theirs.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method, request.target) == (head.method.encode(), head.target)
    assert list(request.headers) == head.headers
    body, due = b"", head.num_body
    while isinstance(event := theirs.next_event(), h11.Data):
        body += event.data
    assert body == data[head.end : head.end + due]
    assert (event is h11.NEED_DATA) == (len(body) < due)
    if event is not h11.NEED_DATA:
        assert (theirs.their_state is h11.MUST_CLOSE) == head.asks_to_close


def test_an_odd_head_takes_no_longer_than_it_is_long():
    for odd in (b" " * 2**16, b"a" * 2**16, b"a: b\r\n" * 2**13, b"a:" + b" " * 2**16 + b"\r\n"):
        assert plain_head(b"GET / HTTP/1.1\r\nhost: x\r\n" + odd + b"\x00") is None


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
def test_no_header_of_an_answer_is_two(value):
    with pytest.raises(ValueError, match="line break"):
        answer_head(200, [(b"x", value)])
