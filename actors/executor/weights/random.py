"""Random weights, to measure speed and memory without a checkpoint (`load_format="dummy"`).

They are a checkpoint like any other to the loaders, and the same for every division of a model among workers.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from trouper.actors.executor.models.parameters import Cut, Parameter
from trouper.actors.executor.models.sharding import part_of
from trouper.actors.executor.steps.batch import from_numpy
from trouper.actors.runtime.startup import num_physical_cores

DUMMY_STD = 0.02
# Each thread draws this many numbers at once: 8 MiB.
CHUNK = 2**22


class RandomWeights:
    """Uniform numbers with a standard deviation of 0.02, and norms of 1, so activations and logits stay around 1.

    The i-th number of a tensor is 16 bits of Philox with the key (seed, name), so it depends neither on the number of threads
    nor on the order of reading. A core of Zen 4 draws 190 million numbers per second.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._seed, self._dtype = seed, dtype

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        out = torch.empty(shape, dtype=self._dtype)
        flat, first = out.view(-1), 0
        for chunk in self._chunks(name, flat.numel()):
            flat[first : first + len(chunk)] = from_numpy(chunk)
            first += len(chunk)
        return out.mul_(DUMMY_STD * 3**0.5 / 2**15)

    def read_into(self, name: str, shape: tuple[int, ...], cut: Cut, out: Tensor) -> None:
        """Draw a part of a tensor. The whole tensor is drawn first, so a part does not depend on how it is divided."""
        out.copy_(part_of(self.read(name, shape), cut))

    def mapped(self, name: str, dtype: torch.dtype) -> None:
        """Return None, because there is no file to map."""

    def integers(self, parameter: Parameter, dtype: torch.dtype) -> None:
        """Return None, because no tensor is quantized."""

    def _chunks(self, name: str, size: int) -> Iterator[np.ndarray]:
        """Yield the numbers of a tensor in order, as int16."""
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
        key = int.from_bytes(digest, "little")

        def draw(first: int) -> np.ndarray:
            num = min(CHUNK, size - first)
            bits = np.random.Philox(key=key, counter=first << 64).random_raw(-(-num // 4))
            return bits.view(np.int16)[:num]

        firsts = range(0, size, CHUNK)
        if len(firsts) == 1:
            yield draw(0)
            return
        with ThreadPoolExecutor(num_physical_cores(), "trouper-dummy") as pool:
            yield from pool.map(draw, firsts)
