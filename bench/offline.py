"""Offline throughput on one model folder: the workloads that peers are timed on, one JSON line each.

    python -m trouper.bench.offline MODEL [--dtype bfloat16] [--output FILE.json]

Greedy, `ignore_eos`, no prefix caching, prompts of random ids from seed 0; the first workload warms up.
"""

import argparse
import json
import platform
import random
import time
from pathlib import Path
from typing import Any

from trouper import LLM, SamplingParams, __version__
from trouper.inputs import PromptType

# (requests, prompt tokens, output tokens)
WORKLOADS = ((1, 32, 8), (1, 32, 64), (1, 1024, 1), (16, 128, 64), (16, 1024, 32))
FIRST_ID, LAST_ID = 100, 30_000  # ordinary tokens of the 32k vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description="Offline throughput on one model folder.")
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = run(options.model, options.dtype)
    if options.output:
        about = {
            "trouper": __version__,
            "python": platform.python_version(),
            "dtype": options.dtype,
        }
        options.output.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


def run(model: str, dtype: str) -> list[dict[str, Any]]:
    """Time every workload; prints a line as each is done."""
    started = time.perf_counter()
    with LLM(
        model,
        dtype=dtype,
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=4 * 2**30,
    ) as llm:
        ready_s = time.perf_counter() - started
        results: list[dict[str, Any]] = [{"engine": "trouper", "ready_s": round(ready_s, 2)}]
        print(json.dumps(results[0]), flush=True)
        rng = random.Random(0)
        for num_requests, num_in, num_out in WORKLOADS:
            prompts: list[PromptType] = [
                {"prompt_token_ids": [rng.randrange(FIRST_ID, LAST_ID) for _ in range(num_in)]}
                for _ in range(num_requests)
            ]
            params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            num_made = sum(len(output.outputs[0].token_ids) for output in outputs)
            result = {
                "engine": "trouper",
                "n": num_requests,
                "in": num_in,
                "out": num_out,
                "s": round(seconds, 3),
                "out_tok_s": round(num_made / seconds, 1),
                "total_tok_s": round((num_made + num_requests * num_in) / seconds, 1),
            }
            results.append(result)
            print(json.dumps(result), flush=True)
    return results


if __name__ == "__main__":
    main()
