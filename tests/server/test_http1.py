"""HTTP/1.1 for plain requests, beside h11, and what a full house says at once; over sockets."""

import re
import socket

import pytest
import trio
import trio.testing
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from trouper.frontends.server import http1
from trouper.frontends.server.connections import SLACK_S, Connection
from trouper.frontends.server.http.exchange import Answer
from trouper.frontends.server.http1 import MAX_UNREAD

from .test_connections import answer, house_of, pair

pytestmark = pytest.mark.trio
POST = b"POST /x?y=1 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
GET = b"GET /g HTTP/1.1\r\nhost: x\r\n\r\n"
END = 1000  # more answers than there are: what is waited for is the end
LAST_POST = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
LAST = b"GET /g HTTP/1.1\r\nhost: x\r\nConnection: close\r\n\r\n"


async def echo(scope, receive, send):
    """Says what was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    await answer(scope, receive, send, scope["path"].encode() + b":" + body)


async def played(app, *pieces, bodies=1, **options):
    """(status, body) of so many answers, or of all until the end."""
    found, is_open = await heard(
        app, *pieces, is_enough=lambda found: len(split(found)) >= bodies, **options
    )
    return split(found), is_open


async def heard(app, *pieces, is_enough=lambda found: False, **options):
    """What a client reads that sends these pieces one after the other, until it is enough or the end has come."""
    client, stream = pair()
    client.setblocking(False)
    found = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(house_of(app, **options), stream).run)
        for piece in pieces:
            await trio.testing.wait_all_tasks_blocked()
            client.sendall(piece)
        with trio.fail_after(10):
            while not is_enough(found):
                await trio.lowlevel.wait_readable(client)
                piece = client.recv(2**16)
                if not piece:
                    break
                found += piece
        await trio.testing.wait_all_tasks_blocked()
        is_open = stream.socket.fileno() != -1
        client.close()
    return found, is_open


def split(found):
    """(status, body) of each whole answer."""
    answers = []
    while b"\r\n\r\n" in found:
        head, _, found = found.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head).group(1))
        if len(found) < length:
            break
        answers.append((int(head[9:12]), found[:length]))
        found = found[length:]
    return answers


@pytest.mark.parametrize(
    ("pieces", "answers"),
    [
        ([GET], [(200, b"/g:")]),
        ([POST % 3 + b"abc"], [(200, b"/x:abc")]),
        ([POST % 3, b"abc"], [(200, b"/x:abc")]),
        ([POST % 3, b"a", b"bc", GET], [(200, b"/x:abc"), (200, b"/g:")]),
        ([POST % 3 + b"abc" + POST % 2 + b"de", GET], [(200, b"/x:abc"), (200, b"/x:de"), (200, b"/g:")]),
        ([POST % 3 + b"a", b"bc" + GET], [(200, b"/x:abc"), (200, b"/g:")]),
        ([GET[:20], GET[20:], GET], [(200, b"/g:")] * 2),  # h11's, and ours again
        ([GET + GET[:20], GET[20:] + GET], [(200, b"/g:")] * 3),
        (
            [b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n", b"0\r\n\r\n", GET],
            [(200, b"/c:a"), (200, b"/g:")],
        ),
    ],
)  # fmt: skip
async def test_one_request_after_another_in_whatever_pieces(pieces, answers):
    assert await played(echo, *pieces, bodies=len(answers)) == (answers, True)


@pytest.mark.parametrize("length", [[], [(b"content-length", b"0")]])
@pytest.mark.parametrize(
    ("request_", "options", "head"),
    [
        (GET, {"keep_alive_max_requests": 1}, ()),
        (GET, {}, [(b"connection", b"close")]),
        (LAST, {}, ()),
        (LAST, {}, [(b"connection", b"close")]),
    ],
)
async def test_the_last_answer_of_a_connection_says_so_once(request_, options, head, length):
    async def app(scope, receive, send):
        headers = [*length, *head]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    found, is_open = await heard(app, request_, **options)
    assert (found.count(b"HTTP/1.1 200"), is_open) == (1, False)
    assert found.count(b"connection: close\r\n") == 1


@pytest.mark.parametrize("head", [(), ((b"connection", b"close"),)])
async def test_the_last_refusal_of_a_connection_says_so_once(head):
    class App:
        def greet(self, scope):
            return Answer(503, head, b"full")

    found, is_open = await heard(App(), LAST)
    assert found.count(b"connection: close\r\n") == 1
    assert not is_open


@pytest.mark.parametrize("refuses", [False, True])
async def test_who_asks_for_the_last_time_is_left_with_his_answer(refuses):
    app = Full() if refuses else echo
    expected = (503, b"full") if refuses else (200, b"/g:")
    assert await played(app, GET + LAST + GET, bodies=3) == ([expected] * 2, False)


@pytest.mark.parametrize("refuses", [False, True])
async def test_nothing_is_read_behind_the_last_answer(refuses):
    asked = []

    class App:
        def greet(self, scope):
            if refuses:
                asked.append(scope["path"])
            return Answer(503, ((b"connection", b"close"),), b"") if refuses else None

        async def __call__(self, scope, receive, send):
            asked.append(scope["path"])
            head = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 503, "headers": head})
            await send({"type": "http.response.body"})

    assert await played(App(), GET + GET, bodies=2) == ([(503, b"")], False)
    assert asked == ["/g"]


@pytest.mark.parametrize("body", [b"", b"no", b"much too long"])
async def test_an_answer_of_another_length_than_it_says_is_the_last(body):
    async def app(scope, receive, send):
        head = [(b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if body:
            await send({"type": "http.response.body", "body": body})

    _, is_open = await played(app, GET, bodies=2)
    assert not is_open


async def test_an_application_that_fails_is_an_answer(caplog):
    async def app(scope, receive, send):
        raise ValueError("told to")

    assert await played(app, GET) == ([(500, b"")], True)
    assert "told to" in caplog.text


@pytest.mark.parametrize("size", [3, 2**22])
@pytest.mark.parametrize("head", [(), [(b"connection", b"close")]])
async def test_what_a_cancelled_handler_says_is_said_to_its_end(size, head):
    async def app(scope, receive, send):
        with trio.CancelScope() as cancelled:
            cancelled.cancel()
            length = (b"content-length", str(size).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [length, *head]})
            await send({"type": "http.response.body", "body": b"x" * size})

    answers, is_open = await played(app, GET)
    assert answers == [(200, b"x" * size)]
    assert is_open == (not head)


async def test_what_a_slow_handler_has_not_asked_for_stays_in_the_kernel():
    may_go_on = trio.Event()

    async def app(scope, receive, send):
        await may_go_on.wait()
        await echo(scope, receive, send)

    client, stream = pair()
    body = b"x" * 2**20
    await trio.to_thread.run_sync(client.settimeout, 0.0)
    client.sendall(POST % (64 * len(body)))
    sent = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(house_of(app), stream).run)
        while True:
            await trio.testing.wait_all_tasks_blocked()
            try:
                sent += client.send(body)
            except BlockingIOError:
                break
        assert sent < 32 * len(body)
        client.close()
        may_go_on.set()


async def test_who_leaves_is_noticed_behind_what_he_sent():
    seen = []
    met = trio.Event()

    async def app(scope, receive, send):
        met.set()
        while not seen or seen[-1] != "http.disconnect":
            seen.append((await receive())["type"])
        assert (await receive())["type"] == "http.disconnect"

    client, stream = pair()
    client.sendall(POST % 3 + b"ab")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(house_of(app), stream).run)
        await met.wait()
        client.shutdown(socket.SHUT_WR)
    client.close()
    assert seen == ["http.request", "http.disconnect"]


class Full:
    """A house that takes nobody."""

    def greet(self, scope):
        return Answer(503, ((b"retry-after", b"1"),), b"full")

    async def __call__(self, scope, receive, send):
        raise AssertionError("nobody comes in")


@pytest.mark.parametrize(
    ("pieces", "num_answers", "stays"),
    [
        ([POST % 3 + b"abc"] * 3, 3, True),
        ([POST % 3, b"abc", GET], 2, True),  # the body comes when the answer is out
        ([POST % MAX_UNREAD, b"x" * MAX_UNREAD, GET], 2, True),
        ([POST % (MAX_UNREAD + 1), b""], 1, False),
        ([GET + GET + POST % 3 + b"abc"], 3, True),
        ([LAST_POST % 3, b""], 1, True),  # he is still speaking
        ([LAST_POST % 3, b"abc"], 1, False),
        ([LAST_POST % 3, b"ab", b"c" + GET], 1, False),
        ([LAST_POST % (MAX_UNREAD + 1), b""], 1, False),
    ],
)
async def test_who_is_refused_at_once_may_ask_again(pieces, num_answers, stays):
    answers, is_open = await played(Full(), *pieces, bodies=num_answers if stays else END)
    assert answers == [(503, b"full")] * num_answers
    assert is_open == stays


async def test_who_was_let_in_is_served_even_when_the_connection_ends_in_that_moment():
    happened = []

    class Greeter:
        def greet(self, scope):
            happened.append("let in")
            scope_of_all.cancel()

        async def __call__(self, scope, receive, send):
            happened.append("called")
            await receive()
            raise AssertionError("it was cancelled")

    client, stream = pair()
    client.sendall(POST % 3 + b"abc")
    with trio.CancelScope() as scope_of_all:
        await Connection(house_of(Greeter()), stream).run()
    client.close()
    assert happened == ["let in", "called"]


async def test_who_is_refused_and_idle_is_left_in_time(autojump_clock):
    client, stream = pair()
    client.sendall(POST % 3)
    begin = trio.current_time()
    await Connection(house_of(Full(), keep_alive_timeout=7.0), stream).run()
    assert trio.current_time() - begin == 7.0 + SLACK_S
    client.close()


async def test_who_asks_again_has_the_whole_time_anew(autojump_clock):
    client, stream = pair()
    client.setblocking(False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(house_of(echo, keep_alive_timeout=7.0), stream).run)
        for pause_s in (0.1, 0.1, 6.9, 0.2):
            await trio.sleep(pause_s)
            client.sendall(GET)
            await trio.lowlevel.wait_readable(client)
            assert client.recv(4096)
            answered_at = trio.current_time()
    assert 7.0 <= trio.current_time() - answered_at <= 7.0 + SLACK_S
    client.close()


async def test_the_date_is_that_of_the_second(monkeypatch):
    seconds = [1_000_000_000.2]
    monkeypatch.setattr(http1.time, "time", lambda: seconds[0])
    monkeypatch.setattr("hypercorn.config.time", lambda: seconds[0])
    shared = http1.Shared(None, lambda _: None, Config(), WorkerContext(None))
    dates = []
    for later_s in (0.0, 0.7, 0.2, 60.0):
        seconds[0] += later_s
        dates.append(dict(shared.fields())[b"date"][-12:])
    assert dates == [b"01:46:40 GMT", b"01:46:40 GMT", b"01:46:41 GMT", b"01:47:41 GMT"]
