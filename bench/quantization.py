"""What rounded weights cost: the distance of every next-token distribution to that of the plain weights.

    python -m trouper.bench.quantization [--model FOLDER] [--output FILE.json]

Over the positions of some source files (this package's own): mean KL divergence in nats, share of
positions with the same most probable token, and perplexity.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import trouper
from trouper import LLM, SamplingParams

FILES = ("errors.py", "params.py", "config.py", "outputs.py", "metrics.py", "inputs.py")
NUM_CHARS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description="What rounded weights cost.")
    parser.add_argument("--model")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = Path(trouper.__file__).parent
    texts = [(folder / name).read_text()[:NUM_CHARS] for name in FILES]
    plain, token_ids = distributions(options.model, None, texts)
    results = [{"quantization": "none", **compared(plain, plain, token_ids)}]
    for quantization in ("int8", "int4"):
        found, _ = distributions(options.model, quantization, texts)
        results.append({"quantization": quantization, **compared(plain, found, token_ids)})
    for result in results:
        print(json.dumps(result))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def distributions(
    model: str | None, quantization: str | None, texts: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [positions, vocabulary] and the tokens that followed [positions]."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    with LLM(
        model, dtype="bfloat16", quantization=quantization, max_logprobs=-1, max_model_len=1024
    ) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
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


if __name__ == "__main__":
    main()
