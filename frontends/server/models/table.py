"""Find the models of a server by name, and describe their states.  Everything is synchronous.

A name is the name of a model, an alias, or an adapter.  As in Ollama, `NAME:latest` means `NAME`.  `MODEL/ADAPTER` selects an adapter if
several models have one of that name.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import msgspec

from trouper.actors.observability.metrics import Metrics
from trouper.actors.rendering.prompts.infill import marks_of
from trouper.config.media import IMAGE
from trouper.errors import TrouperError, TrouperNotFoundError
from trouper.frontends.server.models.options import ModelOptions
from trouper.frontends.server.models.policy import AWAKE, COLD, FAILED, ModelRecord, ModelState
from trouper.frontends.server.models.sizes import ModelPlan
from trouper.frontends.server.service.service import MAX_SHOWN_NAME, Service, untagged
from trouper.frontends.server.shared.errors import HTTPError, clean, unavailable

MAX_NEAR = 3


class ModelStatus(msgspec.Struct, frozen=True):
    """Describe one model at one moment, for lists and pages.

    Attributes:
        state: cold, loading, awake, dozing, asleep, waking, stopping or failed.
        bytes: the estimated memory by part (`process`, `weights`, `kv`), and the sum used in this state (`now`).
        expires_s: seconds until an idle model is put to sleep, or None if it stays awake.
    """

    name: str
    aliases: tuple[str, ...]
    state: str
    is_pinned: bool
    num_waiting: int
    num_open: int
    bytes: dict[str, int]
    expires_s: float | None
    error: str | None


class HostedModel:
    """Hold one model's options, its service, and its record in the policy.

    Only `Residency` changes the record and opens the engine.
    """

    def __init__(self, plan: ModelPlan, service: Service) -> None:
        self.options: ModelOptions = plan.options
        self.plan = plan
        self.service = service
        self.record = ModelRecord(
            plan.options.name,
            plan.memory,
            is_pinned=plan.options.is_pinned,
            keep_alive_s=plan.options.keep_alive_s,
        )
        if plan.config is None:
            # Its files cannot be served, so a retry would fail, too.
            self.record.state, self.record.retry_at = FAILED, math.inf
        # The target state of the running transition.
        self.moves_to: ModelState | None = None
        # Whether its worker was killed during a load, for example by the OOM killer.  This is no fault of the model.
        self.was_killed = False
        # Whether an administrator has put it to sleep or paused it.
        self.is_paused = False
        # Whether new requests are held back, because another model waits for the memory of this one.
        self.is_draining = False
        # Set, and replaced, whenever its state changes.
        self.changed = anyio.Event()
        # Set to stop its engine.
        self.stop = anyio.Event()
        # The duration of its last transition in seconds.
        self.last_change_s = 0.0
        # The reason of the last failure, and the number of consecutive failures.
        self.error: str | None = plan.error
        self.num_failures = 0
        # Whether its files were removed from the folder, so that it is removed from the table after it is unloaded.
        self.is_gone = False
        # The metrics of its last engine, which remain visible after it has stopped.
        self.metrics: Metrics | None = None

    def __repr__(self) -> str:
        return f"<HostedModel {self.name} {self.state}>"

    @property
    def name(self) -> str:
        return self.options.name

    def is_ready(self, *, needs_awake: bool) -> bool:
        """Return whether a request may start: the model is awake, or with `needs_awake=False` loaded, and not draining."""
        return (self.is_awake if needs_awake else self.is_loaded) and not self.is_draining

    @property
    def is_loaded(self) -> bool:
        """Whether its engine is open and not about to be stopped."""
        return self.record.state not in (COLD, FAILED) and self.moves_to is not COLD

    @property
    def is_awake(self) -> bool:
        return self.record.state is AWAKE and self.moves_to is None

    @property
    def state(self) -> str:
        """The state for clients, or the running transition: loading, waking or stopping."""
        match self.moves_to, self.record.state:
            case ModelState.AWAKE, ModelState.COLD:
                return "loading"
            case ModelState.AWAKE, _:
                return "waking"
            case ModelState.COLD, _:
                return "stopping"
            case _, state:
                return state.value

    def notify(self) -> None:
        """Wake the tasks that are waiting for a change of this model's state."""
        self.changed.set()
        self.changed = anyio.Event()


class ModelTable:
    """Index all models of a server by name.

    Args:
        default: the model of requests without a name (`--default-model`).  None requires a name unless there is only one model.
        budget: the bytes of memory for all models together.
    """

    def __init__(self, models: Sequence[HostedModel], default: str | None, budget: int) -> None:
        self.models = {model.name: model for model in models}
        self.budget = budget
        # Whether requests may leave out the model's name.
        self.has_default = default is not None or len(models) == 1
        self._default = default or models[0].name

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(self.models.values())

    def __repr__(self) -> str:
        return f"<ModelTable {', '.join(f'{each.name} {each.state}' for each in self)}>"

    @property
    def default(self) -> HostedModel:
        """The model of requests without a name, or the first model if that one was removed."""
        return self.models.get(self._default) or next(iter(self))

    @property
    def records(self) -> list[ModelRecord]:
        return [model.record for model in self]

    def find(self, name: str) -> HostedModel:
        """Return the model with this name or alias, or with an adapter of this name.

        Raises:
            TrouperNotFoundError: no model or adapter has this name.
            HTTPError: several models have an adapter of this name (400).
        """
        for known in (name, untagged(name)):
            for model in self:
                if known == model.name or known in model.options.aliases:
                    return model
        having = [model for model in self if model.service.adapter(name) is not None]
        if len(having) > 1:
            names = " or ".join(
                f"{clean(model.name, MAX_SHOWN_NAME)}/{clean(name, MAX_SHOWN_NAME)}"
                for model in having
            )
            text = f"several models have an adapter of this name; set model to {names}"
            raise HTTPError(400, "ambiguous_model", text, param="model")
        if not having:
            raise TrouperNotFoundError(self._unknown(name))
        return having[0]

    def _unknown(self, name: str) -> str:
        names = [clean(model.name, MAX_SHOWN_NAME) for model in self]
        shown = ", ".join(f"`{each}`" for each in names[:MAX_NEAR])
        more = (
            f" and {len(names) - MAX_NEAR} more (GET /v1/models)" if len(names) > MAX_NEAR else ""
        )
        return f"The model `{clean(name, MAX_SHOWN_NAME)}` does not exist. This server has {shown}{more}."

    def of_service(self, service: Service) -> HostedModel:
        return next(model for model in self if model.service is service)

    def statuses(self, now: float) -> list[ModelStatus]:
        """Describe all models at once, without waiting.

        Args:
            now: the event loop's clock, in seconds.
        """
        return [self.status(model, now) for model in self]

    def status(self, model: HostedModel, now: float) -> ModelStatus:
        """Describe one model."""
        record = model.record
        memory = record.memory
        expires_s = None
        if record.state is AWAKE and not record.stays and record.keep_alive_s < math.inf:
            since = now if record.has_work else max(record.idle_since, record.woken_at)
            expires_s = max(0.0, since + record.keep_alive_s - now)
        return ModelStatus(
            name=model.name,
            aliases=model.options.aliases,
            state=model.state,
            is_pinned=record.is_pinned,
            num_waiting=record.num_waiting,
            num_open=record.num_open,
            bytes={**memory._asdict(), "now": record.bytes},
            expires_s=expires_s,
            error=model.error,
        )


def refusal(model: HostedModel, now: float) -> HTTPError:
    """Return the error (503) for requests of a failed model, with the time after which a retry makes sense."""
    name = clean(model.name, MAX_SHOWN_NAME)
    error = unavailable("model_failed", f"the model {name} could not be loaded: {model.error}")
    wait_s = model.record.retry_at - now
    # Without a scheduled retry the files must be replaced first, which takes a while.
    error.retry_after_s = max(1.0, wait_s) if wait_s < math.inf else 300.0
    return error


def status_words(status: ModelStatus) -> dict[str, Any]:
    """Return the status in llama.cpp's vocabulary, which clients of its router compare."""
    words = {
        "cold": "unloaded", "stopping": "unloaded", "loading": "loading", "waking": "loading",
        "awake": "loaded", "dozing": "sleeping", "asleep": "sleeping", "failed": "failed",
    }  # fmt: skip
    return {"value": words[status.state]}


def capabilities(service: Service) -> list[str]:
    """Return what a loaded model can do, in Ollama's words: completion, vision, tools, thinking, insert, or embedding alone.

    Detects them from the chat template and the vocabulary, because a model's name may be anything.
    """
    if service.config.pooler is not None:
        return ["embedding"]
    found = ["completion"]
    if service.config.media is not None and service.config.media.modality == IMAGE:
        found.append("vision")
    if service.answers.tools is not None:
        found.append("tools")
    if service.answers.reasoning is not None:
        found.append("thinking")
    if _fills_gaps(service):
        found.append("insert")
    return found


def _fills_gaps(service: Service) -> bool:
    tokenizer = service.tokenizer
    if tokenizer is None:
        return False
    try:
        marks_of(tokenizer)
    except TrouperError:
        return False
    return True
