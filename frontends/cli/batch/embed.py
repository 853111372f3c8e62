"""`trouper embed` and `trouper score`: run a pooling model on texts from the command line, a file or a pipe.

Each text or pair becomes one record with its embedding, classes or score, in order.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.batch.prompt_run import (
    IMAGE_WINDOW,
    BulkRun,
    Outcomes,
    Reading,
    is_about_text,
    note_summary,
    show_tokens,
)
from trouper.frontends.cli.batch.prompts import Prompt, PromptFileOptions, PromptSource
from trouper.frontends.cli.batch.results import (
    Columns,
    OutputFileOption,
    ResultWriter,
    check_output,
    results_file,
)
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.other_programs import check_pools, check_texts
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine
from trouper.frontends.cli.values import ImageOption, checked_images, media_files
from trouper.pooling import PoolingParams

if TYPE_CHECKING:
    from tqdm import tqdm

    from trouper.actors.engine.generation import Generation
    from trouper.frontends.python.async_engine import AsyncLLMEngine
    from trouper.frontends.python.scoring import Scorer, Side
    from trouper.outputs import PoolingOutput, PoolingRequestOutput

KINDS = {
    "embed": "vector", "classify": "vector", "token_embed": "matrix", "token_classify": "matrix",
}  # fmt: skip
TOO_LONG = "--truncate-prompt-tokens -1 truncates texts to the maximum length"
# This many documents are scored together.
AT_ONCE = 256
SCORE_COLUMNS: Columns = {
    "line": "int", "query": "text", "document": "text", "score": "score", "num_prompt_tokens": "int", "error": "text",
}  # fmt: skip

Truncate = Annotated[
    int | None,
    typer.Option(help="Truncate each text to this many tokens; -1 means the model's maximum."),
]
Stats = Annotated[
    bool | None,
    typer.Option(
        help="Print tokens and times on stderr; on by default at a terminal or for a file."
    ),
]


@expand_options
def embed(
    ctx: typer.Context,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", show_default=False, help="Text to embed or classify."),
    ] = None,
    task: Annotated[
        str, typer.Option(help="embed, classify, token_embed or token_classify.")
    ] = "embed",
    dimensions: Annotated[
        int | None, typer.Option(help="Truncate embeddings to this many dimensions.")
    ] = None,
    truncate_prompt_tokens: Truncate = None,
    image: ImageOption = None,
    output_file: OutputFileOption = None,
    stats: Stats = None,
    *,
    source: PromptFileOptions,
    engine_args: EngineArgs,
) -> None:
    """Embed one or more texts, or classify them (--task classify).

    Without TEXT, all of stdin is one text. With --image, each image is embedded, too. A failed text is reported, and the others
    continue. A generative model needs --runner pooling.
    """
    columns: Columns = {
        "line": "int", "text": "text", task: KINDS.get(task, "vector"), "num_prompt_tokens": "int", "error": "text",
    }  # fmt: skip
    check_texts(texts, engine_args.model, "embed", "TEXT")
    check_output(output_file, columns, source.prompt_file)
    params = PoolingParams(task=task, dimensions=dimensions)
    with PromptSource(texts, source, "TEXT", checked_images(image)) as given:
        outcomes = Outcomes("texts", is_single=given.is_single, too_long=TOO_LONG)
        config = resolve_offline(engine_args)
        check_pools(config)
        with results_file(output_file, columns) as file:
            embedding = _Embedding(given, params, _options(truncate_prompt_tokens), file, outcomes)
            run_engine(config, embedding.run_all)
    note_summary(outcomes, stats, is_from_file=given.is_from_file)
    outcomes.check()


@expand_options
def score(
    ctx: typer.Context,
    query: Annotated[str, typer.Argument(help="Text to compare with.")],
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOCUMENT", show_default=False, help="Text to score against the query."
        ),
    ] = None,
    truncate_prompt_tokens: Truncate = None,
    image: ImageOption = None,
    output_file: OutputFileOption = None,
    stats: Stats = None,
    *,
    source: PromptFileOptions,
    engine_args: EngineArgs,
) -> None:
    """Score how well each document fits the query.

    Without DOCUMENT, all of stdin is one document. With --image, each image is a document, too. A failed document is reported, and
    the others continue.
    """
    check_texts([query, *(documents or ())], engine_args.model, "score", "QUERY and DOCUMENT")
    check_output(output_file, SCORE_COLUMNS, source.prompt_file)
    if not query.strip():
        raise TrouperValidationError("must not be empty", parameter="query")
    with PromptSource(documents, source, "DOCUMENT", checked_images(image)) as given:
        outcomes = Outcomes("documents", is_single=given.is_single, too_long=TOO_LONG)
        config = resolve_offline(engine_args)
        check_pools(config)
        with results_file(output_file, SCORE_COLUMNS) as file:
            scoring = _Scoring(query, given, _options(truncate_prompt_tokens), file, outcomes)
            run_engine(config, scoring.run_all)
    note_summary(outcomes, stats, is_from_file=given.is_from_file)
    outcomes.check()


class _Embedding:
    """Embeds or classifies all texts, and writes their records in order."""

    def __init__(
        self,
        texts: PromptSource,
        params: PoolingParams,
        options: dict[str, Any],
        file: ResultWriter,
        outcomes: Outcomes,
    ) -> None:
        self._texts = texts
        self._params = params
        self._options = options
        self._file = file
        self._outcomes = outcomes

    async def run_all(self, engine: "AsyncLLMEngine", _: Interrupts) -> None:
        def open_one(prompt: Prompt) -> "Generation[PoolingRequestOutput[PoolingOutput]]":
            asked: Any = prompt.text
            if prompt.image is not None:
                asked = {"messages": [{"role": "user", "content": _parts(prompt.image)}]}
            return engine.encode(asked, self._params, tokenization_kwargs=self._options)

        self._outcomes.begin()
        with output.progress(_total(self._texts), "texts") as bar:
            run = BulkRun(self._texts, open_one, partial(self._finish, bar), self._note_failure)
            await run.answer_all(engine, bar)
        self._outcomes.end()

    async def _finish(
        self,
        bar: "tqdm[Any]",
        prompt: Prompt,
        generation: "Generation[PoolingRequestOutput[PoolingOutput]]",
    ) -> None:
        async for result in generation:
            found = {"text": prompt.text, self._params.task or "": result.outputs.array}
            num_tokens = len(result.prompt_token_ids)
            with output.printing_beside(bar):
                self._file.write({**prompt.place(), **found, "num_prompt_tokens": num_tokens})
            self._outcomes.succeed(num_tokens)

    def _note_failure(self, prompt: Prompt, error: Exception) -> None:
        message = self._outcomes.fail(prompt, error)
        self._file.write({**prompt.place(), "text": prompt.text, "error": message})


class _Scoring:
    """Scores all documents, `AT_ONCE` at a time, and writes their records in order."""

    def __init__(
        self,
        query: str,
        documents: PromptSource,
        options: dict[str, Any],
        file: ResultWriter,
        outcomes: Outcomes,
    ) -> None:
        self._query = query
        self._documents = documents
        self._options = options
        self._file = file
        self._outcomes = outcomes

    async def run_all(self, engine: "AsyncLLMEngine", _: Interrupts) -> None:
        self._outcomes.begin()
        with output.progress(_total(self._documents), "documents") as bar:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(show_tokens, engine, bar, name="progress")
                await self._score_all(engine, bar)
                tasks.cancel_scope.cancel()
        self._outcomes.end()

    async def _score_all(self, engine: "AsyncLLMEngine", bar: "tqdm[Any]") -> None:
        group: list[Prompt] = []
        num_read = 0
        async for prompt in Reading(self._documents):
            num_read += 1
            group.append(prompt)
            if len(group) == (IMAGE_WINDOW if self._documents.images else AT_ONCE):
                await self._score(engine, group, bar)
                group = []
        # The number of prompts in a pipe is known only now.
        bar.total = num_read
        if group:
            await self._score(engine, group, bar)

    async def _score(self, engine: "AsyncLLMEngine", group: list[Prompt], bar: "tqdm[Any]") -> None:
        """Score documents together; after an error score them one by one, to find the invalid ones."""
        if all(prompt.text is not None for prompt in group):
            try:
                results = await self._scorer(engine, len(group)).score(
                    [self._query] * len(group), [_side(prompt) for prompt in group]
                )
            except Exception as error:
                if len(group) == 1 or not is_about_text(error):
                    self._note_failure(group[0], error)
                    bar.update()
                    return
            else:
                for prompt, result in zip(group, results, strict=True):
                    self._note(prompt, result, bar)
                return
        if len(group) == 1:
            self._note_failure(group[0], TrouperValidationError(group[0].error or "no text"))
            bar.update()
            return
        for prompt in group:
            await self._score(engine, [prompt], bar)

    def _scorer(self, engine: "AsyncLLMEngine", num: int) -> "Scorer":
        from trouper.frontends.python.scoring import Scorer

        places = (["query"] * num, ["document"] * num)
        encode = partial(engine.encode, tokenization_kwargs=self._options)
        return Scorer(encode, engine.config.pooler, places=places)

    def _note(self, prompt: Prompt, result: Any, bar: "tqdm[Any]") -> None:
        number = float(result.outputs.array.reshape(()))
        num_tokens = len(result.prompt_token_ids)
        found = {"query": self._query, "document": prompt.text, "score": number}
        with output.printing_beside(bar):
            self._file.write({**prompt.place(), **found, "num_prompt_tokens": num_tokens})
        self._outcomes.succeed(num_tokens)
        bar.update()

    def _note_failure(self, prompt: Prompt, error: Exception) -> None:
        """Record a failed document.  Raises an error that concerns the options instead of the document."""
        if not is_about_text(error):
            raise error
        message = self._outcomes.fail(prompt, error)
        found = {"query": self._query, "document": prompt.text, "error": message}
        self._file.write({**prompt.place(), **found})


def _side(prompt: Prompt) -> "Side":
    from trouper.frontends.python.scoring import MixedContent

    return (prompt.text or "") if prompt.image is None else MixedContent(_parts(prompt.image))


def _parts(path: Path) -> list[dict[str, Any]]:
    """Read an image and return the parts of a message with it."""
    (data,) = media_files([path])
    return [{"type": "image", "image": data}]


def _total(prompts: PromptSource) -> int | None:
    return prompts.count() if output.is_terminal(sys.stderr) else None


def _options(truncate: int | None) -> dict[str, Any]:
    return {} if truncate is None else {"truncate_prompt_tokens": truncate}
