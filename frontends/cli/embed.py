"""`trouper embed` and `trouper score`: a pooling model from the command line, a line of JSON a result."""

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trouper.config.args import EngineArgs
from trouper.frontends.cli import output
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.prompts import read_prompts
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine
from trouper.pooling import PoolingParams

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

Truncate = Annotated[
    int | None, typer.Option(help="Keep so many tokens of each text; -1 is all that fit.")
]


@expand_options
def embed(
    ctx: typer.Context,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", show_default=False, help="Text to embed or classify."),
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="One text per line; - is stdin.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="embed, classify, token_embed or token_classify.")
    ] = "embed",
    dimensions: Annotated[int | None, typer.Option(help="Keep so many dimensions.")] = None,
    truncate_prompt_tokens: Truncate = None,
    *,
    engine_args: EngineArgs,
) -> None:
    """Embed one or more texts, or classify them (--task classify).

    Without TEXT the whole of stdin is one text.  A model that generates needs --runner pooling.
    """
    given = read_prompts(texts, prompt_file)
    params = PoolingParams(task=task, dimensions=dimensions)
    resolve_offline(engine_args)
    run_engine(engine_args, partial(_embed, given, params, truncate_prompt_tokens))


@expand_options
def score(
    ctx: typer.Context,
    query: Annotated[str, typer.Argument(help="Text to compare with.")],
    documents: Annotated[
        list[str], typer.Argument(metavar="DOCUMENT", help="Text to score against the query.")
    ],
    truncate_prompt_tokens: Truncate = None,
    *,
    engine_args: EngineArgs,
) -> None:
    """Score how well each document fits the query."""
    resolve_offline(engine_args)
    run_engine(engine_args, partial(_score, query, documents, truncate_prompt_tokens))


async def _embed(
    texts: list[str],
    params: PoolingParams,
    truncate: int | None,
    engine: "AsyncLLMEngine",
    _: Interrupts,
) -> None:
    from trouper.frontends.python.scoring import collect

    encodings = [
        engine.encode(text, params, tokenization_kwargs=_options(truncate)) for text in texts
    ]
    with output.progress(len(texts), "texts") as bar:
        results = await collect(encodings, bar)
    for text, result in zip(texts, results, strict=True):
        found = result.outputs.array.tolist()
        _print({"text": text, params.task or "": found}, len(result.prompt_token_ids))


async def _score(
    query: str,
    documents: list[str],
    truncate: int | None,
    engine: "AsyncLLMEngine",
    _: Interrupts,
) -> None:
    from trouper.frontends.python.scoring import Scorer

    num = len(documents)
    places = (["query"] * num, [f"documents[{i}]" for i in range(num)])
    scorer = Scorer(engine, options=_options(truncate), places=places)
    with output.progress(len(documents), "documents") as bar:
        results = await scorer.score([query] * len(documents), documents, bar)
    for document, result in zip(documents, results, strict=True):
        number = float(result.outputs.array.reshape(()))
        _print(
            {"query": query, "document": document, "score": number}, len(result.prompt_token_ids)
        )


def _options(truncate: int | None) -> dict[str, Any]:
    return {} if truncate is None else {"truncate_prompt_tokens": truncate}


def _print(result: dict[str, Any], num_tokens: int) -> None:
    print(json.dumps({**result, "num_prompt_tokens": num_tokens}, ensure_ascii=False), flush=True)
