"""`trouper bench peers`: compare trouper with vLLM, llama.cpp and transformers."""

from typing import Annotated, Any

import typer

from trouper.bench.cli.options import ReportOptions, note, terminable, tokenizer_of
from trouper.config.args import EngineArgs
from trouper.config.resolve import resolve
from trouper.frontends.cli.options import expand_options

PYTHON: dict[str, Any] = {"metavar": "PATH", "rich_help_panel": "Peers"}


@expand_options
def peers(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder of the model; the demo model by default."),
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(help="GGUF file of the same model, for llama.cpp.", metavar="FILE")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights in all engines except llama.cpp.")
    ] = "bfloat16",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Quantization of trouper (int8 or int4), to compare with a GGUF file of that kind."
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Workload as requests x input x output tokens; repeatable.", metavar="16x128x64"
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of rounds; every engine runs in each.")
    ] = 5,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal prompts.")] = 0,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine to compare with: vllm, llama.cpp, transformers or transformers-cb; repeatable; by default all that are installed.",
            metavar="NAME",
            rich_help_panel="Peers",
        ),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Measure trouper without any other engine.")
    ] = False,
    vllm_python: Annotated[
        str | None, typer.Option(help="Python interpreter of an environment with vLLM.", **PYTHON)
    ] = None,
    llama_python: Annotated[
        str | None,
        typer.Option(help="Python interpreter of an environment with llama-cpp-python.", **PYTHON),
    ] = None,
    llama_batched_bench: Annotated[
        str | None,
        typer.Option(
            help="llama.cpp's own benchmark program, to use instead of llama-cpp-python.", **PYTHON
        ),
    ] = None,
    hf_python: Annotated[
        str | None,
        typer.Option(
            help="Python interpreter of an environment with another transformers.", **PYTHON
        ),
    ] = None,
    *,
    report: ReportOptions,
) -> None:
    """Compare engines on the same prompts in alternating rounds; show medians, spread and ratios."""
    from trouper.actors.runtime.process_resources import num_physical_cores
    from trouper.bench import peers as core

    works = [core.parse_workload(text) for text in workload or core.WORKLOADS]
    pythons = {"vllm": vllm_python, "llama.cpp": llama_python, "transformers": hf_python}
    args = EngineArgs(
        model=model,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max(w.input_len + w.output_len for w in works),
    )
    config = resolve(args, offline=True)
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
    # Reports mistakes before any engine loads its model.
    settings.engines()
    report.check()
    _, vocabulary = tokenizer_of(config.tokenizer)
    with terminable():
        record = core.compare(settings, works, repeat, vocabulary, seed=seed, report=note)
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
