"""Create the requests of a benchmark, reproducibly from a seed.

Names and filters are those of vLLM's datasets, so results can be compared. `edit` and `schema` are additions, for
speculation and structured outputs.
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
from typing import Any

import msgspec

from trouper.errors import TrouperValidationError

# vLLM's filter for ShareGPT: no tiny conversations, and none too long for small models.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048

# A schema with eight fields, and the words for random notes about such a record.
FIELDS: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "maxLength": 40},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "email": {"type": "string", "maxLength": 40},
    "city": {"type": "string", "maxLength": 30},
    "is_member": {"type": "boolean"},
    "status": {"enum": ["active", "inactive", "suspended"]},
    "total": {"type": "number"},
    "books": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 4},
}  # fmt: skip
RECORD = {
    "type": "object",
    "properties": FIELDS,
    "required": [*FIELDS],
    "additionalProperties": False,
}
FIRST_NAMES = [
    "Maria",
    "John",
    "Anna",
    "Pierre",
    "Yuki",
    "Olga",
    "Thomas",
    "Lena",
    "Ibrahim",
    "Chloe",
    "Rafael",
    "Ingrid",
]
LAST_NAMES = [
    "Lopez",
    "Smith",
    "Kowalska",
    "Martin",
    "Tanaka",
    "Petrova",
    "Brown",
    "Fischer",
    "Hassan",
    "Dubois",
]
CITIES = [
    "Madrid",
    "Leeds",
    "Warsaw",
    "Lyon",
    "Osaka",
    "Riga",
    "Boston",
    "Bremen",
    "Cairo",
    "Geneva",
    "Lisbon",
    "Oslo",
]
BOOKS = ("The Trial", "Middlemarch", "Emma", "Dracula", "Walden", "The Odyssey", "Hard Times", "Persuasion", "Ulysses")  # fmt: skip

Encode = Callable[[str], Sequence[int]]


class SampleRequest(msgspec.Struct, frozen=True):
    """One request: its token ids, its text if it has one, and the schema of its output if it has one.

    Equal seeds give every engine equal requests.
    """

    prompt_token_ids: tuple[int, ...]
    output_len: int
    text: str | None = None
    temperature: float = 1.0
    schema: dict[str, Any] | None = None


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
    """Return prompts of random ids: a shared prefix of `prefix_len` ids, followed by about `input_len` ids of their own.

    Both lengths are drawn uniformly from [(1 - range_ratio) len, (1 + range_ratio) len].
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
    """Return prompts with a few long prefixes, each shared by equally many prompts, in random order.

    They show the effect of prefix caching, and of routing requests to the replica with the prefix.
    """
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
    """Return prompts that ask to rename a function of the standard library, for greedy decoding.

    Args:
        input_len: maximum number of tokens of a function's source.
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


def schema_requests(
    num: int, encode: Encode, rng: random.Random, *, output_len: int
) -> list[SampleRequest]:
    """Return prompts that ask for the facts of a note as JSON with a schema of eight fields, for greedy decoding.

    Args:
        output_len: maximum number of output tokens; a record may end earlier.
    """
    found: list[SampleRequest] = []
    for _ in range(num):
        first, last, city = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES), rng.choice(CITIES)
        books = " and ".join(f'"{book}"' for book in rng.sample(BOOKS, rng.randint(1, 3)))
        text = (
            f"Note: {first} {last} from {city}, {rng.randint(18, 80)} years old, bought {books} for "
            f"{rng.randint(5, 90)}.{rng.randint(10, 99)} euros. Write to {first.lower()}@{last.lower()}.org. "
            f"{rng.choice(('A member of the club.', 'Not a member of the club.'))}\n\nThe same as a JSON record:\n"
        )
        found.append(SampleRequest(tuple(encode(text)), output_len, text, 0.0, RECORD))
    return found


def _functions() -> list[str]:
    """Return the sources of longer functions of the standard library, in a fixed order."""
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
    """Return the first question of each conversation in a ShareGPT file, with the length of its answer.

    Args:
        output_len: replaces the length of the answer.
        oversample: repeat requests if the file has too few.

    Raises:
        TrouperValidationError: the file cannot be read, is not in ShareGPT's format, or has no usable conversation.
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
            "has no conversation of usable length", parameter="dataset_path", value=path
        )
    if oversample and len(found) < num:
        found += rng.choices(found, k=num - len(found))
    return found


def check_fit(requests: Sequence[SampleRequest], max_model_len: int) -> None:
    """Raise TrouperValidationError if a request exceeds the model's context.

    Call it before the measurement, so that a bad combination of options fails at once.
    """
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
