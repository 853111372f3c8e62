"""Between numpy and torch, with types: torch's own stubs leave the array's open."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

# The tensor shares the array's memory.
from_numpy = cast("Callable[[np.ndarray], Tensor]", cast("Any", torch).from_numpy)
