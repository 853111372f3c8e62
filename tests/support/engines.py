"""Run a whole engine on a simulated device in virtual time, for tests of one behaviour at a time."""

from contextlib import asynccontextmanager

import anyio.lowlevel
import trio

from tests.simulation.simulated_device import Conditions, SimulatedDevice, simulated_tokens
from trouper.actors.engine.wiring import open_engine
from trouper.actors.messages.steps import DeviceLost, Sampling
from trouper.config.engine_config import EngineConfig, SchedulerConfig
from trouper.config.model import ModelConfig
from trouper.errors import RetryableRequestError

VOCAB_SIZE = 97
STEP_S = 0.01


class InlineThreads:
    """Run work immediately instead of in a thread, because nothing may block in virtual time."""

    async def run(self, function, *args):
        await anyio.lowlevel.checkpoint()
        return function(*args)


class Losable:
    """Make a simulated device lose its workers and get them back, in trio's virtual time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls, self.refused, self.hangs = [], set(), set()
        self._events = []
        self.num_steps = 0

    async def receive(self):
        with trio.CancelScope() as waiting:
            self._waiting = waiting
            if not self._events:
                done = await super().receive()
                self.num_steps += 1
                return done
        event = self._events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    def tell(self, event):
        if isinstance(event, DeviceLost):
            self.drop_plans()
            self._forget()
        self._events.append(event)
        self._waiting.cancel()

    async def call(self, action):
        method = action.name
        self.calls.append(method)
        if method in self.hangs:
            await trio.sleep_forever()
        if method in self.refused:
            raise RetryableRequestError("the device is being started again", "device_restarting")
        return await super().call(action) if method in ("sleep", "wake", "probe") else None


def engine_config(**scheduler) -> EngineConfig:
    model = ModelConfig(
        path="", name="simulated", architecture="Simulated", hf_config={}, vocab_size=VOCAB_SIZE,
        max_position_embeddings=256, dtype="float32", eos_token_ids=(), default_sampling={},
    )  # fmt: skip
    return EngineConfig(
        model=model, tokenizer=None, dtype="float32", load_format="auto", seed=0, max_model_len=256,
        max_logprobs=20, renderer_num_workers=2, block_size=4, num_blocks=None, kv_cache_bytes=0,
        stream_interval=1, chat_template=None, shutdown_timeout_s=0.0, max_num_queued_reqs=None,
        max_num_queued_tokens=None, log_stats=True,
        scheduler=SchedulerConfig(
            **{"max_model_len": 256, "max_num_seqs": 8, "max_num_active_seqs": 8,
               "max_num_scheduled_tokens": 32, "max_steps_in_flight": 2, **scheduler}
        ),
    )  # fmt: skip


@asynccontextmanager
async def simulated_engine(
    *, num_blocks=65, conditions=None, is_stepped=False, config=None, threads=None, **scheduler
):
    config = config or engine_config(**scheduler)
    device = SimulatedDevice(
        num_blocks, 4, VOCAB_SIZE, 1 if is_stepped else config.scheduler.max_steps_in_flight,
        conditions or Conditions(STEP_S),
    )  # fmt: skip
    async with open_engine(
        config, device, threads or InlineThreads(), is_stepped=is_stepped
    ) as engine:
        engine.device = device
        yield engine


def expected(prompt, max_tokens):
    """Return the greedy tokens of the simulated model, which do not depend on the schedule."""
    return list(simulated_tokens(tuple(prompt), Sampling(temperature=0.0), max_tokens, VOCAB_SIZE))
