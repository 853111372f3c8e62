import json
import sys
from contextlib import ExitStack

import pytest

from trouper.bench.studies.server.embeddings import Apart, bodies, documents, ratios


def test_texts_are_reproducible_and_complete():
    texts = documents(40)
    assert texts == documents(40)
    assert len(texts) == 40
    assert max(map(len, texts)) <= 350


def test_ratios_compare_rounds_of_what_was_measured_in_one_dtype():
    results = [
        {"engine": "st", "dtype": "float32", "rounds": [50.0, 100.0, 40.0]},
        {"engine": "trouper", "dtype": "float32", "rounds": [100.0, 150.0, 100.0]},
        {"engine": "trouper", "dtype": "bfloat16", "rounds": [200.0]},
        {"engine": "http", "dtype": "bfloat16", "rounds": [180.0]},
        {"engine": "latency", "dtype": "bfloat16", "added_ms": 0.4},
    ]
    assert ratios(results) == {
        "trouper / st, float32": {"median": 2.0, "of rounds": [2.0, 1.5, 2.5]},
        "http / trouper, bfloat16": {"median": 0.9, "of rounds": [0.9]},
    }


TALKATIVE = """
import sys
print("hello\\nready", flush=True)
for _ in sys.stdin:
    print("a word\\nseconds 0.5", flush=True)
"""


def test_separate_engine_serves_each_round_and_ends():
    with ExitStack() as stack:
        engine = Apart("trouper:float32", [sys.executable, "-c", TALKATIVE], stack)
        for _ in range(2):
            engine.play(10)
    assert engine.figures() == {
        "engine": "trouper",
        "dtype": "float32",
        "docs_s": 20.0,
        "rounds": [20.0, 20.0],
    }


def test_an_engine_that_ends_ends_the_run():
    with ExitStack() as stack:
        with pytest.raises(SystemExit, match="vllm:float32 ended early"):
            Apart("vllm:float32", [sys.executable, "-c", "print('hello')"], stack)


def test_each_text_is_in_one_request_alone_or_in_list():
    docs = documents(5)
    assert [json.loads(body)["input"] for body in bodies(docs, 1)] == docs
    assert [json.loads(body)["input"] for body in bodies(docs, 2)] == [
        docs[:2],
        docs[2:4],
        docs[4:],
    ]
