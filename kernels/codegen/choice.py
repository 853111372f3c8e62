"""The choice of the processor's instructions, by the environment variable TROUPER_KERNELS.

It lets a modern machine compile and compute like an older one, for tests and for bisecting a wrong result.

    all       every instruction of the processor (the default)
    avx-vnni  AVX2 and AVX-VNNI
    avx2      AVX2
    portable  the instructions that every processor of this architecture has
    torch     no compiled kernels; torch computes everything
"""

import functools
import os
from typing import Literal, cast, get_args

from trouper.errors import invalid

VARIABLE = "TROUPER_KERNELS"
Choice = Literal["all", "avx-vnni", "avx2", "portable", "torch"]


@functools.cache
def chosen() -> Choice:
    """Return the value of the variable.

    Without the variable it is `all`, the processor's own instructions.

    Raises:
        TrouperValidationError: the value is none of the supported words.
    """
    found, choices = os.environ.get(VARIABLE) or "all", get_args(Choice)
    if found not in choices:
        raise invalid(VARIABLE, f"must be one of {', '.join(choices)}", found)
    return cast(Choice, found)
