"""What clients do, and the record of what they got."""

from abc import ABC, abstractmethod
from typing import Any

import anyio
import trio

from trouper.actors.engine.generation import Generation
from trouper.actors.engine.lifecycle import EngineState
from trouper.actors.engine.wiring import Engine
from trouper.actors.messages.requests import RequestId, RequestOptions
from trouper.errors import DeviceStartError, EngineDeadError, RetryableRequestError
from trouper.outputs import CompletionOutput, RequestOutput
from trouper.params import RepetitionDetectionParams, RequestOutputKind, SamplingParams

from .ports import InjectedError
from .scenario import STEP_S, Client, Operation


class Broken(AssertionError):
    """An oracle is violated."""


class Completion:
    """One of the n completions, as its reader sees it."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class Story(ABC):
    """One client's request, from its arrival to its end."""

    def __init__(self, index: int, client: Any) -> None:
        self.index = index
        self.client = client
        self.id: RequestId | None = None  # none: never opened
        self.slot: Any = None
        self.prompt: tuple[int, ...] | None = None
        self.was_aborted = False  # by another client, while it was open
        self.has_left = False
        self.is_finished = False  # it got its final output
        self.error: Exception | None = None
        self.is_over = False  # the client is gone
        self.ended_at_plan: int | None = None  # number of plans made when it ended
        self.reads_since: float | None = None  # waits for an output since then

    def __repr__(self) -> str:
        return (
            f"<Case {self.index} {self.client.request_id} id={self.id} {self.error or self.ends}>"
        )

    @property
    def is_open(self) -> bool:
        return self.slot is not None and not self.slot.is_closed

    @property
    @abstractmethod
    def ends(self) -> Any:
        """How it ended, so far."""

    @property
    def ids(self) -> set[int]:
        """Of its sequences."""
        return set() if self.id is None else set(range(self.id, self.id + self.client.wish.n))

    @property
    @abstractmethod
    def told(self) -> Any:
        """What it was told, so far."""

    @property
    @abstractmethod
    def is_unfinished(self) -> bool:
        """The engine still owes it something."""

    @abstractmethod
    def ask(self, engine: Engine) -> Generation[Any]:
        """Make the request, unopened."""

    @abstractmethod
    def take(self, output: Any) -> list[tuple[int, int]]:
        """Merge one output; answer the (index, position) of the first new token of each completion."""


class Case(Story):
    """A generation."""

    def __init__(self, index: int, client: Client) -> None:
        super().__init__(index, client)
        self.completions = [Completion() for _ in range(client.wish.n)]
        self.prompt_logprobs: list[Any] | None = None
        self.num_cached: int | None = None
        self.num_late_plans = 0

    @property
    def ends(self) -> list[str | None]:
        return [completion.finish_reason for completion in self.completions]

    @property
    def is_unfinished(self) -> bool:
        return self.slot._num_open > 0

    @property
    def told(self) -> Any:
        return [completion.token_ids for completion in self.completions]

    def ask(self, engine: Engine) -> Generation[Any]:
        wish = self.client.wish
        prompt: Any = wish.prompt
        if wish.salt is not None:
            key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
            prompt = {key: prompt, "cache_salt": wish.salt}
        return engine.generate(
            prompt,
            params_of(self.client),
            self.client.request_id,
            RequestOptions(priority=wish.priority, arrival_time=anyio.current_time()),
        )

    def take(self, output: RequestOutput) -> list[tuple[int, int]]:
        kind = self.client.wish.output_kind
        if self.is_finished:
            raise Broken(f"{self}: an output after the final one")
        if output.request_id != self.client.request_id:
            raise Broken(f"{self}: the output of {output.request_id}")
        if output.prompt_token_ids:  # none: aborted before it was rendered
            self.prompt = tuple(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = list(output.prompt_logprobs)
        if output.num_cached_tokens is not None:
            self.num_cached = output.num_cached_tokens
        news: list[tuple[int, int]] = []
        for completion in output.outputs:
            num_before = self._take_one(completion, kind == RequestOutputKind.DELTA)
            mine = self.completions[completion.index]
            if len(mine.token_ids) > num_before:
                news.append((completion.index, num_before))
        self.is_finished = output.finished
        is_done = all(c.finish_reason is not None for c in self.completions)
        if output.finished != is_done:
            raise Broken(f"{self}: finished={output.finished}")
        return news

    def _take_one(self, new: CompletionOutput, is_delta: bool) -> int:
        mine = self.completions[new.index]
        num_before = len(mine.token_ids)
        if mine.finish_reason is not None:
            raise Broken(f"{self}: completion {new.index} goes on after its end")
        token_ids = mine.token_ids + new.token_ids if is_delta else list(new.token_ids)
        text = mine.text + new.text if is_delta else new.text
        logprobs = mine.logprobs + (new.logprobs or []) if is_delta else list(new.logprobs or ())
        if token_ids[:num_before] != mine.token_ids or not text.startswith(mine.text):
            raise Broken(f"{self}: completion {new.index} takes back what it said")
        mine.token_ids, mine.text, mine.logprobs = token_ids, text, logprobs
        mine.finish_reason, mine.stop_reason = new.finish_reason, new.stop_reason
        return num_before


def params_of(client: Client) -> SamplingParams:
    wish = client.wish
    return SamplingParams(
        n=wish.n,
        temperature=wish.temperature,
        seed=wish.seed,
        max_tokens=wish.max_tokens,
        min_tokens=wish.min_tokens,
        stop=list(wish.stop),
        include_stop_str_in_output=wish.include_stop,
        stop_token_ids=list(wish.stop_token_ids),
        ignore_eos=wish.ignore_eos,
        logprobs=wish.logprobs,
        prompt_logprobs=wish.prompt_logprobs,
        output_kind=RequestOutputKind(wish.output_kind),
        stream_interval=wish.stream_interval,
        repetition_detection=None
        if wish.repetition is None
        else RepetitionDetectionParams(
            max_pattern_size=wish.repetition[0], min_count=wish.repetition[1]
        ),
    )


async def play(world: Any, engine: Engine, case: Story) -> None:
    """One client, from arrival to end.  `world` hears of everything that happens."""
    client = case.client
    await anyio.sleep(client.arrival_s)
    patience_s = float("inf") if client.patience_s is None else client.patience_s
    try:
        with anyio.move_on_after(patience_s) as scope:
            world.begin(case, trio.lowlevel.current_task(), scope)
            await _read(world, case, case.ask(engine))
    except Broken:
        raise
    except Exception as error:
        case.error = error
    finally:
        # Cancelled, or gone before the end.
        case.has_left = not case.is_finished and case.error is None
        case.reads_since = None
        world.end(case)


async def _read(world: Any, case: Story, generation: Generation[Any]) -> None:
    client = case.client
    if client.style == "bare":
        case.reads_since = anyio.current_time()
        async for output in generation:
            world.took(case, output)
            case.reads_since = anyio.current_time()
        case.reads_since = None
        return
    async with generation as stream:
        num_outputs = 0
        while client.leaves_after != num_outputs:
            case.reads_since = anyio.current_time()
            try:
                output = await anext(stream)
            except StopAsyncIteration:
                break
            world.took(case, output)
            case.reads_since = None
            num_outputs += 1
            if client.pause_s:
                await anyio.sleep(client.pause_s)


async def abort_later(engine: Engine, case: Story) -> None:
    """Somebody else ends the request, by the name that its client gave it."""
    client = case.client
    assert client.aborted_at_s is not None
    await anyio.sleep(client.arrival_s + client.aborted_at_s)
    if client.aborted_at_s:
        engine.abort(client.request_id)
    else:
        engine.abort([client.request_id, "nobody", client.request_id])


async def operate(world: Any, engine: Engine, operations: tuple[Operation, ...]) -> None:
    """Pause, sleep and reset, one after the other; at the end everything is awake again."""
    try:
        for operation in operations:
            await anyio.sleep(operation.after_s)
            with anyio.move_on_after(operation.patience_s or float("inf")):
                await _operate(world, engine, operation)
            await _wake_up(world, engine)
    except EngineDeadError as error:
        world.check_death(error)


async def _operate(world: Any, engine: Engine, operation: Operation) -> None:
    try:
        match operation.kind:
            case "reset":
                await engine.controls.reset_prefix_cache(preempt=operation.preempt)
            case "paused":
                async with engine.controls.paused(operation.mode, clear_cache=operation.level > 0):
                    with world.frozen():
                        await anyio.sleep(operation.hold_s)
            case "sleep":
                await engine.controls.sleep(operation.level, operation.mode)
                with world.frozen():
                    await anyio.sleep(operation.hold_s)
                if operation.tags is not None:
                    await engine.controls.wake(operation.tags)
                    await anyio.sleep(operation.hold_s)
    except (InjectedError, RetryableRequestError, DeviceStartError):
        pass  # the device refused, or was lost; waking up is tried again


async def _wake_up(world: Any, engine: Engine) -> None:
    with anyio.CancelScope(shield=True):
        while engine.dead_error is None and engine.lifecycle.state is not EngineState.STOPPED:
            try:
                if await engine.controls.wake():
                    break
            except (InjectedError, DeviceStartError):
                pass
            except RetryableRequestError:
                await anyio.sleep(STEP_S)  # the device is being started again
