"""Measure the cost of parsing streamed answers: deltas of ordinary answers, and a megabyte of hostile text.

    python -m trouper.bench.studies.server.parsers [--answers tests/dialects/golden] [--repeat 5] [--output FILE.json]

A delta has one to eight characters, like a token. Hostile texts arrive in deltas of 1,024 characters; the time of one
blocks the event loop. The best of several repeats counts, because only the machine makes a run slower. All times are
processor time.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

from trouper.bench.report import about, write
from trouper.frontends.dialects.core import AnswerParser
from trouper.frontends.dialects.table import BY_NAME

MEGABYTE, SLICE = 2**20, 1024
BOUNDS = {"us_per_delta": 20.0, "hostile_ms": 50.0, "slice_ms": 5.0}
TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}
    },
    "g": {},
}
# The dialect, the beginning of the answer, and the text repeated after it.
HOSTILE = (
    ("hermes", "", "<tool_call>"),
    ("hermes", "", "<tool_call"),
    ("hermes", "", '<tool_call>{"name":"f","arguments":{}}</tool_call>'),
    ("hermes", "<tool_call>{", '"a":1,'),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":', "[],"),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":', "["),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"', '\\"'),
    ("hermes", '<tool_call>{"name":"', "f"),
    ("hermes", "", " "),
    ("hermes", "<think>", "</thin"),
    ("json", "", "[{"),
    ("mistral", "[TOOL_CALLS]f", "[" * 60 + "]" * 60),
    ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>1</parameter>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=s>", "</parameter"),
    ("qwen3_coder", "<tool_call>", "<function=f>"),
    ("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>", "</arg_"),
    ("pythonic", "[f(a=[", "1,"),
    ("pythonic", "[f(a=[", "[],"),
    ("pythonic", "[f(a='", "\\n"),
    ("pythonic", "[f(a=", "__import__('os'),"),
    ("gemma4", "<|tool_call>call:f{a:[", "1,"),
    ("openai", "", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
    ("openai", "", "<|channel|>"),
)


class WrittenAnswer(NamedTuple):
    dialect: str
    text: str


def parser_of(dialect: str) -> AnswerParser:
    """Return a parser of answers with reasoning and tool calls."""
    found = BY_NAME[dialect]
    return AnswerParser(found, TOOLS, reasoning=found.reasoning)


def hostile_text(beginning: str, pattern: str, length: int = MEGABYTE) -> str:
    """Repeat the pattern after the beginning, up to this many characters."""
    return (beginning + pattern * (length // len(pattern) + 1))[:length]


def measure_deltas(answers: Sequence[WrittenAnswer], repeat: int) -> dict[str, float]:
    """Return the microseconds that a delta takes, by dialect: the mean over its answers."""
    found: dict[str, float] = {}
    for dialect in sorted({answer.dialect for answer in answers}):
        cut = [_pieces(answer.text) for answer in answers if answer.dialect == dialect]
        num = sum(map(len, cut))
        found[dialect] = min(sum(_seconds(dialect, pieces)[0] for pieces in cut) for _ in range(repeat)) / num * 1e6  # fmt: skip
    return found


def measure_hostile(repeat: int, length: int = MEGABYTE) -> list[dict[str, Any]]:
    """Return the milliseconds of each hostile text and of its longest slice."""
    rows: list[dict[str, Any]] = []
    for dialect, beginning, pattern in HOSTILE:
        text = hostile_text(beginning, pattern, length)
        pieces = [text[i : i + SLICE] for i in range(0, length, SLICE)]
        runs = [_seconds(dialect, pieces) for _ in range(repeat)]
        name = f"{dialect}: {beginning[-24:]}{pattern[:24]} …"
        total, longest = (1000 * min(each) for each in zip(*runs, strict=True))
        rows.append({"text": name, "ms": total, "slice_ms": longest})
    return rows


def _pieces(text: str) -> list[str]:
    lengths, pieces = random.Random(len(text)), list[str]()
    while text:
        length = lengths.randint(1, 8)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def _seconds(dialect: str, pieces: Sequence[str]) -> tuple[float, float]:
    """Parse an answer. Returns its processor time in seconds, and that of its slowest delta."""
    parser, longest = parser_of(dialect), 0.0
    began = before = thread_time()
    for piece in pieces:
        parser.feed(piece)
        now = thread_time()
        longest, before = max(longest, now - before), now
    parser.end()
    return thread_time() - began, longest


def read_answers(folder: Path) -> list[WrittenAnswer]:
    """Read the answers of a folder: a file for each dialect, a list of objects with an `answer`."""
    return [
        WrittenAnswer(path.stem, row["answer"])
        for path in sorted(folder.glob("*.json"))
        for row in json.loads(path.read_text())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of parsing answers.")
    parser.add_argument("--answers", type=Path, default=Path("tests/dialects/golden"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    answers = read_answers(options.answers)
    if not answers:
        parser.error(
            f"found no answers in {options.answers}; name the folder of golden files by --answers"
        )
    deltas = measure_deltas(answers, options.repeat)
    hostile = measure_hostile(options.repeat)
    worst = {
        "us_per_delta": max(deltas.values()),
        "hostile_ms": max(row["ms"] for row in hostile),
        "slice_ms": max(row["slice_ms"] for row in hostile),
    }
    for name, value in deltas.items():
        print(f"{name:20} {value:6.1f} µs a delta")
    for row in hostile:
        print(f"{row['ms']:6.1f} ms, slices up to {row['slice_ms']:5.2f} ms: {row['text']!r}")
    for name, bound in BOUNDS.items():
        verdict = "within" if worst[name] <= bound else "beyond"
        print(f"worst {name}: {worst[name]:.1f}, {verdict} its bound of {bound:g}")
    if options.output:
        results = {"us_per_delta": deltas, "hostile": hostile, "worst": worst, "bounds": BOUNDS}
        write(str(options.output), {"about": about(sys.argv[1:]), "results": results})


if __name__ == "__main__":
    main()
