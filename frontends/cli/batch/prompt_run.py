"""Run many prompts through one engine, and deliver their results or errors in order.

A file may have millions of prompts, so only a window of them is read and open at a time. An invalid prompt must not cost
the results of the others, so its result is its error.
"""

import sys
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread
import typer
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from trouper.errors import (
    ContextLengthError,
    GenerationError,
    TrouperClientError,
    TrouperValidationError,
)
from trouper.frontends.cli import output
from trouper.frontends.cli.batch.prompts import Prompt, PromptSource

if TYPE_CHECKING:
    from tqdm import tqdm

    from trouper.actors.engine.generation import Generation
    from trouper.frontends.python.async_engine import AsyncLLMEngine

# Open prompts, or twice max_num_seqs if that is more.  Finished results wait in the window for earlier ones.
WINDOW = 1024
# Open prompts with images: in memory are up to 16 files of at most 24 MiB, and their arrays.
IMAGE_WINDOW = 16
# Later errors are only counted.
MAX_SHOWN = 10
# Prompts to read at a time. From a pipe it is one, because the next may arrive much later.
CHUNK = 64
# Update the number of tokens in the bar at this interval.
TICK_S = 0.25
# Parameters of errors that concern one text.  Other errors concern the options, and would occur for every text.
ABOUT_TEXTS = ("prompt", "text", "input", "messages", "document")
Item = tuple[Prompt, "Generation[Any] | Exception"]
Open = Callable[[Prompt], "Generation[Any]"]
Finish = Callable[[Prompt, "Generation[Any]"], Awaitable[None]]


class Outcomes:
    """Counts the results of a run, prints its errors, and decides its exit code.

    Errors of single prompts are printed at once, up to a limit, and counted; the exit code is not 0 if any prompt
    failed.
    """

    def __init__(self, what: str, *, is_single: bool, too_long: str = "") -> None:
        """Start with no results.

        Args:
            what: what a prompt is called in messages, for example `texts`.
            is_single: whether there is only one prompt, so that errors need no label.
            too_long: advice to add to the error of an overlong text.
        """
        self._what = what
        self._is_single = is_single
        self._too_long = too_long
        self._is_engines_fault = False
        self.num_prompts = 0
        self.num_failed = 0
        self.num_prompt_tokens = 0
        # Generated tokens.
        self.num_tokens = 0
        self._began = self._ended = 0.0

    def begin(self) -> None:
        self._began = anyio.current_time()

    def end(self) -> None:
        self._ended = anyio.current_time()

    def succeed(self, num_prompt_tokens: int, num_tokens: int = 0) -> None:
        self.num_prompts += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_tokens += num_tokens

    def fail(self, prompt: Prompt, error: Exception) -> str:
        """Count a failed prompt, print its error, and return the message for its record.

        The message of a single prompt has no label.  Errors of the engine itself are remembered for the exit code.
        """
        self.num_prompts += 1
        self.num_failed += 1
        self._is_engines_fault |= not isinstance(error, TrouperClientError)
        message = output.explain(error)[1]
        if self._too_long and isinstance(error, ContextLengthError):
            message = f"{message} {self._too_long}"
        if self._is_single:
            output.complain(message)
        elif self.num_failed <= MAX_SHOWN:
            output.complain(f"{prompt.label}: {message}")
        return message

    def summary(self) -> str:
        """Return the last line of a run, with its numbers of prompts and tokens and its speed."""
        seconds = max(self._ended - self._began, 1e-9)
        total = self.num_prompt_tokens + self.num_tokens
        made = f" and generated {self.num_tokens:,}" if self.num_tokens else ""
        tokens = f"read {self.num_prompt_tokens:,} tokens{made} in {seconds:.1f} s"
        return f"{self.num_prompts} {self._what}: {tokens} ({total / seconds:,.0f} tokens/s)"

    def check(self) -> None:
        """Exit with an error code if any prompt failed."""
        if not self.num_failed:
            return
        if not self._is_single:
            output.complain(f"{self.num_failed} of {self.num_prompts} {self._what} failed")
        raise typer.Exit(output.EXIT_CRASH if self._is_engines_fault else output.EXIT_USAGE)


def is_about_text(error: Exception) -> bool:
    """Return whether an error concerns only one prompt, so that the run can continue with the others."""
    if isinstance(error, TrouperClientError):
        parameter = getattr(error, "parameter", None)
        return parameter is None or str(parameter).startswith(ABOUT_TEXTS)
    return isinstance(error, GenerationError)


class BulkRun:
    """One run over all prompts.

    A reader task opens requests, at most `WINDOW` at a time; a writer delivers their results in order.
    """

    def __init__(
        self,
        prompts: PromptSource,
        open_one: Open,
        finish: Finish,
        note_failure: Callable[[Prompt, Exception], None],
    ) -> None:
        """Prepare a run; `answer_all` starts it.

        Args:
            open_one: creates the request of a prompt.
            finish: reads a request to its end and delivers its results.
            note_failure: records the error of a failed prompt, in the order of the prompts.
        """
        self._prompts = prompts
        self._open_one = open_one
        self._finish = finish
        self._note_failure = note_failure
        self._opened: set[Generation[Any]] = set()

    async def answer_all(self, engine: "AsyncLLMEngine", bar: "tqdm[Any]") -> None:
        """Run all prompts.  Raises the first error that does not concern a single prompt.

        The reader waits if the window is full, so prompts are read no faster than the engine answers.
        """
        error: Exception | None = None
        window = max(WINDOW, 2 * engine.config.scheduler.max_num_seqs)
        if self._prompts.images:
            window = IMAGE_WINDOW
        # The writer holds one more request of the window.
        send, receive = anyio.create_memory_object_stream[Item](window - 1)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(show_tokens, engine, bar, name="progress")
                tasks.start_soon(self._read, send, bar, name="reader")
                try:
                    await self._write(receive, bar)
                except Exception as raised:
                    # Raised after the task group, which would wrap it in an exception group.
                    error = raised
                tasks.cancel_scope.cancel()
        finally:
            receive.close()
            for generation in self._opened:
                generation.close()
        if error is not None:
            raise error

    async def _read(self, send: "MemoryObjectSendStream[Item]", bar: "tqdm[Any]") -> None:
        num_read = 0
        with send:
            async for prompt in Reading(self._prompts):
                num_read += 1
                await send.send((prompt, await self._begun(prompt)))
        # The number of prompts in a pipe is known only now.
        bar.total = num_read

    async def _begun(self, prompt: Prompt) -> "Generation[Any] | Exception":
        if prompt.text is None:
            return TrouperValidationError(prompt.error or "no text")
        try:
            generation = self._open_one(prompt)
            self._opened.add(generation)
            await generation.prepare()
            generation.open()
        except Exception as error:
            # The writer reports it in the order of the prompts.
            return error
        return generation

    async def _write(self, receive: "MemoryObjectReceiveStream[Item]", bar: "tqdm[Any]") -> None:
        async for prompt, generation in receive:
            try:
                if isinstance(generation, Exception):
                    raise generation
                await self._finish(prompt, generation)
            except Exception as error:
                if not is_about_text(error):
                    raise
                self._note_failure(prompt, error)
            if not isinstance(generation, Exception):
                generation.close()
                self._opened.discard(generation)
            bar.update()


class Reading:
    """Iterate over prompts with `async for`; they are read in a thread, because a pipe may block.

    A chunk of prompts is read at once, because each change of threads costs more than parsing a line.
    """

    def __init__(self, prompts: PromptSource) -> None:
        self._items = iter(prompts)
        self._num = 1 if prompts.is_pipe else CHUNK
        self._read: deque[Prompt] = deque()
        self._limiter = anyio.CapacityLimiter(1)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Prompt:
        if not self._read:
            # A read from a pipe cannot be cancelled, so its thread is abandoned when the command ends.
            self._read.extend(
                await anyio.to_thread.run_sync(
                    self._next_chunk, abandon_on_cancel=True, limiter=self._limiter
                )
            )
        if not self._read:
            raise StopAsyncIteration
        return self._read.popleft()

    def _next_chunk(self) -> list[Prompt]:
        return list(islice(self._items, self._num))


async def show_tokens(engine: "AsyncLLMEngine", bar: "tqdm[Any]") -> None:
    """Update the bar with the number of tokens that the engine has computed, until cancelled.

    The rate is the average since the start of the run.  Nothing happens if the bar is hidden.
    """
    if bar.disable:
        return
    began, before = anyio.current_time(), _num_tokens(engine)
    while True:
        await anyio.sleep(TICK_S)
        num_tokens = _num_tokens(engine) - before
        rate = num_tokens / (anyio.current_time() - began)
        bar.set_postfix_str(f"{num_tokens:,} tokens, {rate:,.0f}/s")


def _num_tokens(engine: "AsyncLLMEngine") -> int:
    scheduler = engine.statistics().scheduler
    return scheduler.num_prompt_tokens + scheduler.num_generation_tokens


def note_summary(outcomes: Outcomes, wanted: bool | None, *, is_from_file: bool) -> None:
    """Print the summary if wanted; by default at a terminal, and for a file of prompts.

    It goes to stderr, so that stdout contains results only.
    """
    if wanted or (wanted is None and (is_from_file or output.is_terminal(sys.stderr))):
        print(outcomes.summary(), file=sys.stderr)
