"""`trouper bench peers`: trouper beside vLLM, llama.cpp and transformers."""

from typing import Annotated, Any

import typer

from trouper.config.args import EngineArgs
from trouper.frontends.cli.bench.options import ReportOptions, note, terminable, tokenizer_of
from trouper.frontends.cli.options import expand_options

PYTHON: dict[str, Any] = {"metavar": "PATH", "rich_help_panel": "Peers"}


@expand_options
def peers(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder; the demo when left out.")
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(help="The same model for llama.cpp.", metavar="FILE")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of everybody but llama.cpp.")] = "bfloat16",
    quantization: Annotated[
        str | None, typer.Option(help="Of trouper: int8 or int4, beside a GGUF file of that kind.")
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Requests x input x output; repeatable.", metavar="16x128x64"),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; everybody runs in each.")] = 5,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal prompts.")] = 0,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="vllm, llama.cpp, transformers or transformers-cb; repeatable; without it all that are found.",
            metavar="NAME",
            rich_help_panel="Peers",
        ),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="trouper, and nobody else.")] = False,
    vllm_python: Annotated[
        str | None, typer.Option(help="Where vLLM is installed.", **PYTHON)
    ] = None,
    llama_python: Annotated[
        str | None, typer.Option(help="Where llama-cpp-python is.", **PYTHON)
    ] = None,
    llama_batched_bench: Annotated[
        str | None, typer.Option(help="llama.cpp's own program, instead.", **PYTHON)
    ] = None,
    hf_python: Annotated[str | None, typer.Option(help="Another transformers.", **PYTHON)] = None,
    *,
    report: ReportOptions,
) -> None:
    """Everybody on the same prompts, in turn; medians, spread and ratios."""
    from trouper.actors.executor.topology import num_physical_cores
    from trouper.bench import peers as core

    works = [core.parse_workload(text) for text in workload or core.WORKLOADS]
    pythons = {"vllm": vllm_python, "llama.cpp": llama_python, "transformers": hf_python}
    args = EngineArgs(
        model=model,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max(w.input_len + w.output_len for w in works),
    )
    config = args.resolve(offline=True)
    settings = core.Settings(
        model=config.model.path,
        dtype=config.dtype,
        quantization=config.quantization,
        gguf=gguf,
        peers=() if alone else tuple(peer) if peer else None,
        pythons={name: python for name, python in pythons.items() if python is not None},
        llama_batched_bench=llama_batched_bench,
        threads=num_physical_cores(),
    )
    settings.engines()  # here, because it finds mistakes before anything is loaded
    report.check()
    _, vocabulary = tokenizer_of(config.tokenizer)
    with terminable():
        record = core.compare(settings, works, repeat, vocabulary, seed=seed, tell=note)
    report.finish(ctx, record, _lines(record))


def _lines(record: dict[str, Any]) -> list[str]:
    ready = ", ".join(f"{name} {s:.1f} s" for name, s in record["ready_s"].items() if s)
    lines = [f"ready: {ready}"]
    lines.append(
        f"{'workload':26}{'engine':14}{'median s':>10}{'spread':>8}{'out tok/s':>11}{'all tok/s':>11}"
        f"{'trouper is':>12}"
    )
    for r in record["results"]:
        work = f"{r['requests']} × ({r['input_len']} in, {r['output_len']} out)"
        lines.append(
            f"{work:26}{r['engine']:14}{r['median_s']:10.3f}{100 * r['spread']:6.1f} %"
            f"{r['output_tok_s']:11.1f}{r['total_tok_s']:11.1f}{r['trouper_is']:10.2f} ×"
        )
    return lines
