import json

from trouper.bench.embeddings import bodies, documents, ratios


def test_the_texts_are_the_same_each_time_and_as_many_as_asked_for():
    texts = documents(40)
    assert texts == documents(40)
    assert len(texts) == 40
    assert max(map(len, texts)) <= 350


def test_ratios_compare_what_was_measured_in_one_dtype():
    results = [
        {"engine": "st", "dtype": "float32", "docs_s": 50.0},
        {"engine": "trouper", "dtype": "float32", "docs_s": 100.0},
        {"engine": "trouper", "dtype": "bfloat16", "docs_s": 200.0},
        {"engine": "http", "dtype": "bfloat16", "docs_s": 180.0},
        {"engine": "http16", "dtype": "bfloat16", "docs_s": 190.0},
        {"engine": "latency", "dtype": "bfloat16", "added_ms": 0.4},
    ]
    assert ratios(results) == {
        "trouper / st, float32": 2.0,
        "http / trouper, bfloat16": 0.9,
        "http16 / trouper, bfloat16": 0.95,
    }


def test_each_text_is_in_one_request_alone_or_in_a_list():
    docs = documents(5)
    assert [json.loads(body)["input"] for body in bodies(docs, 1)] == docs
    assert [json.loads(body)["input"] for body in bodies(docs, 2)] == [
        docs[:2],
        docs[2:4],
        docs[4:],
    ]
