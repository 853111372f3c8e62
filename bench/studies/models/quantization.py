"""Measure the loss of quality by rounded weights, relative to the original weights.

At each position of some source files of this package, the next-token distributions are compared: mean KL divergence in
nats, the share of positions with the same most probable token, and perplexity.

Run it as `python -m trouper.bench.studies.models.quantization`; `--help` lists its options.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import trouper
from trouper import LLM, SamplingParams
from trouper.bench.cli.options import ReportOptions
from trouper.bench.studies.command import run_study
from trouper.frontends.cli.options import expand_options

FILES = ("errors.py", "params.py", "config/args.py", "outputs.py", "metrics.py", "inputs.py")
METHODS = ("int8", "int4")


def measure(model: str | None, *, num_chars: int, num_files: int) -> list[dict[str, Any]]:
    """Measure the loss of quality of each method of rounding.

    Returns one record for the plain bfloat16 weights and one for each method. All use the same texts.
    """
    folder = Path(trouper.__file__).parent
    texts = [(folder / name).read_text()[:num_chars] for name in FILES[:num_files]]
    plain, token_ids = distributions(model, None, texts)
    results = [{"quantization": "none", **compared(plain, plain, token_ids)}]
    for method in METHODS:
        found, _ = distributions(model, method, texts)
        results.append({"quantization": method, **compared(plain, found, token_ids)})
    return results


def distributions(
    model: str | None, quantization: str | None, texts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the model's predictions for some texts.

    Returns log-probabilities [positions, vocabulary] and the tokens that followed [positions].
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    with LLM(
        model, dtype="bfloat16", quantization=quantization, max_logprobs=-1, max_model_len=1024
    ) as llm:
        outputs = llm.generate(list(texts), params, use_tqdm=False)
    rows, token_ids = [], []
    for output in outputs:
        for token_id, entries in zip(
            output.prompt_token_ids or [], output.prompt_logprobs or [], strict=True
        ):
            if entries:
                row = np.empty(len(entries))
                row[list(entries)] = [entry.logprob for entry in entries.values()]
                rows.append(row)
                token_ids.append(token_id)
    return np.array(rows), np.array(token_ids)


def compared(plain: np.ndarray, found: np.ndarray, token_ids: np.ndarray) -> dict[str, Any]:
    divergence = (np.exp(plain) * (plain - found)).sum(-1)
    same = plain.argmax(-1) == found.argmax(-1)
    likely = found[np.arange(len(found)), token_ids]
    return {
        "positions": len(plain),
        "mean_kl_nats": round(float(divergence.mean()), 5),
        "same_top_token": round(float(same.mean()), 4),
        "perplexity": round(float(np.exp(-likely.mean())), 3),
    }


@expand_options
def quantization(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Folder or hub id; the demo when left out.")
    ] = None,
    num_chars: Annotated[int, typer.Option(min=1, help="Characters of each text.")] = 600,
    num_files: Annotated[
        int, typer.Option(min=1, max=6, help="Number of texts to compare on.")
    ] = 6,
    *,
    report: ReportOptions,
) -> None:
    """Measure KL divergence, equal top tokens and perplexity of int8 and int4, relative to the original weights."""
    report.check()
    results = measure(model, num_chars=num_chars, num_files=num_files)
    lines = (
        f"{r['quantization']:10}KL {r['mean_kl_nats']:7.4f} nats   same top token "
        f"{r['same_top_token']:6.1%}   perplexity {r['perplexity']:8.2f}"
        for r in results
    )
    report.finish(ctx, {"results": results}, lines)


if __name__ == "__main__":
    sys.exit(run_study(quantization))
