"""Every kind of prompt_embeds against a real server process: what it answers, how fast, with how much memory.

python -m tests.server.embeds_attack [--optimized]      # prints the tables of docs/prompt-embeds.md
"""

import base64
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from tests.support.embeds_payloads import BAD, DTYPES, GOOD, MAX_ROWS, WIDTH

from .process import started, stop

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": WIDTH,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip
FLAGS = ["--load-format", "dummy", "--skip-tokenizer-init", "--enable-prompt-embeds"]
PATH, JSON = "/v1/completions", [("content-type", "application/json")]
CUTS = 64
REPEATS = 3  # the fastest is what it takes; a shared processor does the rest


def good_payloads():
    # One row less than there may be: the prompt must leave room for a token.
    zeros = [torch.zeros(MAX_ROWS - 1, WIDTH, dtype=dtype) for dtype in DTYPES]
    for name, (write, _) in GOOD.items():
        yield f"{name}, of each dtype", [as_text(write(x)) for x in zeros]


def bad_payloads():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse CSR is a prototype, torch says
        for name, make in BAD.items():
            yield name, [as_text(make())]
    write, _ = GOOD["plain"]
    whole = write(torch.zeros(4, WIDTH))
    yield f"cut at {CUTS} places", [as_text(whole[: len(whole) * i // CUTS]) for i in range(CUTS)]
    yield "no base64", ["not base64!"]
    yield "31 MiB of A", ["A" * (31 * 2**20)]


def as_text(payload):
    return base64.b64encode(payload).decode()


class Attack:
    def __init__(self, server):
        self._server = server
        self.num_wrong = 0

    def row(self, name, texts, expected):
        """What the server makes of some payloads, as a line of the table: the worst of each figure."""
        times, statuses, reason = [], set(), ""
        before = self._memory("VmRSS")
        Path(f"/proc/{self._server.pid}/clear_refs").write_text("5")  # the peak starts anew
        for text in texts:
            body = json.dumps({"prompt_embeds": text, "max_tokens": 1}).encode()
            fastest = float("inf")
            for _ in range(REPEATS):
                begin = time.perf_counter()
                status, _, answer = self._server.request("POST", PATH, body, JSON)
                fastest = min(fastest, time.perf_counter() - begin)
            times.append(fastest)
            statuses.add(status)
            error = json.loads(answer).get("error", {})
            self.num_wrong += status != expected or error.get("param") not in (
                None,
                "prompt_embeds",
            )
            reason = error.get("message", "").rpartition("prompt_embeds: ")[2]
        growth = max(0, self._memory("VmHWM") - before)
        size = max(map(len, texts)) // 1024 + 1
        status = ", ".join(map(str, sorted(statuses)))
        return f"| {name} | {size} | {status} | {1000 * max(times):.1f} | {growth} | {reason} |"

    def _memory(self, name):
        lines = Path(f"/proc/{self._server.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))


def main():
    flags = ("-O",) if "--optimized" in sys.argv else ()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        options = ["--model", folder, "--max-model-len", str(MAX_ROWS), *FLAGS]
        with started(*options, flags=flags) as server:
            attack = Attack(server)
            attack.row("warm", ["AAAA"], 400)
            for payloads, expected in ((good_payloads(), 200), (bad_payloads(), 400)):
                print("\n| payload | KiB | status | ms | KiB more at the peak | reason |")
                print("|---|---|---|---|---|---|")
                for name, texts in payloads:
                    print(attack.row(name, texts, expected))
            stop(server)
    print(f"\n{attack.num_wrong} answers were not as expected")
    sys.exit(attack.num_wrong > 0)


if __name__ == "__main__":
    main()
