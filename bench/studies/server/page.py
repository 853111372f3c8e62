"""Measure what viewers of the page cost other clients: tokens a second with viewers, over those without.

    python -m trouper.bench.studies.server.page [--streams 64] [--viewers 10] [--turns 6] [--seconds 6]

One server process serves the demo model.  Turns with and without viewers alternate, because the speed of a shared machine drifts,
and the ratio is that of the medians.
"""

import argparse
import http.client
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trouper.bench.serve import local_server
from trouper.bench.studies.server.server_under_test import ServerUnderTest

MEAN_TOKENS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument(
        "--turns", type=int, default=6, help="Number of turns with and without viewers."
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="Seconds of each turn.")
    args = parser.parse_args()
    measure(args.streams, args.viewers, args.turns, args.seconds)


def measure(num_streams: int, num_viewers: int, num_turns: int, seconds: float) -> None:
    """Run the turns, and print the rate of each, then the ratio of the medians."""
    rates: dict[int, list[float]] = {0: [], num_viewers: []}
    is_over = False
    options = ("--max-num-seqs", str(num_streams), "--max-model-len", "1024")
    with local_server(*options) as server:
        under_test = ServerUnderTest(server.port, server.pid)
        under_test.ask_on(num_streams, MEAN_TOKENS, "stream", lambda: is_over)
        under_test.play(seconds)
        for turn in range(2 * num_turns):
            # The order within a pair alternates, so that a drift favours neither.
            count = (0, num_viewers)[(turn + turn // 2) % 2]
            with viewers(server.port, count):
                played = under_test.play(seconds)
            rates[count].append(played.num_tokens / played.seconds)
            print(f"{count} viewers: {rates[count][-1]:.0f} tokens/s")
        is_over = True
        under_test.end()
    ratio = statistics.median(rates[num_viewers]) / statistics.median(rates[0])
    print(f"tokens a second with {num_viewers} viewers / without: {ratio:.3f}")


@contextmanager
def viewers(port: int, count: int) -> Iterator[None]:
    """Read the page's event stream in this many threads until the block ends."""
    calls = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(count)]
    threads = [threading.Thread(target=_read, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for call in calls:
            if call.sock is not None:
                call.sock.shutdown(2)
        for thread in threads:
            thread.join()


def _read(call: http.client.HTTPConnection) -> None:
    try:
        call.request("GET", "/ui/state")
        answer = call.getresponse()
        while answer.readline():
            pass
    except (OSError, http.client.HTTPException):
        # The turn is over.
        pass
    finally:
        call.close()


if __name__ == "__main__":
    main()
