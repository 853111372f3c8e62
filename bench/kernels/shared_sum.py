"""Compare the sum of two ranks in shared memory with gloo's, by two threads of this process.

The second rank repeats the same calls as fast as it can, so it always waits for the first one inside a call. At the end
it makes one more call.
"""

import math
import mmap
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trouper.kernels.codegen.recording import Arena, Recording
from trouper.kernels.cpu.exchange_sizes import ExchangeSizes
from trouper.kernels.cpu.rank_exchange import RankExchange

NUM_RANKS = 2
# The sums of one recorded step, for 32 layers.  The parts are -1, 0 and 1, so the sums are exact in bfloat16.
NUM_SUMS = 64
EPS = 1e-6
TIMEOUT = timedelta(seconds=60)


class Sums:
    """The parts and the results of both ranks.

    Args:
        num_rows: rows of each part, of width `hidden_size`.
    """

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> None:
        shape = num_rows, hidden_size
        self.parts = [torch.randint(-1, 2, shape).to(dtype) for _ in range(NUM_RANKS)]
        self.weight = torch.rand(hidden_size) + 0.5
        self._residuals = [
            torch.zeros_like(part) for part in self.parts
        ]  # recordings keep no input
        self._sizes = ExchangeSizes(NUM_RANKS, self.parts[0].nbytes)
        self._memory = mmap.mmap(-1, self._sizes.num_bytes)

    def recorded(self, rank: int) -> Callable[[], Tensor]:
        """Return a call of `NUM_SUMS` sums, each with residual and norm, on this rank.

        The engine replays its steps in the same form. Nothing runs before the call.
        """
        exchange = RankExchange(rank, self._sizes, self._memory)
        x_TE, y_TE = self._residuals[rank], self.parts[rank]

        def step() -> Tensor:
            z_TE = x_TE
            for _ in range(NUM_SUMS):
                z_TE = exchange.fused_add_norm(x_TE, y_TE, self.weight, eps=EPS)
            return z_TE

        recording = Recording(Arena(), (x_TE, y_TE), step)

        def call() -> Tensor:
            recording.replay()
            exchange.check()
            return recording.result

        return call

    def by_gloo(self, rank: int, store: Any) -> Callable[[], Tensor]:
        """Return a call of one sum by gloo on this rank: no residual, no norm.

        Processes that share no memory use it. The store lets the ranks find each other.
        """
        group: Any = dist.ProcessGroupGloo(store, rank, NUM_RANKS, timeout=TIMEOUT)
        y_TE = torch.empty_like(self.parts[rank])

        def call() -> Tensor:
            y_TE.copy_(self.parts[rank])
            group.allreduce([y_TE]).wait()
            return y_TE

        return call

    def normed_reference(self) -> Tensor:
        """Return the norm of the residual after the first `NUM_SUMS` sums.

        It is computed in float64, and compared with the measured result. All sums have equal inputs.
        """
        x = NUM_SUMS * self.sum_reference()
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight.double()

    def sum_reference(self) -> Tensor:
        return sum((part.double() for part in self.parts), torch.zeros(()))


@contextmanager
def both(make: Callable[[int], Callable[[], Tensor]]) -> Generator[Callable[[], Tensor]]:
    """Yield the first rank's call; the second repeats its own in a thread.

    The ranks wait for each other, so one thread could not measure a sum.
    """
    num_threads = torch.get_num_threads()
    # One thread for each rank, because there are at least as many ranks as cores.
    torch.set_num_threads(1)
    # The calls of the first rank so far, and the total calls of the second.
    num_calls = [0, math.inf]

    def repeat() -> None:
        torch.set_num_threads(1)
        call, done = make(1), 0
        while done < num_calls[1]:
            call()
            done += 1

    other = threading.Thread(target=repeat, daemon=True)
    try:
        other.start()
        call = make(0)

        def counted() -> Tensor:
            num_calls[0] += 1
            return call()

        yield counted
        # The other rank may have begun this call already.
        num_calls[1] = num_calls[0] + 1
        counted()
        other.join()
    finally:
        torch.set_num_threads(num_threads)
