"""Measure recurrent models: their speed relative to other engines, and the costs and benefits of saved states.

    python -m trouper.bench.studies.models.recurrent [--geometry qwen35] [--layers 24] [--part speed] [--rounds 3]
        [--gguf FILE --llama-python PATH] [--output FILE.json]

The model has random weights in the shape of Qwen3.5-0.8B or LFM2-1.2B. Without `--part`, all parts run:

    speed    16 × (128 in, 64 out) and one stream of (32 in, 64 out), with transformers
    gguf     the same and a prompt of 2,048 tokens with llama.cpp, if a file is given, which both engines read
    impl     the same with trouper's own implementation and with transformers' modules (model_impl)
    library  the same with transformers' modules in trouper, and with transformers itself
    products 16 × (128 in, 64 out) by transformers, and only the matrix products of this work by torch, whose ratio no engine with
             these products can exceed
    saves    prompts of 2,048 new tokens, and 16 × (512 in, 256 out), with and without saved states
    chat     eight turns of 300 tokens, and a second prompt with the same first 1,000 tokens
    memory   the growth of this process by eight sequences, if 16 or 64 may run
    states   the share of the recurrences in a decode step of one sequence and of 16

All ratios are those of alternating rounds. `--layers` does not change the widths, so ratios stay nearly the same.
"""

import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from trouper import LLM, SamplingParams, TokensPrompt
from trouper.actors.runtime.startup import num_physical_cores
from trouper.bench import peers
from trouper.bench.cli.options import ReportOptions, note
from trouper.bench.studies.command import run_study
from trouper.bench.studies.models import step_profile
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.options import expand_options
from trouper.outputs import RequestOutput

VOCABULARY = range(3, 32000)
WORKLOADS, PROMPT = ("1x32x64", "16x128x64"), "1x2048x1"
TURN_TOKENS, ANSWER_TOKENS, NUM_TURNS, SHARED_TOKENS = 300, 100, 8, 1000
# Prefixes of the names of kernels that update states or prepare their gates.
RECURRENCES = ("causal_conv", "short_conv", "gated_delta", "delta_gates", "ssd")
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 16,
    "kv_cache_memory_bytes": 2**30,
}  # fmt: skip


def write_geometry(folder: Path, geometry: str, num_layers: int | None) -> None:
    """Write the configuration of a model. No other file is needed, since the weights are random."""
    from transformers import Lfm2Config, Qwen3_5TextConfig

    common: dict[str, Any] = {"vocab_size": VOCABULARY.stop, "bos_token_id": 1, "eos_token_id": 2}
    if geometry == "qwen35":
        config = Qwen3_5TextConfig(
            hidden_size=1024, intermediate_size=3584, num_hidden_layers=num_layers or 24, num_attention_heads=8,
            num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
            linear_value_head_dim=128, tie_word_embeddings=True, **common,
        )  # fmt: skip
        config.architectures = ["Qwen3_5ForCausalLM"]
    elif geometry == "lfm2":
        num_layers = num_layers or 16
        attended = [i for i in (2, 5, 8, 10, 12, 14) if i < num_layers]
        config = Lfm2Config(
            hidden_size=2048, intermediate_size=12288, num_hidden_layers=num_layers, num_attention_heads=32,
            num_key_value_heads=8, full_attn_idxs=attended, **common,
        )  # fmt: skip
        config.architectures = ["Lfm2ForCausalLM"]
    else:
        raise TrouperValidationError("must be qwen35 or lfm2", parameter="geometry", value=geometry)
    config.save_pretrained(folder)


class Study:
    """The parts of the study, for one geometry.

    Args:
        gguf: a file of this geometry, for llama.cpp and trouper.
        llama_python: the interpreter of an environment with llama-cpp-python.
    """

    def __init__(
        self, folder: Path, num_rounds: int, gguf: str | None, llama_python: str | None
    ) -> None:
        self._folder, self._num_rounds, self._gguf = str(folder), num_rounds, gguf
        self._pythons = {"llama.cpp": llama_python} if llama_python else {}
        self._random = random.Random(0)

    def speed(self) -> list[dict[str, Any]]:
        """Compare trouper with transformers."""
        return self._compare(self._folder, ("transformers",), "dummy", None)

    def library(self) -> list[dict[str, Any]]:
        """Compare transformers' modules in trouper with transformers itself."""
        return self._compare(self._folder, ("transformers",), "dummy", None, "transformers")

    def gguf(self) -> list[dict[str, Any]]:
        """Compare trouper with llama.cpp on the same file.

        Raises:
            TrouperValidationError: no file is given.
        """
        if self._gguf is None:
            raise TrouperValidationError(
                "the part gguf needs a file of this geometry", parameter="gguf", value=None
            )
        return self._compare(self._gguf, ("llama.cpp",), "auto", self._gguf)

    def _compare(
        self,
        model: str,
        others: tuple[str, ...],
        load_format: str,
        gguf: str | None,
        model_impl: str | None = None,
    ) -> list[dict[str, Any]]:
        settings = peers.Settings(
            model=model, dtype="bfloat16", load_format=load_format, peers=others, gguf=gguf, pythons=self._pythons,
            threads=num_physical_cores(), model_impl=model_impl,
        )  # fmt: skip
        texts = (*WORKLOADS, PROMPT) if gguf else WORKLOADS
        works = [peers.parse_workload(text) for text in texts]
        record = peers.compare(settings, works, self._num_rounds, VOCABULARY, report=note)
        return record["results"]

    def products(self) -> dict[str, Any]:
        """Compare transformers with torch's matrix products of the same work, each with weights from memory.

        The ratio is an upper limit for every engine with these products. An engine whose attention, states and sampling took no time
        would reach it.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        num, input_len, output_len = (int(size) for size in WORKLOADS[1].split("x"))
        config = AutoConfig.from_pretrained(self._folder)
        with torch.inference_mode():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            head = model.get_output_embeddings()
            layers = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]

            def multiply(rows: int, head_rows: int) -> float:
                begin = perf_counter()
                for layer in layers:
                    shape = head_rows if layer is head else rows, layer.in_features
                    torch.nn.functional.linear(
                        torch.ones(shape, dtype=torch.bfloat16), layer.weight
                    )
                return perf_counter() - begin

            found: dict[str, list[float]] = {"prompts_s": [], "steps_s": [], "generate_s": []}
            for turn in range(self._num_rounds + 1):
                ids = torch.tensor([self._tokens(input_len) for _ in range(num)])
                prompts = multiply(num * input_len, num)
                steps = sum(multiply(num, num) for _ in range(output_len - 1))
                begin = perf_counter()
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_len, min_new_tokens=output_len,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
                generate = perf_counter() - begin
                # The first turn chooses kernels.
                if turn:
                    for name, value in zip(found, (prompts, steps, generate), strict=True):
                        found[name].append(value)
        prompts, steps, generate = (min(each) for each in found.values())
        return {**found, "ratio": generate / (prompts + steps)}

    def impl(self) -> dict[str, Any]:
        """Compare trouper's own implementation with transformers' modules in trouper."""
        options = OPTIONS | {"enable_prefix_caching": False}
        ways = {
            "own": options | {"model_impl": "trouper"},
            "transformers": options | {"model_impl": "transformers"},
        }
        return {text: self._interleaved(ways, *map(int, text.split("x"))) for text in WORKLOADS}

    def saves(self) -> dict[str, Any]:
        """Compare runs that save states with runs without a prefix cache. No two prompts share a prefix."""
        ways = {"saving": OPTIONS, "without": OPTIONS | {"enable_prefix_caching": False}}
        return {
            PROMPT: self._interleaved(ways, 1, 2048, 1),
            "16x512x256": self._interleaved(ways, 16, 512, 256),
        }

    def _interleaved(
        self, ways: dict[str, dict[str, Any]], num: int, input_len: int, output_len: int
    ) -> dict[str, Any]:
        """Return the seconds of each way, and how many times as fast the first is as the second."""
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        with ExitStack() as stack:
            engines = {
                way: stack.enter_context(LLM(self._folder, **options))
                for way, options in ways.items()
            }
            for turn in range(self._num_rounds + 1):
                for way, llm in engines.items():
                    prompts = [self._tokens(input_len) for _ in range(num)]
                    begin = perf_counter()
                    _generate(llm, prompts, output_len)
                    # The first turn compiles kernels and records steps.
                    if turn:
                        seconds[way].append(perf_counter() - begin)
        first, second = (min(each) for each in seconds.values())
        return {**{f"{way}_s": each for way, each in seconds.items()}, "ratio": second / first}

    def chat(self) -> dict[str, Any]:
        """Play a chat, and send two prompts with the same beginning.

        Returns:
            The share of the chat's prompt tokens that were computed; the time to the first token of the last turn for each
            computed token, relative to the first turn; and the share of the shared prefix that the second prompt reused.
        """
        with LLM(self._folder, **OPTIONS) as llm:
            _generate(llm, [self._tokens(TURN_TOKENS)], 2)
            known: list[int] = []
            lengths: list[int] = []
            computed: list[int] = []
            seconds: list[float] = []
            for _ in range(NUM_TURNS):
                known += self._tokens(TURN_TOKENS - ANSWER_TOKENS)
                begin = perf_counter()
                (first,) = _generate(llm, [known], 1)
                seconds.append(perf_counter() - begin)
                lengths.append(len(known))
                computed.append(len(known) - (first.num_cached_tokens or 0))
                (answer,) = _generate(llm, [known], ANSWER_TOKENS)
                known += answer.outputs[0].token_ids
            shared = self._tokens(SHARED_TOKENS)
            *_, second = (_generate(llm, [shared + self._tokens(30)], 1)[0] for _ in range(2))
        paces = [each / num for each, num in zip(seconds, computed, strict=True)]
        return {
            "computed_share": sum(computed) / sum(lengths),
            "first_token_s": seconds,
            "last_pace_over_first": paces[-1] / paces[0],
            "shared_hit": (second.num_cached_tokens or 0) / SHARED_TOKENS,
        }

    def memory(self) -> dict[str, Any]:
        """Return the growth of this process in MB when eight sequences run instead of one, with max_num_seqs of 16 and 64."""
        found: dict[str, Any] = {}
        for most in (16, 64):
            options = OPTIONS | {
                "max_num_seqs": most,
                "max_model_len": 256,
                "enable_prefix_caching": False,
                "kv_cache_memory_bytes": 3 * 2**30,
            }
            with LLM(self._folder, **options) as llm:
                for num in (1, 2):
                    _generate(llm, [self._tokens(32)] * num, 8)
                before = _resident_mb()
                _generate(llm, [self._tokens(32) for _ in range(8)], 8)
                found[f"grown_mb_of_{most}"] = round(_resident_mb() - before, 1)
        return found

    def states(self) -> dict[str, Any]:
        """Return the time of a decode step by kernel, and that of the recurrences relative to all other kernels."""
        found: dict[str, Any] = {}
        for num in (1, 16):
            step = step_profile.measure(self._folder, batch_size=num, **OPTIONS)
            shares = dict.fromkeys((True, False), 0.0)
            for name, kernel in step["kernels"].items():
                shares[name.startswith(RECURRENCES)] += kernel["us"]
            found[f"{num}_rows"] = {
                "states_over_rest": round(shares[True] / shares[False], 4),
                **step,
            }
        return found

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=count)


def _generate(llm: LLM, prompts: Sequence[list[int]], output_len: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    return llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False
    )


def _resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) / 1024


PARTS: dict[str, Callable[[Study], Any]] = {
    "speed": Study.speed, "gguf": Study.gguf, "impl": Study.impl, "library": Study.library, "products": Study.products,
    "saves": Study.saves, "chat": Study.chat, "memory": Study.memory, "states": Study.states,
}  # fmt: skip


@expand_options
def recurrent(
    ctx: typer.Context,
    geometry: Annotated[str, typer.Option(help="Shape of the model: qwen35 or lfm2.")] = "qwen35",
    layers: Annotated[
        int | None, typer.Option(min=4, help="Layers of the model; by default all.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="A part to run; repeatable; by default all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each comparison.")] = 3,
    gguf: Annotated[
        str | None, typer.Option(help="A file of this geometry, for llama.cpp.", metavar="FILE")
    ] = None,
    llama_python: Annotated[
        str | None,
        typer.Option(
            help="Python interpreter of an environment with llama-cpp-python.", metavar="PATH"
        ),
    ] = None,
    *,
    report: ReportOptions,
) -> None:
    """Compare recurrent models with other engines, and their prefixes and saved states."""
    names = part or [name for name in PARTS if name != "gguf" or gguf]
    for name in names:
        if name not in PARTS:
            raise TrouperValidationError(
                f"must be one of {', '.join(PARTS)}", parameter="part", value=name
            )
    report.check()
    with tempfile.TemporaryDirectory() as name:
        write_geometry(Path(name), geometry, layers)
        study = Study(Path(name), rounds, gguf, llama_python)
        results = {name: PARTS[name](study) for name in names}
    record = {"geometry": geometry, "layers": layers, "results": results}
    report.finish(ctx, record, (f"{name}: {json.dumps(found)}" for name, found in results.items()))


if __name__ == "__main__":
    sys.exit(run_study(recurrent))
