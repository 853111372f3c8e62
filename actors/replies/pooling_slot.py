"""The reply slot of a pooling request: one output at the end."""

import numpy as np

from trouper.actors.replies.slot import Slot
from trouper.outputs import Array, PoolingOutput, PoolingRequestOutput, RequestError


class PoolingSlot(Slot[PoolingRequestOutput[PoolingOutput]]):
    """The slot of a pooling request: one output.

    It is filled once, so there is nothing to merge.
    """

    _output: PoolingRequestOutput[PoolingOutput] | None = None
    _is_taken = False

    @property
    def num_unread(self) -> int:
        return int(not self._is_taken)

    def start(self, prompt_token_ids: tuple[int, ...]) -> None:
        """Note the rendered prompt."""
        self._start(prompt_token_ids)

    def write(self, array: Array, error: RequestError | None = None) -> None:
        """Deliver the result.  Later results are ignored.

        The reader is woken.  With `error` the array is empty.
        """
        if self._is_closed or self._over.is_set:
            return
        self._output = PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(array),
            prompt_token_ids=self._prompt_token_ids,
            error=error,
            metrics=self.stats if self._shows_stats else None,
        )
        self._end()
        self._wake_reader()

    def abort(self) -> None:
        self.write(np.empty(0, np.float32), RequestError("aborted", "the request was aborted"))

    def _take_output(self) -> PoolingRequestOutput[PoolingOutput] | None:
        if self._is_taken or self._output is None:
            return None
        self._is_taken = True
        return self._output

    @property
    def _is_ready(self) -> bool:
        return self._output is not None and not self._is_taken
