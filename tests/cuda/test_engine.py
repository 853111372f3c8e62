"""An engine on the GPU gives what an engine on the CPU gives, in float32, whatever it is asked for."""

import pytest

from trouper import SamplingParams

from .engines import make_model, open_llm, run, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=8)
MIXED = [
    SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(temperature=0.8, seed=1, max_tokens=8, n=2),
    SamplingParams(temperature=1.2, top_p=0.9, top_k=20, seed=2, max_tokens=6, min_p=0.01),
    SamplingParams(
        temperature=1.0, seed=3, max_tokens=5, presence_penalty=0.5, logit_bias={7: 2.0}
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(folder):
    with open_llm(folder, "cpu") as llm:
        return tokens(run(llm, GREEDY)), tokens(run(llm, MIXED))


def test_tokens_equal_those_of_the_cpu(folder, expected, machines):
    with open_llm(folder, "cuda") as llm:
        assert tokens(run(llm, GREEDY)) == expected[0]
        assert tokens(run(llm, MIXED)) == expected[1]
        assert all(machine.most_in_flight == 2 for machine in machines)
