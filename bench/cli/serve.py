"""`trouper bench serve`: put load on any OpenAI-compatible server."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import msgspec
import typer

from trouper.bench.cli.options import DatasetOptions, ReportOptions, reporting, tokenizer_of
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.values import integers, json_object

if TYPE_CHECKING:
    from trouper.bench.datasets import SampleRequest
    from trouper.bench.serve import RequestLoad

# In nearly every vocabulary these ids are ordinary text; --tokenizer determines them exactly.
COMMON_IDS = range(300, 1000)


@expand_options
def serve(
    ctx: typer.Context,
    url: Annotated[
        str, typer.Option("--url", "--base-url", help="Base address of the server, with /v1.")
    ] = "http://127.0.0.1:8000/v1",
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="API to send the requests to.")
    ] = "completions",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Model to request; the server's first by default."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder of a tokenizer, for texts of exact lengths.", metavar="FOLDER"),
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second; inf sends all at once.")
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the arrivals: 1 is a Poisson process, less is burstier, more is evener."
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        Any,
        typer.Option(
            parser=integers,
            metavar="N,N,…",
            help="Maximum numbers of open requests; each has its own run.",
        ),
    ] = None,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests to send before the measurement.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds without data after which a request fails.")
    ] = 600.0,
    extra_body: Annotated[
        Any,
        typer.Option(
            parser=json_object, metavar="JSON", help="Further fields for each request's body."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key to send to the server.", envvar="TROUPER_API_KEY")
    ] = None,
    goodput: Annotated[
        list[str] | None,
        reporting(
            "Maximum ttft, tpot or e2el of requests that count as goodput; repeatable.",
            metavar="NAME:MS",
        ),
    ] = None,
    metric_percentiles: Annotated[
        Any, reporting("Percentiles of the latencies to show.", parser=integers, metavar="N,N,…")
    ] = "50,90,99",
    plot: Annotated[
        str | None, reporting("Plot latencies over the concurrencies as PNG.", metavar="FILE")
    ] = None,
    *,
    dataset: DatasetOptions,
    report: ReportOptions,
) -> None:
    """Measure latencies, throughput and goodput from the clients of a server."""
    from trouper.bench import serve as core
    from trouper.bench.report import check_available, check_writable

    load = core.RequestLoad(
        url=url,
        endpoint=endpoint,
        request_rate=request_rate,
        burstiness=burstiness,
        seed=seed,
        api_key=api_key,
        timeout_s=timeout,
        percentiles=tuple(dict.fromkeys((*metric_percentiles, *((99,) if plot else ())))),
        goodput=core.parse_goodput(goodput or ()),
        extra_body=extra_body or {},
        model=model or "",
    )
    load.check()
    limits: list[int | None] = max_concurrency or [None]
    if min(max_concurrency or [1]) < 1:
        raise TrouperValidationError("must be at least 1", parameter="max_concurrency")
    report.check()
    if plot is not None:
        check_available()
        check_writable("plot", plot)
    # Each run has new prompts, because the server may cache prefixes.
    runs = [
        (
            msgspec.structs.replace(load, max_concurrency=limit),
            _requests(dataset, tokenizer, endpoint, seed + i),
        )
        for i, limit in enumerate(limits)
    ]
    warm_ups = _requests(dataset, tokenizer, endpoint, seed - 1)[:num_warmups]
    records = anyio.run(_measure, load, runs, warm_ups, backend="asyncio")
    if plot is not None:
        from trouper.bench.report import plot as draw

        title = f"{records[0]['model_id']} at {url}, {len(runs[0][1])} requests"
        draw(plot, core.points(records), title=title, concurrency="open requests")
    lines = [line for record in records for line in _lines(record, load)]
    report.finish(ctx, {"results": records}, lines)
    if not any(record["completed"] for record in records):
        raise core.ServerError("no request completed")


def _requests(
    dataset: DatasetOptions, folder: str | None, endpoint: str, seed: int
) -> "list[SampleRequest]":
    """Return the requests; without a tokenizer, chats get a text with one word per prompt token."""
    if folder is not None:
        tokenizer, vocabulary = tokenizer_of(folder)
        return dataset.requests(tokenizer, vocabulary, seed, texts=endpoint == "chat")
    from trouper.bench.datasets import SampleRequest

    requests = dataset.requests(None, COMMON_IDS, seed, texts=False)
    if endpoint == "completions":
        return requests
    return [
        SampleRequest(r.prompt_token_ids, r.output_len, " ".join(map(str, r.prompt_token_ids)))
        for r in requests
    ]


async def _measure(
    load: "RequestLoad",
    runs: "list[tuple[RequestLoad, list[SampleRequest]]]",
    warm_ups: "list[SampleRequest]",
) -> list[dict[str, Any]]:
    from trouper.bench import serve as core

    records: list[dict[str, Any]] = []
    async with core.open_client(load) as client:
        model = await core.first_model(client, load.model)
        await core.send_all(client, msgspec.structs.replace(load, model=model), warm_ups)
        for limited, requests in runs:
            named = msgspec.structs.replace(limited, model=model)
            with output.progress(len(requests), "requests") as bar:
                record = await core.measure(client, named, requests, bar.update)
                records.append({"model_id": model, **record})
    return records


def _lines(record: dict[str, Any], load: "RequestLoad") -> list[str]:
    limit = record["max_concurrency"]
    lines = [
        f"{record['completed']} requests completed, {record['failed']} failed in {record['duration']:.2f} s"
        + (f", at most {limit} open" if limit else ""),
        *(f"  failed: {num} × {kind}" for kind, num in record["errors"].items()),
        f"  {record['request_throughput']:.2f} requests/s, {record['output_throughput']:.1f} output tokens/s, "
        f"{record['total_token_throughput']:.1f} total tokens/s",
    ]
    if "request_goodput" in record:
        lines.append(f"  goodput: {record['request_goodput']:.2f} requests/s")
    names = ("mean", *(f"p{q:g}" for q in load.percentiles))
    lines.append(f"  {'ms':8}" + "".join(f"{name:>10}" for name in names))
    for metric in ("ttft", "tpot", "itl", "e2el"):
        values = [record.get(f"{name}_{metric}_ms") for name in names]
        if None not in values:
            lines.append(f"  {metric:8}" + "".join(f"{value:10.2f}" for value in values))
    lines.append(f"  the client used {100 * record['client_cpu_share']:.0f} % of a core")
    return lines
