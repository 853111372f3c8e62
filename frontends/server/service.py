"""What all handlers share: the engine once it is there, the house rules, and the table of who is in."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from trouper.config import EngineConfig
from trouper.errors import TrouperNotFoundError
from trouper.frontends.server.admission import Admission, AdmissionTicket
from trouper.frontends.server.errors import clean, unavailable
from trouper.frontends.server.exchange import Exchange
from trouper.frontends.server.progress import StepClock
from trouper.frontends.server.settings import ServerSettings
from trouper.frontends.server.wire import Generating
from trouper.inputs import PromptType
from trouper.outputs import RequestOutput
from trouper.params import SamplingParams

if TYPE_CHECKING:
    from trouper.actors.generation import Generation
    from trouper.frontends.async_engine import AsyncLLMEngine

PLACES = 4  # × max_num_seqs sequences may be open: one in the machine, three on the bench
MAX_ECHO = 200


class Service:
    """Starting until `open`, draining after `drain`."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.admission = Admission(0)
        self.is_draining = False
        self.died = anyio.Event()  # somebody has met the engine's death
        self.num_unknown_fields = 0
        self.steps = StepClock()
        self.threads = anyio.CapacityLimiter(2)  # large bodies, tokenising
        self._engine: AsyncLLMEngine | None = None
        self._open: dict[str, str] = {}  # the engine's id -> the client's

    def __repr__(self) -> str:
        state = "starting" if self._engine is None else "draining" if self.is_draining else "open"
        return f"<Service {state} {self.admission!r}>"

    def open(self, engine: "AsyncLLMEngine") -> None:
        """From now on requests are taken."""
        limit = self.settings.max_requests or PLACES * engine.engine.config.scheduler.max_num_seqs
        self.admission.limit = limit
        self._engine = engine

    def drain(self) -> None:
        """From now on new requests are refused, and readiness says so."""
        self.is_draining = True

    @property
    def is_starting(self) -> bool:
        return self._engine is None

    @property
    def engine(self) -> "AsyncLLMEngine":
        """Raises Refusal while it is loading, EngineDeadError when it has failed."""
        if self._engine is None:
            raise unavailable("starting", "the model is being loaded")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        return self.engine.engine.config

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.served_model_names or (self.config.model.name,)

    def enter(self) -> AdmissionTicket:
        """Raises Refusal while starting or draining, and when all places are taken."""
        self.check_open()
        return self.admission.enter()

    def check_alive(self) -> None:
        """Raises Refusal while starting, and when the engine has failed: health in a status."""
        if self.engine.errored:
            self.died.set()
            raise unavailable("engine_failed", "the engine has failed")

    def check_open(self) -> None:
        """Raises Refusal unless requests are taken now, EngineDeadError when they never will be."""
        self.engine.engine.check_alive()
        if self.is_draining:
            raise unavailable("draining", "the server is shutting down")

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries.  Raises TrouperNotFoundError."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise TrouperNotFoundError(f"the model {clean(name, MAX_ECHO)!r} does not exist")
        return name

    def generations(
        self,
        exchange: Exchange,
        prompts: Sequence[PromptType],
        params: SamplingParams,
        request: Generating,
    ) -> "list[Generation]":
        """One request of the engine for each prompt, under ids that no client can choose."""
        priority = request.priority or 0
        if self.settings.is_smaller_priority_first:
            priority = ~priority  # turns the order round, and no int64 falls out
        options = {
            name: value
            for name in ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")
            if (value := getattr(request, name)) is not None
        }
        return [
            self.engine.generate(
                prompt,
                params,
                f"{exchange.id}-{i}",
                priority=priority,
                tokenization_kwargs=options,
            )
            for i, prompt in enumerate(prompts)
        ]

    async def prompt_text(self, output: RequestOutput) -> str:
        """What the prompt says, also where it came as token ids."""
        tokenizer = self.engine.engine.tokenizer
        if output.prompt is not None or tokenizer is None:
            return output.prompt or ""
        return await anyio.to_thread.run_sync(
            tokenizer.decode, output.prompt_token_ids, limiter=self.threads
        )

    def token_text(self, token_id: int) -> str:
        tokenizer = self.engine.engine.tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)

    def note(self, generations: "Iterable[Generation]", exchange: Exchange) -> None:
        for generation in generations:
            self._open[generation.request_id] = exchange.request_id

    def forget(self, generations: "Iterable[Generation]") -> None:
        for generation in generations:
            self._open.pop(generation.request_id, None)

    def find(self, request_ids: Iterable[str] | None) -> list[str]:
        """The engine's ids of what clients call so; None: of everything."""
        wanted = None if request_ids is None else set(request_ids)
        return [id for id, client in self._open.items() if wanted is None or client in wanted]
