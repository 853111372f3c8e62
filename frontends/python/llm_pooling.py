"""The methods of `LLM` for pooling models: encode, embed, classify, reward and score, in vLLM's interface.

They are a base class of `LLM`, because vLLM has one class for both kinds of models.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from trouper.errors import EnginePausedError, TrouperValidationError
from trouper.frontends.python.engine_thread import BlockingControls
from trouper.frontends.python.llm_requests import ProgressBar, as_list, progress_bar
from trouper.frontends.python.options import check_unused, one_each
from trouper.frontends.python.scoring import Pooled, Scorer, as_pairs, collect
from trouper.inputs import PoolingPrompt
from trouper.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from trouper.pooling import PoolingParams

Params = PoolingParams | Sequence[PoolingParams] | None
# A text, or `{"content": parts of a message}` with images.
ScoreInput = str | Mapping[str, Any]
Prompts = PoolingPrompt | Sequence[PoolingPrompt]


class PoolingMethods(BlockingControls):
    """Pooling methods of `LLM`; results are in the order of the prompts.

    All of them raise TrouperValidationError if the model generates text, and EnginePausedError if the engine is
    paused or asleep.
    """

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        use_tqdm: bool | ProgressBar = True,
        lora_request: object | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Run a pooling task on one prompt or a list of prompts.

        Args:
            pooling_params: parameters for all prompts, or one for each; None means the model's defaults.
            pooling_task: `embed`, `classify`, `token_embed` or `token_classify`; required.

        Raises:
            TrouperValidationError: no task, a task that the model does not support, or an invalid prompt or parameter.
        """
        self._check_pools()
        if pooling_task is None:
            known = ", ".join(self.thread.engine.config.supported_tasks)
            raise TrouperValidationError(
                f"encode needs a task; this model supports: {known}", parameter="pooling_task"
            )
        check_unused(lora_request=lora_request)
        given = as_list(prompts)  # type: ignore[arg-type]  # pairs are mappings, too
        if not given:
            raise TrouperValidationError("You must pass at least one prompt", parameter="prompt")
        engine = self.thread.engine
        encodings = [
            engine.encode(prompt, _with_task(params, pooling_task), tokenization_kwargs=tokenization_kwargs)
            for prompt, params in zip(
                given, one_each(pooling_params, len(given), "pooling_params"), strict=True
            )
        ]  # fmt: skip
        with progress_bar(use_tqdm, len(given), "prompts") as bar:
            return self.thread.call(collect, encodings, bar)

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: Params = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt; `output.outputs.embedding` is a list of floats.

        Results have the order of the prompts.  Embeddings are normalised if the model's files or `pooling_params` ask
        for it.
        """
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="embed", tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: Params = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Classify each prompt; `output.outputs.probs` has one probability for each label of the model.

        Results have the order of the prompts.  With `use_activation=False` they are logits.  Raises
        TrouperValidationError for a model without classes.
        """
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="classify", tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: Params = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of each prompt's tokens; the same as `encode` with the task `token_classify`.

        The array of each output has one row for each token of the prompt and one column for each label.
        """
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="token_classify", tokenization_kwargs=tokenization_kwargs,
        )  # fmt: skip

    def score(
        self,
        data_1: ScoreInput | Sequence[ScoreInput],
        data_2: ScoreInput | Sequence[ScoreInput],
        /,
        *,
        use_tqdm: bool | ProgressBar = True,
        pooling_params: PoolingParams | None = None,
        lora_request: object | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score the similarity of pairs of texts: 1 with 1, 1 with N, or N with N texts.

        The model determines the method: a classifier with one label reads both texts together (cross-encoder), an
        embedding model returns the cosine of both embeddings, and a late-interaction model sums, over the tokens of
        the first text, the best match among the tokens of the second.  A side with images is a dict with `content`, the
        parts of a message.
        """
        self._check_pools()
        check_unused(lora_request=lora_request, chat_template=chat_template)
        queries, documents, places = as_pairs(data_1, data_2, ("data_1", "data_2"))
        engine = self.thread.engine
        encode = partial(engine.encode, tokenization_kwargs=tokenization_kwargs)
        scorer = Scorer(encode, engine.config.pooler, pooling_params, places=places)
        with progress_bar(use_tqdm, len(documents), "pairs") as bar:
            outputs: list[Pooled] = self.thread.call(scorer.score, queries, documents, bar)
        return [ScoringRequestOutput.from_base(output) for output in outputs]

    def _check_pools(self) -> None:
        self.thread.check_open()
        if self.is_sleeping():
            raise EnginePausedError("the engine is paused or asleep: wake_up() first")
        config = self.thread.engine.config
        if config.pooler is None:
            rule = "this engine generates text; pooling needs an engine with runner='pooling'"
            raise TrouperValidationError(rule, parameter="runner")


def _with_task(params: PoolingParams | None, task: str) -> PoolingParams:
    if params is None:
        return PoolingParams(task=task)
    if not isinstance(params, PoolingParams):  # pyright: ignore[reportUnnecessaryIsInstance]  # not every caller is typed
        raise TypeError(f"pooling_params must be PoolingParams, not {type(params).__name__}")
    if params.task not in (None, task):
        raise TrouperValidationError(
            f"the task of pooling_params is not {task!r}", parameter="task", value=params.task
        )
    return msgspec.structs.replace(params, task=task)
