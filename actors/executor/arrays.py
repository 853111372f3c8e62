"""Between numpy and torch, with types: torch's own stubs leave the array's open."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# The tensor shares the array's memory.
from_numpy: Callable[[np.ndarray], Tensor] = torch.from_numpy  # pyright: ignore[reportUnknownMemberType]  # the stubs
