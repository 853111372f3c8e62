"""Typed conversion from numpy to torch, since torch's stubs do not declare the argument's type.

Weights, steps and runners all use it, and it must import neither of them, hence a file of its own.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

# The tensor shares the array's memory.
from_numpy = cast("Callable[[np.ndarray], Tensor]", cast("Any", torch).from_numpy)
