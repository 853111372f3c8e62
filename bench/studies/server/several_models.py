"""Run three models in memory for two, kill their workers, and compare each answer with a server of one model.

    python -m trouper.bench.studies.server.several_models [--requests 200] [--kill-every 3] [--clients 16]

The models are the demo model, the demo model with noise in its weights, and a small random encoder.  The memory budget is the
size of all three minus the smallest, so the server swaps models all the time.  Chats and completions are greedy or seeded, in
float32, streamed or whole.  The study prints different answers, the number of killed workers and the peak of the workers'
proportional memory.  The exit status is 1 if an answer differs or the peak exceeds the budget by more than 5 %.
"""

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from trouper.bench.serve import local_server
from trouper.config.model import DEMO_MODEL

MAX_SEQS = 8
OPTIONS = (
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", str(MAX_SEQS),
    "--kv-cache-memory-bytes", "64M", "--device-worker", "process",
)  # fmt: skip
WORDS = ("def", "return", "x", "foo", "bar", "if", "import", "class")
WATCH_S = 0.1


class DrawnRequest(NamedTuple):
    """The path and the body of a request. The body names the model."""

    path: str
    body: dict[str, Any]


def main() -> None:
    """Send the requests to servers of one model each, then to one server with all models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kill-every", type=float, default=3.0, help="Seconds; 0 kills no worker.")
    parser.add_argument(
        "--turn", default="0.5s", help="Time a model stays in memory while others have requests."
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(compare(Path(folder), args.requests, args.clients, args.kill_every, args.turn))


def compare(
    folder: Path, num_requests: int, num_clients: int, kill_every_s: float, turn: str
) -> int:
    """Print the figures and return the exit status."""
    models = make_models(folder)
    asked = drawn_requests(num_requests)
    wanted: dict[int, str] = {}
    for name, path in models.items():
        own = [i for i, each in enumerate(asked) if each.body["model"] == name]
        with local_server(path, "--served-model-name", name, *OPTIONS) as server:
            answers = ask_all(server.port, [asked[i] for i in own], MAX_SEQS)
        wanted |= dict(zip(own, answers, strict=True))
    named = [text for name, path in models.items() for text in ("--model", f"{name}={path}")]
    with local_server(*named, *OPTIONS, "--memory-budget", "64GiB") as server:
        estimates = estimated_bytes(server.port)
    budget = sum(estimates) - min(estimates)
    limits = ("--memory-budget", str(budget), "--turn", turn, "--max-worker-restarts", "1000")
    with local_server(*named, *OPTIONS, *limits) as server:
        answered: list[int] = []
        harm = Harm(server.pid, kill_every_s, answered)
        try:
            found = ask_all(server.port, asked, num_clients, answered)
        finally:
            harm.end()
    different = [i for i in range(num_requests) if found[i] != wanted[i]]
    for i in different[:3]:
        print(
            f"request {i} to {asked[i].body['model']}: returned {found[i]!r}, expected {wanted[i]!r}"
        )
    share = harm.peak_bytes / budget
    print(
        f"{num_requests} requests, {len(different)} differ; {harm.num_killed} workers killed; "
        f"peak {harm.peak_bytes >> 20} of {budget >> 20} MiB ({share:.2f})"
    )
    return int(bool(different) or share > 1.05)


def make_models(folder: Path) -> dict[str, str]:
    """Write the models that are not bundled. Returns the paths of all three by name."""
    noisy, encoder = folder / "noisy", folder / "encoder"
    shutil.copytree(DEMO_MODEL, noisy)
    encoder.mkdir()
    dice = torch.Generator().manual_seed(3)
    weights = load_file(noisy / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            noise = 0.02 * torch.randn(weight.shape, generator=dice)
            weights[name] = (weight.float() + noise).to(weight.dtype)
    save_file(weights, noisy / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, encoder / name)
    config = BertConfig(
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=300,
    )
    torch.manual_seed(5)
    BertModel(config).save_pretrained(encoder)
    return {"chat": str(noisy), "code": str(DEMO_MODEL), "embed": str(encoder)}


def drawn_requests(num: int) -> list[DrawnRequest]:
    """Draw chats, completions and embeddings. Half of the chats and completions are streams, half are greedy."""
    dice = random.Random(0)
    drawn = []
    for seed in range(num):
        text = " ".join(dice.choice(WORDS) for _ in range(dice.randint(2, 30)))
        kind = dice.choice(("chat", "chat", "completion", "completion", "embed"))
        if kind == "embed":
            drawn.append(DrawnRequest("/v1/embeddings", {"model": "embed", "input": text}))
            continue
        body: dict[str, Any] = {
            "model": dice.choice(("chat", "code")), "max_tokens": dice.randint(1, 48), "seed": seed,
            "temperature": dice.choice((0, 0.8)), "stream": dice.random() < 0.5,
        }  # fmt: skip
        if kind == "chat":
            body["messages"] = [{"role": "user", "content": text}]
            drawn.append(DrawnRequest("/v1/chat/completions", body))
        else:
            drawn.append(DrawnRequest("/v1/completions", {**body, "prompt": text}))
    return drawn


def ask_all(
    port: int, asked: Sequence[DrawnRequest], num_clients: int, answered: list[int] | None = None
) -> list[str]:
    """Return the answer to each request: its text, its embedding rounded to four places, or its error.

    The number of each answered request is appended to `answered`.
    """

    def ask(number: int) -> str:
        answer = _ask(port, asked[number])
        if answered is not None:
            answered.append(number)
        return answer

    with ThreadPoolExecutor(num_clients) as pool:
        return list(pool.map(ask, range(len(asked))))


def _ask(port: int, asked: DrawnRequest) -> str:
    call = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        body = json.dumps(asked.body).encode()
        call.request("POST", asked.path, body, {"content-type": "application/json"})
        answer = call.getresponse()
        text = answer.read().decode()
    finally:
        call.close()
    if answer.status != 200:
        return f"{answer.status}: {text[:200]}"
    if not asked.body.get("stream"):
        return _answer_in(json.loads(text))
    # Keep-alive comments and the final `[DONE]` are not JSON.
    frames = [part[6:] for part in text.split("\n\n") if part.startswith("data: {")]
    return "".join(_answer_in(json.loads(frame)) for frame in frames)


def _answer_in(reply: dict[str, Any]) -> str:
    if "error" in reply:
        return f"error: {reply['error']}"
    if "data" in reply:
        return str([round(number, 4) for number in reply["data"][0]["embedding"]])
    found = ""
    for choice in reply["choices"]:
        part = choice.get("message") or choice.get("delta") or choice
        found += part.get("text") or part.get("content") or ""
    return found


def estimated_bytes(port: int) -> list[int]:
    """Return the server's estimate of each model's memory while it is awake, in bytes."""
    call = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    call.request("GET", "/v1/models")
    cards = json.loads(call.getresponse().read())["data"]
    call.close()
    return [sum(card["bytes"][part] for part in ("process", "weights", "kv")) for card in cards]


class Harm:
    """Kill a random worker of a server at intervals, and record the peak memory of all workers, until `end`.

    At least one request is answered between two kills.  Otherwise a machine on which a worker starts more slowly than
    workers are killed would never answer any.
    """

    def __init__(self, pid: int, kill_every_s: float, answered: Sequence[int]) -> None:
        self.num_killed = self.peak_bytes = 0
        self._pid, self._kill_every_s, self._answered = pid, kill_every_s, answered
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        dice, num_looks, num_before = random.Random(5), 0, -1
        while not self._is_over.wait(WATCH_S):
            num_looks += 1
            workers = _workers_of(self._pid)
            self.peak_bytes = max(self.peak_bytes, sum(map(_memory_of, workers)))
            is_due = num_looks * WATCH_S >= self._kill_every_s and len(self._answered) > num_before
            if workers and self._kill_every_s and is_due:
                num_looks, num_before = 0, len(self._answered)
                with suppress(ProcessLookupError):
                    os.kill(dice.choice(workers), signal.SIGKILL)
                    self.num_killed += 1


def _workers_of(pid: int) -> list[int]:
    texts = [_text(task / "children") for task in Path(f"/proc/{pid}/task").iterdir()]
    return [
        int(child)
        for text in texts
        for child in text.split()
        if "trouper.actors.executor.workers.worker" in _text(Path(f"/proc/{child}/cmdline"))
    ]


def _memory_of(pid: int) -> int:
    """Return the proportional memory of a process in bytes, or 0 if it has ended."""
    lines = _text(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
