"""Define and validate the parameters of pooling, `PoolingParams`.

The constructor checks everything that does not depend on a model.  `resolve` checks the rest, and fills in the fields that
the caller did not set.
"""

from copy import copy
from typing import Any, ClassVar, Literal, cast, get_args

import msgspec

from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid
from trouper.params import RequestOutputKind

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[str, ...] = get_args(PoolingTask)
LATER_TASKS = ("plugin", "embed&token_classify")
# The parameters of each task; any other parameter is an error.
PARAMETERS_OF = {
    "embed": ("dimensions", "use_activation"),
    "classify": ("use_activation",),
    "token_embed": ("dimensions", "use_activation", "late_chunking_params", "late_interaction_params"),
    "token_classify": ("use_activation", "step_tag_id", "returned_token_ids"),
}  # fmt: skip
REMOVED = {
    "score": "The task 'score' was removed: use 'classify' (cross-encoders) or 'embed'.",
    "encode": "The task 'encode' was removed: use 'token_embed' or 'token_classify'.",
}


class LateInteractionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Cache a query's token embeddings in the engine, or score a document against cached ones.

    `cache_query` stores them under `query_key` until `query_uses` documents have been scored with them.  The
    model's folder determines the markers of queries and documents.

    Raises:

        TrouperValidationError: the mode, the key or the number of uses is invalid.
    """

    mode: Literal["cache_query", "score_doc"]
    query_key: str
    query_uses: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("cache_query", "score_doc"):
            raise invalid("mode", "must be cache_query or score_doc", self.mode)
        if not isinstance(self.query_key, str) or not self.query_key:  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
            raise invalid("query_key", "must be a nonempty string", self.query_key)
        uses = self.query_uses
        if uses is None:
            if self.mode == "cache_query":
                raise invalid("query_uses", "is required with mode='cache_query'", uses)
        elif isinstance(uses, bool) or not isinstance(uses, int) or uses < 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # the same
            raise invalid("query_uses", "must be a positive integer", uses)


class PoolingParams(msgspec.Struct, kw_only=True):
    """Select the result of a pooling request and its post-processing.

    A field of None uses the model's own setting.

    Args:

        task: embed, classify, token_embed or token_classify.
        use_activation: normalise embeddings, or turn logits into probabilities.
        dimensions: truncate embeddings to this many dimensions (Matryoshka models only).
        step_tag_id, returned_token_ids: for models with the token pooling type STEP.
        late_interaction_params: see `LateInteractionParams`.

    Raises:

        TrouperValidationError: a value outside its range; the message names the parameter.
        UnsupportedFeatureError: the task or a parameter is not supported.
    """

    n: ClassVar[int] = 1  # outputs of a request, as in SamplingParams

    task: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    late_chunking_params: dict[str, Any] | None = None
    late_interaction_params: LateInteractionParams | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        _check_task(self.task)
        if not isinstance(self.use_activation, bool | None):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
            raise invalid("use_activation", "must be True or False", self.use_activation)
        for name, least in (("dimensions", 1), ("step_tag_id", 0)):
            _check_integer(name, getattr(self, name), least)
        if self.returned_token_ids is not None:
            if not isinstance(self.returned_token_ids, list) or not self.returned_token_ids:  # pyright: ignore[reportUnnecessaryIsInstance]  # the same
                raise invalid(
                    "returned_token_ids", "must be a list of ids", self.returned_token_ids
                )
            for id in self.returned_token_ids:
                _check_integer("returned_token_ids", id, 0)
        if self.late_chunking_params is not None:
            raise UnsupportedFeatureError("late_chunking_params are not supported yet")
        if self.extra_kwargs:
            raise UnsupportedFeatureError("extra_kwargs are for plugins, which are not supported")
        late: Any = self.late_interaction_params
        if late is not None and not isinstance(late, LateInteractionParams):
            raise invalid("late_interaction_params", "must be LateInteractionParams", late)
        if self.output_kind != RequestOutputKind.FINAL_ONLY:
            raise invalid("output_kind", "must be FINAL_ONLY for pooling", self.output_kind)

    def clone(self) -> "PoolingParams":
        """Return an independent copy."""
        params = copy(self)
        if self.returned_token_ids is not None:
            params.returned_token_ids = self.returned_token_ids.copy()
        return params

    def resolve(self, spec: PoolerSpec) -> "PoolingParams":
        """Return a copy with all fields set for this model.

        Raises:
            TrouperValidationError: the model does not support the task, or the task does not take a parameter.
        """
        task = self.task or spec.engine_task
        if task not in spec.tasks:
            raise unsupported_task(task, f"This model supports {', '.join(spec.tasks)}.")
        self._check_belongs(task, spec)
        is_embedding = task.endswith("embed")
        if is_embedding:
            _check_dimensions(self.dimensions, spec)
        dimensions = self.dimensions or (spec.dimensions if is_embedding else None)
        default = spec.normalizes if is_embedding else spec.use_activation
        is_step = task == "token_classify" and spec.tok_pooling_type == "STEP"
        return msgspec.structs.replace(
            self,
            task=task,
            use_activation=default if self.use_activation is None else self.use_activation,
            dimensions=dimensions,
            step_tag_id=(
                spec.step_tag_id if is_step and self.step_tag_id is None else self.step_tag_id
            ),
            returned_token_ids=self.returned_token_ids
            or (list(spec.returned_token_ids) if is_step and spec.returned_token_ids else None),
            skip_reading_prefix_cache=task.startswith("token_")
            if self.skip_reading_prefix_cache is None
            else self.skip_reading_prefix_cache,
        )

    def _check_belongs(self, task: str, spec: PoolerSpec) -> None:
        for name in dict.fromkeys(name for names in PARAMETERS_OF.values() for name in names):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in PARAMETERS_OF[task]:
                raise invalid(name, f"is not a parameter of the task {task!r}", value)
            is_of_step = name in ("step_tag_id", "returned_token_ids")
            if is_of_step and spec.tok_pooling_type != "STEP":
                raise invalid(name, "needs the token pooling type STEP", value)


def unsupported_task(task: object, known: str, parameter: str = "task") -> TrouperValidationError:
    """Return the error for an unsupported task.

    The message begins like vLLM's, because clients compare it.  `known` is a sentence with the supported tasks.
    """
    text = f"Unsupported task: {str(task)[:40]!r}. {known}"
    return TrouperValidationError(text, parameter=parameter)


def _check_task(task: Any) -> None:
    if task is None or task in TASKS:
        return
    if task in LATER_TASKS:
        text = f"the pooling task {task!r} is not supported"
        if task == "plugin":
            text = f"No IOProcessor plugin installed. {text}"
        raise UnsupportedFeatureError(text, parameter="task")
    removed = REMOVED.get(task) if isinstance(task, str) else None
    raise unsupported_task(task, removed or f"The tasks are {', '.join(TASKS)}.")


def _check_dimensions(dimensions: int | None, spec: PoolerSpec) -> None:
    if dimensions is None or dimensions == spec.embedding_size:
        return
    if not spec.is_matryoshka:
        raise invalid("dimensions", "this model's embeddings cannot be shortened", dimensions)
    if dimensions > spec.embedding_size:
        raise invalid("dimensions", f"must be in [1, {spec.embedding_size}]", dimensions)
    known = spec.matryoshka_dimensions
    if known and dimensions not in known:
        raise invalid("dimensions", f"must be one of {', '.join(map(str, known))}", dimensions)


def _check_integer(name: str, value: object, least: int) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or value < least
    ):
        raise invalid(name, f"must be an integer ≥ {least}", cast("Any", value))
