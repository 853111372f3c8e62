"""Measure what images cost outside of the model: event loop, decoding process, start-up and memory.

These parts of `images` need no peer: each compares the engine with itself, without images, without the process or
without the tower.
"""

import argparse
import os
import resource
import sys
import tempfile
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, cast

import anyio

from trouper import LLM, EngineArgs, PoolingParams, SamplingParams
from trouper.bench.report import percentile
from trouper.bench.startup import until_ready
from trouper.bench.studies.models.image_model import (
    ROWS,
    another,
    engine_options,
    photo,
    picture,
    timed,
    write_clip,
    write_model,
)
from trouper.bench.studies.scheduling.loop_gap import Heartbeat
from trouper.config.resolve import resolve
from trouper.frontends.cli.running import Interrupts, run_engine
from trouper.inputs import PromptType

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

IMAGES_PER_S = 8
NUM_PHOTOS = 8
BEAT_S = 0.001
# Limits of `memory`: small, so that all of them are reached early.
PROCESSOR_CACHE_GB, ENCODER_CACHE_GB = 0.25, 0.03
# Resident memory is read after this many images.
IMAGES_PER_SAMPLE = 20


def event_loop(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure how late the engine's event loop is, when it is idle and when images of 1080p arrive at a fixed rate.

    The model is a CLIP that embeds, because larger towers encode fewer images a second than arrive.
    """
    late: dict[str, list[float]] = {"idle": [], "busy": []}
    num_done, busy_s = 0, 0.0
    photos, numbers = [photo(seed) for seed in range(NUM_PHOTOS)], count()

    async def embed(engine: "AsyncLLMEngine") -> None:
        nonlocal num_done
        number = next(numbers)
        file = another(photos[number % NUM_PHOTOS], number)
        given: Any = {"prompt": "", "multi_modal_data": {"image": file}}
        async with engine.encode(given, PoolingParams(task="embed")) as outputs:
            async for _ in outputs:
                num_done += 1

    async def turn(engine: "AsyncLLMEngine", name: str) -> None:
        heart = Heartbeat(BEAT_S)
        async with anyio.create_task_group() as beats:
            beats.start_soon(heart.beat)
            if name == "idle":
                await anyio.sleep(options.seconds)
            else:
                async with anyio.create_task_group() as requests:
                    for _ in range(int(options.seconds * IMAGES_PER_S)):
                        requests.start_soon(embed, engine)
                        await anyio.sleep(1 / IMAGES_PER_S)
            beats.cancel_scope.cancel()
        late[name] += heart.late_ms

    async def act(engine: "AsyncLLMEngine", _: Interrupts) -> None:
        nonlocal num_done, busy_s
        await embed(engine)
        num_done = 0
        for _round in range(options.rounds):
            await turn(engine, "idle")
            begin = perf_counter()
            await turn(engine, "busy")
            busy_s += perf_counter() - begin

    with tempfile.TemporaryDirectory() as name:
        write_clip(Path(name))
        # As in a server, the model computes in a process of its own.
        args = EngineArgs(name, load_format="dummy", dtype="bfloat16", device_worker="process")
        run_engine(resolve(args, offline=True), act)
    p99 = {name: percentile(values, 99) for name, values in late.items()}
    return {
        "images/s": round(num_done / busy_s, 2),
        "file KiB": len(photos[0]) // 1024,
        **{f"{name} p99 ms": round(value, 2) for name, value in p99.items()},
        **{f"{name} largest ms": round(max(values), 1) for name, values in late.items()},
        "more at p99 ms": round(p99["busy"] - p99["idle"], 2),
    }


def processing(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Compare the preprocessing of a photo in the decoding process with the same calls in this process."""
    from trouper.actors.rendering.media.items import MediaPreprocessor
    from trouper.actors.rendering.media.parts import MediaPart
    from trouper.actors.rendering.tokenizer import Tokenizer

    ratios: list[float] = []
    seconds: dict[str, list[float]] = {"process": [], "thread": []}
    used_s = dict.fromkeys(seconds, 0.0)
    photos, numbers = [photo(seed) for seed in range(NUM_PHOTOS)], count()
    with tempfile.TemporaryDirectory() as name:
        write_clip(Path(name))
        made = dict[str, MediaPreprocessor]()
        for place in seconds:
            args = EngineArgs(name, load_format="dummy", media_processor=place)
            media = resolve(args, offline=True).media
            assert media is not None
            made[place] = MediaPreprocessor(media, Tokenizer.load(name))
            made[place].warm()
        for turn in range(-3, 20 * options.rounds):
            spent = dict[str, float]()
            for place in sorted(seconds, reverse=bool(turn % 2)):
                number = next(numbers)
                part = MediaPart(another(photos[number % NUM_PHOTOS], number), None, "image")
                before = processor_s()
                spent[place] = timed(
                    lambda place=place, part=part: made[place].place([part], (), b"", "")
                )
                if turn >= 0:
                    used_s[place] += processor_s() - before
            if turn >= 0:
                ratios.append(spent["process"] / spent["thread"])
                for place, value in spent.items():
                    seconds[place].append(value)
    return {
        **{f"{place} ms": round(1e3 * median(values), 1) for place, values in seconds.items()},
        **{
            f"{place} processor ms": round(1e3 * value / len(ratios), 1)
            for place, value in used_s.items()
        },
        "process / thread": round(median(ratios), 3),
    }


def start_up(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Compare the seconds until a server is ready, with the tower and with the text model only.

    Reading the tower is timed separately: its tensors are copied out of the checkpoint's file, which is in the page cache.
    """
    from safetensors import safe_open

    seconds: dict[str, list[float]] = {"tower": [], "text model": []}
    used_s = {kind: list[float]() for kind in seconds}
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), options.layers, options.longest_edge, has_weights=True)
        serve = [sys.executable, "-m", "trouper", "serve", name, "--port", "0"]
        commands = {
            kind: [*serve, "--max-model-len", "2048", *more]
            for kind, more in zip(seconds, ([], ["--language-model-only"]), strict=True)
        }
        for turn in range(-1, options.rounds):
            for kind in sorted(seconds, reverse=bool(turn % 2)):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                spent = until_ready(commands[kind])
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                if turn >= 0:
                    seconds[kind].append(spent)
                    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    used_s[kind].append(used)

        def read() -> None:
            with safe_open(Path(name) / "model.safetensors", "pt") as file:
                for key in file.keys():  # noqa: SIM118  # it is no dict
                    if "vision_model" in key or "connector" in key:
                        file.get_tensor(key).clone()

        reading = median(timed(read) for _ in range(3))
    more = median(a - b for a, b in zip(*seconds.values(), strict=True))
    return {
        **{f"{kind} s": round(median(values), 2) for kind, values in seconds.items()},
        **{f"{kind} processor s": round(median(values), 2) for kind, values in used_s.items()},
        "more s": round(more, 2),
        "reading s": round(reading, 2),
    }


def memory(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the memory of the engine and its processes while many different images pass, with small caches.

    The tower has one layer and the text model one, because rows and arrays have the same sizes with any number of them.
    """
    limits = PROCESSOR_CACHE_GB + ENCODER_CACHE_GB
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    sizes: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), 1, options.longest_edge, tower_layers=1)
        given = engine_options(
            Path(name),
            media_processor="process",
            mm_processor_cache_gb=PROCESSOR_CACHE_GB,
            encoder_cache_gb=ENCODER_CACHE_GB,
        )
        with LLM(**given) as llm:
            llm.generate("a text", one, use_tqdm=False)
            before = resident_mib()
            for first in range(0, options.images, IMAGES_PER_SAMPLE):
                seeds = range(first, min(first + IMAGES_PER_SAMPLE, options.images))
                prompts = [
                    cast(
                        "PromptType", {"prompt": ROWS, "multi_modal_data": {"image": picture(seed)}}
                    )
                    for seed in seeds
                ]
                for prompt in prompts:
                    llm.generate(prompt, one, use_tqdm=False)
                sizes.append(resident_mib())
    half = len(sizes) // 2
    return {
        "images": options.images,
        "before MiB": round(before),
        "peak MiB": round(max(sizes)),
        "more MiB": round(max(sizes) - before),
        "limits of caches MiB": round(limits * 2**10),
        "second half / first half": round(max(sizes[half:]) / max(sizes[:half]), 3),
    }


def processor_s() -> float:
    """Return the processor time of this process and of its living children, in seconds."""
    found = process_time()
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            found += int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) / 1e9
    return found


def resident_mib() -> float:
    """Return the memory of this process and all its children, in MiB; memory that several share counts once."""
    waiting, found = [os.getpid()], 0
    while waiting:
        process = Path(f"/proc/{waiting.pop()}")
        try:
            lines = (process / "smaps_rollup").read_text().splitlines()
            children = [each.read_text() for each in (process / "task").glob("*/children")]
        except OSError:
            # The process has just ended.
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        waiting += [int(child) for each in children for child in each.split()]
    return found / 1024
