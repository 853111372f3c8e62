"""The requests of a benchmark: equal seeds give equal requests.

Names and filters are those of vLLM's datasets.
"""

import argparse
import csv
import difflib
import inspect
import random
import textwrap
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from trouper.errors import TrouperValidationError

# ShareGPT, as vLLM prunes it: neither tiny nor longer than small models take.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048

Encode = Callable[[str], Sequence[int]]


class SampleRequest(msgspec.Struct, frozen=True):
    """One request: token ids, and text if it began as text."""

    prompt_token_ids: tuple[int, ...]
    output_len: int
    text: str | None = None
    temperature: float = 1.0


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def random_requests(
    num: int,
    input_len: int,
    output_len: int,
    vocabulary: Sequence[int],
    rng: random.Random,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[SampleRequest]:
    """Random ids: a prefix that all share, then `input_len` of their own.

    Both lengths are drawn from [(1 - r) len, (1 + r) len].
    """
    if not 0 <= range_ratio < 1:
        raise TrouperValidationError(
            "must be in [0, 1)", parameter="random_range_ratio", value=range_ratio
        )
    prefix = rng.choices(vocabulary, k=prefix_len)

    def drawn(length: int) -> int:
        slack = int(length * range_ratio)
        return max(1, rng.randint(length - slack, length + slack))

    return [
        SampleRequest((*prefix, *rng.choices(vocabulary, k=drawn(input_len))), drawn(output_len))
        for _ in range(num)
    ]


def prefix_repetition_requests(
    num: int,
    prefix_len: int,
    suffix_len: int,
    num_prefixes: int,
    output_len: int,
    vocabulary: Sequence[int],
    rng: random.Random,
) -> list[SampleRequest]:
    """Each of a few long prefixes begins equally many prompts; in random order."""
    if num < num_prefixes:
        raise TrouperValidationError(
            f"{num} prompts cannot share {num_prefixes} prefixes",
            parameter="prefix_repetition_num_prefixes",
        )
    prefixes = [rng.choices(vocabulary, k=prefix_len) for _ in range(num_prefixes)]
    requests = [
        SampleRequest((*prefixes[i % num_prefixes], *rng.choices(vocabulary, k=suffix_len)), output_len)
        for i in range(num)
    ]  # fmt: skip
    rng.shuffle(requests)
    return requests


def edit_requests(
    num: int, encode: Encode, rng: random.Random, *, input_len: int, output_len: int
) -> list[SampleRequest]:
    """Make prompts that ask for a function of the standard library again, with a name changed; decoded greedily.

    Args:
        input_len: the most tokens of a function's source.
    """
    sources = [source for source in _functions() if len(encode(source)) <= input_len]
    rng.shuffle(sources)
    found: list[SampleRequest] = []
    for source in (sources[i % len(sources)] for i in range(num)):
        name = source.split("(")[0].removeprefix("def ").strip()
        text = (
            f"Original code:\n```python\n{source}```\n\n"
            f"The same code with the function `{name}` renamed to `{name}_all`:\n```python\ndef {name}_all("
        )
        found.append(SampleRequest(tuple(encode(text)), output_len, text, temperature=0.0))
    return found


def _functions() -> list[str]:
    """Return the sources of functions of middling length, in an order that does not change."""
    modules = argparse, csv, difflib, inspect, textwrap, tokenize
    functions = [
        textwrap.dedent(inspect.getsource(function))
        for module in modules
        for _, function in sorted(inspect.getmembers(module, inspect.isfunction))
        if function.__module__ == module.__name__
    ]
    return [source for source in functions if source.startswith("def ") and len(source) > 400]


def sharegpt_requests(
    path: str,
    num: int,
    encode: Encode,
    rng: random.Random,
    *,
    output_len: int | None = None,
    oversample: bool = True,
) -> list[SampleRequest]:
    """First question and first answer of each conversation of a ShareGPT file.

    Args:
        output_len: None takes the length of the answer.
        oversample: repeat requests when the file has too few.

    Raises:
        TrouperValidationError: no such file, no JSON of that shape, or nothing usable in it.
    """
    found: list[SampleRequest] = []
    conversations = [c.conversations for c in _read(path) if len(c.conversations) >= 2]
    rng.shuffle(conversations)
    for question, answer, *_ in conversations:
        if len(found) == num:
            break
        ids = tuple(encode(question.value))
        length = len(encode(answer.value)) if output_len is None else output_len
        is_short = len(ids) < MIN_TOKENS or (output_len is None and length < MIN_TOKENS)
        if not is_short and len(ids) <= MAX_PROMPT_TOKENS and len(ids) + length <= MAX_TOKENS:
            found.append(SampleRequest(ids, length, question.value))
    if not found:
        raise TrouperValidationError(
            "holds no conversation of usable length", parameter="dataset_path", value=path
        )
    if oversample and len(found) < num:
        found += rng.choices(found, k=num - len(found))
    return found


def check_fit(requests: Sequence[SampleRequest], max_model_len: int) -> None:
    """Raises TrouperValidationError for a request that the model cannot hold."""
    for number, request in enumerate(requests, 1):
        num_in, num_out = len(request.prompt_token_ids), request.output_len
        if num_in + num_out > max_model_len:
            raise TrouperValidationError(
                f"prompt {number} ({num_in} tokens) and its output ({num_out}) exceed the model's "
                f"{max_model_len} tokens",
                parameter="max_model_len",
            )


def _read(path: str) -> list[_Conversation]:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[_Conversation])
    except OSError as error:
        raise TrouperValidationError(
            f"cannot be read: {error.strerror}", parameter="dataset_path", value=path
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrouperValidationError(
            f"not a ShareGPT file: {error}", parameter="dataset_path", value=path
        ) from None
