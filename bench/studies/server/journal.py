"""Measure what `--journal` and `--record` cost: servers with each policy answer the same streams in turn.

    python -m trouper.bench.studies.server.journal [--policies record] [--streams 32] [--tokens 200] [--rounds 7] [--model FOLDER] [--output FILE.json]

All servers are running, but only one has work at a time, so that other work on the machine affects all of them equally.  A round sends the
same requests to each server, in a changing order.  A ratio compares a server with the one without a journal in the same round, and the
result is the median over the rounds.  Gaps are the times between two events of a stream at its client, over all rounds.  The processor
time per token is that of the server's process, without the worker process of the model, and hardly depends on other work on the machine.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import anyio

from trouper.bench.datasets import SampleRequest
from trouper.bench.report import about, percentile, write
from trouper.bench.serve import (
    LocalServer,
    Outcome,
    RequestLoad,
    demo_of_length,
    evaluate,
    first_model,
    local_server,
    open_client,
    send_all,
)
from trouper.bench.studies.server.server_under_test import cpu_s

# "none" runs without a journal, and "record" with `--record` instead of one.  The others are values of `--journal-sync`.
POLICIES = "none", "off", "group", "step", "record"
# Range of token ids that stand for ordinary text in nearly every vocabulary.
FIRST_ID, NUM_IDS = 300, 700


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of a journal.")
    parser.add_argument("--policies", nargs="+", choices=POLICIES[1:], default=POLICIES[1:])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="Tokens of each stream.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", help="Folder of a model, or `demo` for the bundled one.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--folder", help="Parent folder of the journals. The cost of `step` depends on its disk."
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
        length = options.tokens + 64
        model = options.model
        if model in (None, "demo"):
            model = stack.enter_context(demo_of_length(length))
            if options.model is None:
                _enlarge(Path(model) / "config.json")
        arguments = [
            model, "--max-num-seqs", str(options.streams), "--max-model-len", str(length),
            "--dtype", options.dtype, "--load-format", "auto" if options.model else "dummy",
        ]  # fmt: skip
        servers = {
            policy: stack.enter_context(local_server(*arguments, *_journal(folder, policy)))
            for policy in ("none", *options.policies)
        }
        results = anyio.run(_measure, servers, options.streams, options.tokens, options.rounds)
    print(
        f"{'journal':10}{'tokens/s':>10}{'ratio':>8}{'cpu us/token':>14}"
        f"{'gap ms p50':>12}{'p99':>8}{'p99.9':>8}"
    )
    for policy, found in results.items():
        print(
            f"{policy:10}{found['tokens_s']:10.1f}{found['ratio']:8.3f}{found['cpu_us']:14.1f}"
            f"{found['gap_p50_ms']:12.2f}{found['gap_p99_ms']:8.2f}{found['gap_p99.9_ms']:8.2f}"
        )
    if options.output:
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


def _enlarge(config: Path) -> None:
    """Give a model's config the shape of SmolLM2-135M, except for its vocabulary."""
    found = json.loads(config.read_text())
    found |= {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    }  # fmt: skip
    config.write_text(json.dumps(found))


def _journal(folder: str, policy: str) -> list[str]:
    if policy == "none":
        return []
    place = str(Path(folder) / policy)
    if policy == "record":
        return ["--record", place, "--record-content"]
    return ["--journal", place, "--journal-sync", policy, "--durable-streams", "all"]


async def _measure(
    servers: dict[str, LocalServer], num_streams: int, num_tokens: int, num_rounds: int
) -> dict[str, dict[str, float]]:
    """Return the figures of each policy.  Raises SystemExit if a request fails."""
    rates: dict[str, list[float]] = {policy: [] for policy in servers}
    gaps: dict[str, list[float]] = {policy: [] for policy in servers}
    cpu_us: dict[str, list[float]] = {policy: [] for policy in servers}
    # The first round warms up.
    for number in range(num_rounds + 1):
        order = list(servers)[number % len(servers) :] + list(servers)[: number % len(servers)]
        for policy in order:
            server = servers[policy]
            before = cpu_s(server.pid)
            url = f"http://127.0.0.1:{server.port}/v1"
            outcomes, rate = await _play(url, num_streams, num_tokens, number)
            if number:
                rates[policy].append(rate)
                gaps[policy] += [1000 * gap for outcome in outcomes for gap in outcome.gaps]
                spent = cpu_s(server.pid) - before
                cpu_us[policy].append(1e6 * spent / (num_streams * num_tokens))
    plain = rates["none"]
    return {
        policy: {
            "tokens_s": median(found),
            "ratio": median(a / b for a, b in zip(found, plain, strict=True)),
            "cpu_us": median(cpu_us[policy]),
            "gap_p50_ms": percentile(gaps[policy], 50),
            "gap_p99_ms": percentile(gaps[policy], 99),
            "gap_p99.9_ms": percentile(gaps[policy], 99.9),
        }
        for policy, found in rates.items()
    }


async def _play(
    url: str, num_streams: int, num_tokens: int, number: int
) -> tuple[list[Outcome], float]:
    """Send all streams at once.  Returns their outcomes and the tokens per second between the first and the last token."""
    load = RequestLoad(url=url, seed=number)
    async with open_client(load) as client:
        load = RequestLoad(url=url, seed=number, model=await first_model(client))
        prompts = [
            tuple(FIRST_ID + (7 * i + 31 * number + k) % NUM_IDS for k in range(16))
            for i in range(num_streams)
        ]
        requests = [SampleRequest(prompt, num_tokens) for prompt in prompts]
        outcomes = await send_all(client, load, requests)
    seconds = max(each.last for each in outcomes) - min(each.sent for each in outcomes)
    record = evaluate(outcomes, seconds, load)
    if record["failed"]:
        raise SystemExit(f"requests failed: {record['errors']}")
    return outcomes, record["output_throughput"]


if __name__ == "__main__":
    main()
