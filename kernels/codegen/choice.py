"""Which of the processor's instructions kernels may use, by TROUPER_KERNELS.

all       what there is: the default
avx-vnni  AVX2 and AVX-VNNI
avx2      AVX2
portable  what every processor of the kind has
torch     no kernels: torch's operations instead
"""

import functools
import os
from typing import Literal, cast, get_args

from trouper.errors import invalid

VARIABLE = "TROUPER_KERNELS"
Choice = Literal["all", "avx-vnni", "avx2", "portable", "torch"]


@functools.cache
def chosen() -> Choice:
    """Return what the variable says.

    Raises:
        TrouperValidationError: it holds another word.
    """
    found, choices = os.environ.get(VARIABLE) or "all", get_args(Choice)
    if found not in choices:
        raise invalid(VARIABLE, f"must be one of {', '.join(choices)}", found)
    return cast(Choice, found)
