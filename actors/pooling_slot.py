"""The reply slot of a pooling request: one output, at the end."""

from collections.abc import Callable

import anyio
import numpy as np

from trouper.actors.admission import Prefills
from trouper.actors.loop import Event
from trouper.actors.slot import Slot
from trouper.outputs import RequestError
from trouper.pooling_outputs import Array, PoolingOutput, PoolingRequestOutput


class PoolingSlot(Slot[PoolingRequestOutput[PoolingOutput]]):
    def __init__(
        self,
        request_id: str,
        *,
        prefills: Prefills | None = None,
        shows_stats: bool = True,
        new_event: Callable[[], Event] = anyio.Event,
    ) -> None:
        super().__init__(
            request_id, 1, prefills=prefills, shows_stats=shows_stats, new_event=new_event
        )
        self._output: PoolingRequestOutput[PoolingOutput] | None = None
        self._is_taken = False

    @property
    def num_unread(self) -> int:
        return int(not self._is_taken)

    def start(self, prompt_token_ids: tuple[int, ...]) -> None:
        """The prompt is rendered."""
        self._start(prompt_token_ids)

    def write(self, array: Array, error: RequestError | None = None) -> None:
        """The result; only the first one counts."""
        if self._is_closed or self.is_over:
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
