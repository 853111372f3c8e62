"""The clients of the bench: what they count, and what they do when a connection ends."""

import socket
import threading
from collections import Counter
from time import perf_counter

import pytest

from trouper.bench.studies.server.callers import END, Callers, Wire
from trouper.bench.studies.server.overload import _calm, total
from trouper.bench.studies.server.server_under_test import TimedTurn

HEAD = b"HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\n\r\n"
FRAMES = b"".join(b'c\r\ndata: {"a": %d}\n\n\r\n' % i for i in range(3))
STREAM = HEAD + FRAMES[:-3] + END
WHOLE = b"HTTP/1.1 503 \r\ncontent-length: 10\r\nx: y\r\n\r\ndata: {abc"


MARKED = b"HTTP/1.1 200 \r\ncontent-length: 22\r\n\r\n" + b"an item, and one item "


@pytest.mark.parametrize(
    ("answer", "num", "mark"),
    [(STREAM, 3, None), (STREAM, 3, b"x"), (WHOLE, 0, None), (MARKED, 2, b" item")],
)
def test_frames_are_counted_however_an_answer_is_cut(answer, num, mark):
    for first in range(1, len(answer)):
        for second in range(first, len(answer), 7):
            wire, found = Wire(mark), 0
            pieces = [answer[:first], answer[first:second], answer[second:]]
            for piece in filter(None, pieces):
                assert not wire.is_whole
                found += wire.read(piece)
            assert wire.is_whole
            assert found == num
            wire.socket.close()


def test_connection_closed_while_it_was_idle_is_no_error():
    ended = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            for _ in range(2):
                client, _ = listener.accept()
                with client:
                    client.recv(1000)
                    client.sendall(WHOLE)

        server = threading.Thread(target=serve)
        server.start()
        callers = Callers(listener.getsockname()[1])
        for num in (1, 2):
            callers.call(b"x", "one", ended.append)
            callers.run_until(perf_counter() + 20, lambda num=num: len(ended) == num)
        server.join()
        callers.close()
    assert [call.outcome for call in ended] == ["503", "503"]
    assert callers.num_connections == 2


def test_turns_are_one():
    turn = TimedTurn(2.0, {"a": 4}, Counter({"200": 1}), Counter({0.1: 1}), 5, 0.5, 1.0)
    other = TimedTurn(2.0, {"b": 4}, Counter({"503": 1}), Counter({0.1: 2}), 5, 0.5, 1.0)
    both = total([turn, other]).figures()
    assert both["tokens_s"] == {"a": 1.0, "b": 1.0}
    assert both["requests"] == {"200": 1, "503": 1}
    assert both["cores"] == {"server": 0.5, "clients": 0.25}


def test_turn_is_compared_with_calm_ones_around_it_by_nearness():
    rates = [30.0, 0.0, 0.0, 60.0, 0.0, 0.0, 0.0]
    assert [_calm(rates, i) for i in (1, 2, 4, 5)] == [40.0, 50.0, 40.0, 20.0]
