"""Measure images: the first token, the cost of a repeated image, text beside a tower, and streams beside an image.

    python -m trouper.bench.studies.models.images [--what first,again,streams,text] [--rounds 3] [--encode-ms 30] [--layers 30] [--longest-edge 2048] [--output FILE.json]

The model has the shape of SmolVLM-256M and random weights in bfloat16: an image of 640 x 480 becomes 13 tiles of 64 rows.
It is compared with transformers' `generate`, its image processor included.  Engines of one comparison are open together and
alternate, so that other work on the machine slows both.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np

from trouper import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from trouper.bench.report import about, percentile, write
from trouper.inputs import PromptType

ROWS = "<image>"
SPECIAL = (
    ROWS, "<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)),
)  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "pad_token_id": 2,
}  # fmt: skip
QUESTION = " What is in this image?"
NUM_STREAMS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description="What images cost.")
    parser.add_argument("--what", default=",".join(STUDIES))
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--encode-ms", default=30, type=int)
    parser.add_argument("--layers", default=30, type=int, help="of the text model")
    parser.add_argument("--longest-edge", default=2048, type=int, help="512 makes one tile")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.layers, options.longest_edge)
        for what in options.what.split(","):
            results[what] = STUDIES[what](folder, options)
            print(f"{what}: {results[what]}", flush=True)
    if options.output:
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


def write_model(folder: Path, num_layers: int, longest_edge: int) -> None:
    """Write a model of SmolVLM's shape without weights, with a tokenizer of bytes."""
    import transformers as t
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    config = t.SmolVLMConfig(
        vision_config=TOWER,
        text_config=t.LlamaConfig(**TEXT, num_hidden_layers=num_layers),
        scale_factor=4,
        image_token_id=cast("int", tokenizer.convert_tokens_to_ids(ROWS)),
        tie_word_embeddings=False,
        architectures=["SmolVLMForConditionalGeneration"],
    )
    images = t.SmolVLMImageProcessorPil(
        size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 512}
    )
    for each in (config, images, tokenizer):
        each.save_pretrained(folder)
    (folder / "processor_config.json").write_text('{"image_seq_len": 64}')


def picture(seed: int) -> Any:
    """Make an image of 640 x 480 random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (480, 640, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompt(seed: int, before: str = "", behind: str = QUESTION) -> dict[str, Any]:
    return {"prompt": before + ROWS + behind, "multi_modal_data": {"image": picture(seed)}}


def engine_options(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048,
        "media_processor": "thread", "num_gpu_blocks_override": 1024, "block_size": 16, **given,
    }  # fmt: skip


def timed(work: Callable[[], Any]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def first_token(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Compare the seconds to the first token of an image with those of transformers, processing included."""
    import torch
    import transformers as t

    config = t.AutoConfig.from_pretrained(folder)
    model: Any = t.SmolVLMForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    images = t.SmolVLMImageProcessorPil.from_pretrained(folder)
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {"trouper": [], "transformers": []}
    num_tokens = 0.0
    with LLM(**engine_options(folder)) as llm:
        for seed in range(options.rounds + 1):
            found: list[Any] = []
            ours = timed(
                lambda seed=seed, found=found: found.extend(
                    llm.generate(cast("PromptType", prompt(seed)), one, use_tqdm=False)
                )
            )
            ids = torch.tensor([list(found[0].prompt_token_ids)])
            num_tokens = float(ids.shape[1])

            def library(seed: int = seed, ids: Any = ids) -> None:
                arrays = images(picture(seed), return_tensors="pt")
                arrays["pixel_values"] = arrays["pixel_values"].bfloat16()
                with torch.inference_mode():
                    model.generate(input_ids=ids, **arrays, max_new_tokens=1, do_sample=False)

            theirs = timed(library)
            if seed:
                seconds["trouper"].append(ours)
                seconds["transformers"].append(theirs)
    own, other = (min(values) for values in seconds.values())
    return {
        "prompt_tokens": num_tokens,
        "trouper_s": round(own, 3),
        "transformers_s": round(other, 3),
        "ratio": round(own / other, 3),
    }


def again(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Compare an image that was seen before with its first time, and with a text as long as what is new in its prompt."""
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("new", "text behind", "as text", "text in front")
    }
    with LLM(**engine_options(folder)) as llm:

        def ask(given: Any) -> float:
            return timed(lambda: llm.generate(given, one, use_tqdm=False))

        ask(prompt(99))
        ask("a text, so that nothing is compiled below")
        for seed in range(options.rounds):
            words = f" Another question, number {seed}, of the same image?" * 4
            seconds["new"].append(ask(prompt(seed)))
            seconds["text behind"].append(ask(prompt(seed, behind=words)))
            # The last block of the image is not full, so some of its tokens are computed again.
            seconds["as text"].append(ask(f"{seed}" + "x" * 15 + words))
            seconds["text in front"].append(ask(prompt(seed, before=f"Number {seed}: ")))
    found = {name: min(values) for name, values in seconds.items()}
    return {f"{name} s": round(value, 4) for name, value in found.items()} | {
        "text behind / as text": round(found["text behind"] / found["as text"], 2),
        "text in front / new": round(found["text in front"] / found["new"], 3),
    }


def streams(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the gaps between tokens of running streams: without an image, beside one in slices, and beside one at once."""
    found = dict[str, Any]()
    for name, encode_ms in (("slices", options.encode_ms), ("at once", 0)):
        args = EngineArgs(**engine_options(folder, encode_ms=encode_ms))
        with LLMEngine.from_engine_args(args) as engine:
            alone: list[float] = []
            beside: list[float] = []
            for seed in range(options.rounds + 1):
                quiet, busy = _gaps(engine, seed)
                if seed:
                    alone += quiet
                    beside += busy
        found[name] = {
            "without image p50 ms": round(1e3 * median(alone), 1),
            "beside image p50 ms": round(1e3 * median(beside), 1),
            "beside image p99 ms": round(1e3 * percentile(beside, 99), 1),
            "largest ms": round(1e3 * max(beside), 1),
            "tokens beside the image": len(beside),
        }
    return found


def _gaps(engine: LLMEngine, seed: int) -> tuple[list[float], list[float]]:
    """Return the seconds between steps with tokens of streams: before an image arrives, and until its first token."""
    endless = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
    endless.output_kind = RequestOutputKind.DELTA
    names = [f"{seed} {i}" for i in range(NUM_STREAMS)]
    for name in names:
        engine.add_request(name, f"a text {name}", endless)
    times = list[float]()
    for _ in range(40):
        engine.step()
        times.append(perf_counter())
    quiet = [b - a for a, b in pairwise(times[8:])]
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engine.add_request("image", cast("PromptType", prompt(seed)), one)
    busy, is_over = [perf_counter()], False
    while not is_over:
        outputs = engine.step()
        is_over = any(output.request_id == "image" for output in outputs)
        # Encoded at once, the image delays a single step: the one that also reads its rows.
        if outputs:
            busy.append(perf_counter())
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return quiet, [b - a for a, b in pairwise(busy)]


def text(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Compare requests of text to the model with its tower, and without."""
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    prompts = [f"{i} a prompt of some tokens, without any image" for i in range(16)]
    seconds: dict[str, list[float]] = {"with tower": [], "text model": []}
    common = engine_options(folder, enable_prefix_caching=False)
    with LLM(**common) as seeing, LLM(**common, language_model_only=True) as blind:
        for turn in range(4 * options.rounds + 1):
            for name, llm in zip(seconds, (seeing, blind), strict=True):
                spent = timed(lambda llm=llm: llm.generate(prompts, params, use_tqdm=False))
                if turn:
                    seconds[name].append(spent)
    ours, alone = (min(values) for values in seconds.values())
    return {
        "with_tower_s": round(ours, 3),
        "text_model_s": round(alone, 3),
        "share": round(alone / ours, 3),
    }


STUDIES: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "first": first_token,
    "again": again,
    "streams": streams,
    "text": text,
}


if __name__ == "__main__":
    main()
