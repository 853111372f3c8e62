"""When requests arrive.  Pure.

Source: the serving benchmark of vLLM: gamma-distributed gaps (burstiness 1: a Poisson process), rescaled
so that the last request arrives after exactly num / rate seconds.
"""

import math
import random
from itertools import accumulate


def arrival_times(
    num: int, rate: float, rng: random.Random, *, burstiness: float = 1.0
) -> list[float]:
    """Seconds from the start, ascending.

    Args:
        rate: requests per second; infinity: all at once.
        burstiness: shape of the gamma distribution; below 1 in bursts, above 1 more even.
    """
    if math.isinf(rate):
        return [0.0] * num
    gaps = [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num)]
    times = list(accumulate(gaps))
    scale = num / rate / times[-1] if times and times[-1] > 0 else 1.0
    return [time * scale for time in times]
