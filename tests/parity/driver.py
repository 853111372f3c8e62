"""A scheduler of sixty lines for tests: blind, ragged, and careless about block ids.

It never looks at a sampled token to make a plan, as if every result were still in flight.
"""

import random
from collections.abc import Sequence

import torch

from trouper.actors.executor.runners.cpu.models import HfModel
from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.requests import SequenceId
from trouper.actors.messages.steps import NewSequence, Sampling, StepDone, StepPlan, TokenLogprobs
from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.config.resolve import resolve

GREEDY = Sampling(temperature=0.0)


class Sequence_:
    """One sequence in the driver's care."""

    def __init__(
        self, row: int, prompt: Sequence[int], sampling: Sampling, num_outputs: int
    ) -> None:
        self.row, self.prompt, self.sampling = row, tuple(prompt), sampling
        self.length = len(prompt) + num_outputs  # known and unknown tokens at the end
        self.num_computed = 0
        self.blocks: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def is_running(self) -> bool:
        return self.num_computed < self.length - 1


class Driver:
    """Runs sequences to their ends in chunks of at most `chunk` tokens.

    Args:
        shuffle: draw block ids at random; None = in order.
        stagger: a sequence joins every `stagger` steps.
    """

    def __init__(
        self, runner: CpuRunner, *, chunk: int = 10**6, shuffle: int | None = None, stagger: int = 0
    ) -> None:
        self.runner, self.chunk, self.stagger = runner, chunk, stagger
        info = runner.load()
        self.block_size = info.block_size
        # Each group of layers has a block of its own.
        self.num_tables = len(info.kv_layout.windows)
        self.free = list(range(1, info.num_blocks))
        if shuffle is not None:
            random.Random(shuffle).shuffle(self.free)
        self.free.reverse()
        self.step = 1

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_outputs: int,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
    ) -> list[Sequence_]:
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        sequences = [
            Sequence_(row, prompt, s, num_outputs)
            for row, (prompt, s) in enumerate(zip(prompts, each, strict=True))
        ]
        first = self.step
        while any(s.is_running for s in sequences):
            arrived = sequences
            if self.stagger:
                arrived = sequences[: 1 + (self.step - first) // self.stagger]
            self.advance([s for s in arrived if s.is_running])
        for sequence in sequences:
            self.free += reversed(sequence.blocks)
        return sequences

    def advance(self, sequences: Sequence[Sequence_]) -> StepDone:
        counts = [max(1, min(self.chunk, len(s.prompt) - s.num_computed)) for s in sequences]
        new_rows, new_blocks = [], []
        for s, count in zip(sequences, counts, strict=True):
            needed = -(-(s.num_computed + count) // self.block_size) * self.num_tables
            needed -= len(s.blocks)
            blocks = tuple(self.free.pop() for _ in range(needed))
            s.blocks += blocks
            if s.num_computed == 0:
                row = NewSequence(
                    s.row, SequenceId(s.row), s.prompt, len(s.prompt), blocks, s.sampling
                )
                new_rows.append(row)
            elif blocks:
                new_blocks.append((s.row, blocks))
        plan = StepPlan(
            step=self.step,
            epoch=0,
            request_slots=tuple(s.row for s in sequences),
            num_computed_tokens=tuple(s.num_computed for s in sequences),
            num_scheduled_tokens=tuple(counts),
            num_sampled_tokens=tuple(
                int(s.num_computed + count >= len(s.prompt))
                for s, count in zip(sequences, counts, strict=True)
            ),
            new_sequences=tuple(new_rows),
            new_blocks=tuple(new_blocks),
            reads=self.step - 1 if any(s.num_computed >= len(s.prompt) for s in sequences) else 0,
        )
        done = self.runner.execute(plan)
        self.step += 1
        for i, (s, count) in enumerate(zip(sequences, counts, strict=True)):
            s.num_computed += count
            if plan.num_sampled_tokens[i]:
                s.token_ids += done.token_ids[i]
                if done.logprobs:
                    s.logprobs += done.logprobs[i]
        for entry, positions in done.prompt_logprobs:
            sequences[entry].prompt_logprobs += positions
        return done


def hf_runner(config):
    """A runner that computes the model with the code of the transformers library."""
    return CpuRunner(config, HfModel(config))


def engine_config(path: str, **changes: object) -> EngineConfig:
    """A small float32 engine; `changes` are `EngineArgs`."""
    defaults: dict[str, object] = {
        "dtype": "float32",
        "block_size": 8,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**24,
        "skip_tokenizer_init": True,
    }
    return resolve(EngineArgs(model=str(path), **{**defaults, **changes}))


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]
