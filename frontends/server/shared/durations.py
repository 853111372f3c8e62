"""Read durations such as `5m`, as Ollama's clients and `--keep-alive` give them."""

import math
import re

from trouper.errors import invalid

DURATION = re.compile(r"-?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+")
PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(value: str | float, parameter: str) -> float:
    """Return a duration in seconds.  A negative one means that there is no end, so it becomes infinity.

    Raises:
        TrouperValidationError: it is neither a number of seconds nor a duration such as 5m or 1h30m.
    """
    if isinstance(value, str) and DURATION.fullmatch(value) is not None:
        if value.startswith("-"):
            return math.inf
        return sum(float(number) * SECONDS[unit] for number, unit in PART.findall(value))
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        rule = "must be a number of seconds or a duration such as 5m or 1h30m"
        raise invalid(parameter, rule, value)
    return math.inf if seconds < 0 else seconds
