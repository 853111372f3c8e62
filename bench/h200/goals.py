"""Goals for an H200: the cases, their lower bounds from bytes and FLOPs, and the table of results.  Pure.

    decode    one step of B sequences at a context:  (weights + KV) / bandwidth
    prefill   a single prompt:                       2 · weights · S + causal attention, at the matrix rate
    workload  256 requests, lengths uniform in 100 … 1,024: every prompt, then every step's larger of both

A goal is a share of the lower bound, computed from limits measured in the same run.
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, Literal, NamedTuple

from trouper.config.checkpoint.model_path import GEOMETRIES

# Limits of an H200, used if a run has not measured them.
BYTES_S, FLOPS_S = 4.3e12, 790e12
# Share of a decode step in which the GPU may be idle.
MAX_IDLE = 0.05
DECODE_STEPS = 128
TINY_BATCH, TINY_LENGTH = 2, 24

Kind = Literal["decode", "prefill", "workload"]


class Goal(NamedTuple):
    """One case with the shares of the lower bound to accept and to aim at.

    `length` is the context in the middle of the decode steps, the length of the prompt, or the maximum length.
    """

    model: str
    kind: Kind
    batch_size: int
    length: int
    accept: float
    stretch: float

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"{self.model} prefill {self.length}"
        suffix = "" if self.kind == "workload" else f" B={self.batch_size}"
        return f"{self.model} {self.kind}{suffix}"

    def shrunk(self) -> "Goal":
        """Return a tiny version of the case, of the same kind, with which the tests run the whole procedure on a CPU in seconds."""
        batch, length = min(self.batch_size, TINY_BATCH), min(self.length, TINY_LENGTH)
        return self._replace(model="tiny", batch_size=batch, length=length)


GOALS = (
    Goal("llama-3.1-8b", "decode", 1, 1024, 0.70, 0.82),
    Goal("llama-3.1-8b", "decode", 32, 1024, 0.72, 0.82),
    Goal("llama-3.1-8b", "decode", 256, 1024, 0.68, 0.75),
    Goal("llama-3.1-8b", "prefill", 1, 8192, 0.60, 0.72),
    Goal("llama-3.1-8b", "prefill", 1, 1024, 0.50, 0.65),
    Goal("llama-3.1-8b", "workload", 256, 1024, 0.62, 0.75),
    Goal("qwen3-0.6b", "decode", 1, 1024, 0.27, 0.41),
    Goal("qwen3-0.6b", "decode", 32, 1024, 0.50, 0.65),
    Goal("qwen3-0.6b", "decode", 256, 1024, 0.65, 0.78),
    Goal("qwen3-0.6b", "workload", 256, 1024, 0.55, 0.70),
)


class Costs(NamedTuple):
    """The costs of one preset in 16 bits.

    Attributes:
        layers, head: parameters that each token is multiplied with.
        kv_bytes: bytes of the KV cache for each token.
        attention_flops: FLOPs for each pair of a query and a key.
    """

    layers: int
    head: int
    kv_bytes: int
    attention_flops: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Costs":
        width, hidden = int(config["head_dim"]), int(config["hidden_size"])
        num_q, num_kv = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        num_layers = int(config["num_hidden_layers"])
        layer = hidden * (2 * num_q + 2 * num_kv) * width + 3 * hidden * int(config["intermediate_size"])  # fmt: skip
        kv_bytes = num_layers * 2 * num_kv * width * 2
        flops = num_layers * 4 * num_q * width
        return cls(num_layers * layer, hidden * int(config["vocab_size"]), kv_bytes, flops)

    def decode_s(self, num_keys: int, roofs: "Ceilings") -> float:
        """Return the minimum seconds of a decode step; `num_keys` counts the keys of all sequences.

        Memory is the limit of decoding: every weight and every key is read once.
        """
        return (2 * (self.layers + self.head) + num_keys * self.kv_bytes) / roofs.bytes_s

    def serial_decode_s(self, batch_size: int, num_keys: int, roofs: "Ceilings") -> float:
        """Return the seconds of products and then attention, each at the limit that binds it.

        It is a more realistic limit than `decode_s`, because products and attention do not overlap.
        """
        num_params = self.layers + self.head
        products = max(2 * num_params / roofs.bytes_s, 2 * batch_size * num_params / roofs.flops_s)
        return products + num_keys * self.kv_bytes / roofs.bytes_s

    def prefill_s(self, num: int, roofs: "Ceilings") -> float:
        return (2 * self.layers * num + self.attention_flops * num * num / 2) / roofs.flops_s


class Ceilings(NamedTuple):
    bytes_s: float = BYTES_S
    flops_s: float = FLOPS_S


def workload(num: int, longest: int) -> tuple[list[list[int]], list[int]]:
    """Return prompts and output lengths; 256 of up to 1,024 have 142,827 input and 133,966 output tokens.

    The lengths are drawn from a fixed seed, so all engines get the same work.
    """
    rng, least = Random(0), min(100, longest // 2)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(least, longest))] for _ in range(num)]  # fmt: skip
    return prompts, [rng.randint(least, longest) for _ in range(num)]


def floor_s(goal: Goal, roofs: Ceilings) -> float:
    """Return the minimum seconds of a decode step, a prefill, or a whole workload.

    No implementation can be faster, because it counts only the necessary bytes and FLOPs.
    """
    costs = Costs.of(GEOMETRIES[goal.model])
    if goal.kind == "decode":
        return costs.decode_s(goal.batch_size * goal.length, roofs)
    if goal.kind == "prefill":
        return costs.prefill_s(goal.length, roofs)
    prompts, lengths = workload(goal.batch_size, goal.length)
    total = sum(costs.prefill_s(len(p), roofs) + 2 * costs.head / roofs.flops_s for p in prompts)
    for step in range(1, max(lengths)):
        live = [len(p) + step for p, length in zip(prompts, lengths, strict=True) if length > step]
        total += costs.serial_decode_s(len(live), sum(live), roofs)
    return total


def num_tokens(goal: Goal) -> int:
    """Return the tokens generated in the time of `floor_s`, or the prompt tokens of a prefill.

    Divided by the seconds it is the throughput in the table.
    """
    if goal.kind == "workload":
        return sum(workload(goal.batch_size, goal.length)[1])
    return goal.length if goal.kind == "prefill" else goal.batch_size


def table(
    records: Sequence[Mapping[str, Any]], peers: Sequence[Mapping[str, Any]], roofs: Ceilings
) -> Iterator[str]:
    """Yield the lines of a Markdown table.

    A record has `goal`, `seconds` and perhaps `idle_share`; the peers' records are of the same work.
    """
    yield f"roofs: {roofs.bytes_s / 1e12:.3g} TB/s, {roofs.flops_s / 1e12:.4g} TFLOP/s"
    yield ""
    yield "| case | floor, ms | ms | tokens/s | share | accept | reached | idle | transformers-cb, ms | trouper is |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    theirs = {Goal(**peer["goal"]).name: peer["seconds"] for peer in peers}
    for record in records:
        goal, seconds = Goal(**record["goal"]), record["seconds"]
        floor, peer = floor_s(goal, roofs), theirs.get(goal.name)
        share, idle = floor / seconds, record.get("idle_share")
        is_reached = share >= goal.accept and (idle is None or idle < MAX_IDLE)
        cells = (
            goal.name,
            f"{1e3 * floor:.4g}",
            f"{1e3 * seconds:.4g}",
            f"{num_tokens(goal) / seconds:.0f}",
            f"{share:.0%}",
            f"{goal.accept:.0%}" + f", idle < {MAX_IDLE:.0%}" * (idle is not None),
            "yes" if is_reached else "no",
            "" if idle is None else f"{idle:.1%}",
            "" if peer is None else f"{1e3 * peer:.4g}",
            "" if peer is None else f"{peer / seconds:.2f} ×",
        )
        yield f"| {' | '.join(cells)} |"
