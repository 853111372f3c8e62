"""Run a vision tower a slice at a time, so that running streams continue while a large image is encoded.

The tower is code of transformers and cannot be left in the middle, so it runs on a thread of its own.  This thread and the device's
thread never compute at the same time: one of them waits while the other one works.

Laws.
1. A slice ends at the first `pause` behind its deadline, and every slice reaches the next `pause` at least.
2. One item is encoded at a time, from its begin to its end.  The tower's forward pass is not entered twice.
3. Slices change no bit of a result: layers compute the tiles of an image, and products compute rows, independently of each other.
"""

import threading
import time
from collections.abc import Callable
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn

from trouper.kernels.linear import LinearMethod

# Multiplications and additions between two points at which a product may stop: 11 ms at the 380 GFLOP/s of two cores.
PIECE_OPERATIONS = 4 * 2**30


class AbandonedError(BaseException):
    """Raised at a pause, in the thread of a result no longer needed."""


class Slices:
    """The pauses of one tower, and the work that may stop there."""

    def __init__(self) -> None:
        self._work: SlicedWork | None = None

    def begin(self, function: Callable[[], Tensor]) -> "SlicedWork":
        """Prepare to run a function on a thread of its own.  It must be the only one until it has ended or is abandoned."""
        assert self._work is None or self._work.has_ended
        self._work = SlicedWork(function)
        return self._work

    def pause(self) -> None:
        """Stop here if the time of the slice is over.  Does nothing in other threads."""
        work = self._work
        if work is not None and threading.current_thread() is work.thread:
            work.pause()


class SlicedWork:
    """A function that runs for a slice of time whenever it is asked to go on.

    Args:
        function: called on a thread of its own, in inference mode.
    """

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self._num_threads = torch.get_num_threads()
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._deadline = 0.0
        self._is_abandoned = False
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self.has_ended = False
        # A daemon, since the process may end while an image is half encoded.
        self.thread = threading.Thread(target=self._run, name="trouper-tower", daemon=True)

    def advance(self, seconds: float) -> bool:
        """Go on for about this time, and return whether the function has ended."""
        if self.has_ended:
            return True
        if self.thread.ident is None:
            self.thread.start()
        self._deadline = time.monotonic() + seconds
        self._may_go.release()
        self._has_stopped.acquire()
        if self.has_ended:
            # The thread's end gives its OpenMP team back, which would slow that of the device down.
            self.thread.join()
        return self.has_ended

    def result(self) -> Tensor:
        """Return what the function returned.

        Raises:
            BaseException: what the function raised.
        """
        if self._error is not None:
            raise self._error
        assert self._result is not None, "it has ended"
        return self._result

    def abandon(self) -> None:
        """End the thread at the pause where it waits.  Idempotent."""
        self._is_abandoned = True
        if self.thread.ident is None:
            self.has_ended = True
        self.advance(0.0)

    @property
    def has_failed(self) -> bool:
        """Whether the function has raised an error, which `result` raises again."""
        return self._error is not None

    def pause(self) -> None:
        """Wait here for the next slice if the deadline of this one is over.  Called by the function."""
        if time.monotonic() < self._deadline:
            return
        self._has_stopped.release()
        self._may_go.acquire()
        if self._is_abandoned:
            raise AbandonedError

    def _run(self) -> None:
        self._may_go.acquire()
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode():
                self._result = self._function()
        except BaseException as error:  # noqa: ASYNC103  # a thread: it belongs to the caller of `result`
            self._error = error
        self.has_ended = True
        self._has_stopped.release()


class SlicedLinear(nn.Module):
    """A linear layer that pauses before it computes, and between groups of rows.

    Args:
        method: computes products, with a bias if there is one.
        weight: is shown to code that asks a layer for its weight.
    """

    def __init__(self, method: LinearMethod, weight: Tensor, slices: Slices) -> None:
        super().__init__()
        self.weight, self.bias = weight, method.bias
        self.out_features, self.in_features = method.shape
        self._method, self._slices = method, slices
        self._num_rows = max(1, PIECE_OPERATIONS // (2 * max(1, prod(method.shape))))

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b for rows x of any leading dimensions."""
        self._slices.pause()
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if len(rows) <= self._num_rows:
            return self._method.apply(rows).view(*x.shape[:-1], self.out_features)
        y = x.new_empty((len(rows), self.out_features))
        num_pieces = -(-len(rows) // self._num_rows)
        # Pieces of one size, since a product of few rows is slower for each of them.
        size = -(-len(rows) // num_pieces)
        for begin in range(0, len(rows), size):
            if begin:
                self._slices.pause()
            self._method.apply_into(rows[begin : begin + size], y[begin : begin + size])
        return y.view(*x.shape[:-1], self.out_features)


def slice_layers(model: nn.Module, slices: Slices) -> None:
    """Let the layers of a tower compute one tile after the other, with a pause before each.

    The library gives all tiles of an image to a layer at once, which takes seconds.
    """
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    for layer in max(lists, key=len, default=()):
        cast("Any", layer).forward = _by_tile(layer.forward, slices)


def _by_tile(forward: Callable[..., Any], slices: Slices) -> Callable[..., Any]:
    def by_tile(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        num_tiles = len(hidden) if hidden.dim() == 3 else 1

        def part(value: Any, i: int) -> Any:
            # Only masks have four dimensions; positions are the same for all tiles.
            is_mask = isinstance(value, Tensor) and value.dim() == 4 and len(value) == num_tiles
            return value[i : i + 1] if is_mask else value

        found: list[Any] = []
        for i in range(num_tiles):
            slices.pause()
            # The embedding of patches may return columns, which would slow down every layer.
            tile = hidden[i : i + 1].contiguous() if hidden.dim() == 3 else hidden
            given = {name: part(value, i) for name, value in kwargs.items()}
            found.append(forward(tile, *(part(value, i) for value in args), **given))
        if num_tiles == 1:
            return found[0]
        if isinstance(found[0], Tensor):
            return torch.cat(found)
        first, *rest = zip(*found, strict=True)
        return torch.cat(first), *(values[0] for values in rest)

    return by_tile
