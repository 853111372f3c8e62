"""The option, the search for drafts, their lengths, and the part of the scheduling policy."""

import json
import logging
import shutil

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.test_policy import Desk
from tests.support.engines import expected, simulated_engine
from trouper import SamplingParams
from trouper.actors.executor.sampling.drafter import FEW_MATCHING, find, last_match, num_equal
from trouper.actors.executor.sampling.matching import (
    CHANCES,
    CHANCES_OF_MODEL,
    LONGEST_PAUSE,
    MOST_TOKENS,
    PAUSE,
    RUNS,
    SEPARATOR,
    Pace,
    RecentAnswers,
)
from trouper.config.args import EngineArgs
from trouper.config.model import DEMO_MODEL
from trouper.config.resolve import resolve
from trouper.config.speculation import SpeculativeConfig, speculative_config
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

NGRAM = SpeculativeConfig(
    method="ngram", num_speculative_tokens=7, prompt_lookup_min=2, prompt_lookup_max=3
)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=7)
BOUNDED = SpeculativeConfig(
    method="suffix", num_speculative_tokens=7, suffix_decoding_max_spec_factor=1.0
)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


# The option


@pytest.mark.parametrize("nothing", [None, {}])
def test_it_is_off_by_default(nothing):
    assert speculative_config(nothing, "cpu") is None


def test_one_bound_of_the_ngrams_is_both():
    found = speculative_config({"method": "ngram", "prompt_lookup_max": 4}, "cpu")
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == (4, 4)


def test_too_many_drafts_become_seven_and_are_logged(caplog):
    with caplog.at_level(logging.INFO, "trouper"):
        found = speculative_config({"method": "suffix", "num_speculative_tokens": 32}, "cpu")
    assert found.num_speculative_tokens == 7
    assert "num_speculative_tokens is lowered to 7" in caplog.text


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"method": "ngram", "num_tokens": 3}, "num_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "spec_factor"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "cached_requests"),
        ("ngram", "must be a dict"),
        ({"method": "draft_model"}, "model must be set with method='draft_model'"),
        ({"method": "suffix", "model": "draft"}, "model must be set with method='draft_model'"),
        ({"method": "suffix", "revision": "main"}, "revision"),
    ],
)
def test_a_wrong_value_is_named(value, named):
    with pytest.raises(TrouperValidationError, match=named) as raised:
        speculative_config(value, "cpu")
    assert raised.value.parameter == "speculative_config"


def test_draft_model_not_not_taken_for_model():
    with pytest.raises(TrouperValidationError, match="draft model: no such model") as raised:
        resolve(EngineArgs(device="cpu", speculative_config={"model": "/no/such/folder"}))
    assert raised.value.parameter == "speculative_config"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"method": "eagle3"}, "eagle3"),
        ({"method": "mtp", "model": "draft"}, "mtp"),
        ({"method": "ngram", "parallel_drafting": True}, "parallel_drafting"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 0.2}, "min_token_prob"),
    ],
)
def test_what_is_not_built_is_named(value, named):
    with pytest.raises(UnsupportedFeatureError, match=named):
        speculative_config(value, "cpu")


def test_vllms_defaults_are_accepted():
    defaults = {
        "suffix_decoding_min_token_prob": 0.1,
        "suffix_decoding_max_cached_requests": 10_000,
    }
    assert speculative_config({"method": "suffix", **defaults}, "cpu") == SUFFIX


def test_it_is_refused_for_model_that_pools_and_on_gpu():
    with pytest.raises(TrouperValidationError, match="pooling models"):
        speculative_config({"method": "ngram"}, "cpu", pools=True)
    with pytest.raises(UnsupportedFeatureError, match="GPU"):
        speculative_config({"method": "ngram"}, "cuda")


def test_it_is_refused_beside_stages_of_a_pipeline():
    args = EngineArgs(speculative_config={"method": "ngram"}, pipeline_parallel_size=2)
    with pytest.raises(UnsupportedFeatureError, match="pipeline_parallel_size=2"):
        resolve(args)


def test_a_draft_model_needs_no_method():
    found = speculative_config({"model": "draft", "num_speculative_tokens": 3}, "cpu")
    assert (found.method, found.model) == ("draft_model", "draft")


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    size = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size - 1}))
    args = EngineArgs(speculative_config={"model": str(folder)})
    with pytest.raises(TrouperValidationError, match=f"has {size - 1} tokens instead of {size}"):
        resolve(args)


def test_a_draft_model_shares_the_kv_memory():
    args = EngineArgs(max_model_len=-1, kv_cache_memory_bytes=2**21)
    alone = resolve(args).max_model_len
    args.speculative_config = {"model": str(DEMO_MODEL)}
    assert resolve(args).max_model_len // 128 == alone // 128 // 2  # blocks


# The search


def brute_force_match(tokens, longest):
    """All earlier places, all lengths."""
    best = (len(tokens), 0)
    for end in range(1, len(tokens)):
        alike = 0
        while alike < min(longest, end) and tokens[end - 1 - alike] == tokens[-1 - alike]:
            alike += 1
        if alike and alike >= best[1]:
            best = (end, alike)
    return best


@given(texts, st.integers(1, 6))
def test_the_latest_of_the_longest_matches_is_found(tokens, longest):
    assert last_match(np.array(tokens), np.array(tokens), longest) == brute_force_match(
        tokens, longest
    )


def drafted(tokens, length, config, recent=None):
    match = find(np.array(tokens), config, recent)
    if match is None:
        return []
    return match.draft(min(length, match.num_following(config))).tolist()


@given(texts, st.integers(1, 7), st.sampled_from([NGRAM, SUFFIX, BOUNDED]))
def test_draft_goes_on_as_text_did_behind_match(tokens, length, config):
    longest = 3 if config is NGRAM else config.suffix_decoding_max_tree_depth
    behind, alike = brute_force_match(tokens, longest)
    if alike < (2 if config is NGRAM else 1):
        assert drafted(tokens, length, config) == []
    else:
        period = tokens[behind:]
        wanted = min(length, alike) if config is BOUNDED else length
        assert drafted(tokens, length, config) == [period[i % len(period)] for i in range(wanted)]


def test_where_few_tokens_agree_passage_followed_goes_before_latest_place():
    text = np.array([1, 2, 3, 9, 4, 5, 7, 9, 8, 9])
    assert last_match(text, text, 5) == (8, 1)
    assert last_match(text, text, 5, near=3) == (4, 1)
    assert last_match(text, text, 5, near=60) == (8, 1)
    many = np.array([*text, *text[: FEW_MATCHING + 1]])
    assert last_match(many[:-1], many[:-1], 5, near=5) == (FEW_MATCHING, FEW_MATCHING)
    more = np.array([1, 2, 3, 4, 0, 1, 2, 3, 5, 1, 2, 3])
    assert last_match(more, more, 5, near=3) == (8, 3)


def answers(*texts, most=10):
    found = RecentAnswers(most)
    for family, text in texts:
        found.add(family, np.array(text))
    return found


def test_answer_of_another_is_followed_where_more_tokens_agree():
    recent = answers(("a", [1, 2, 3, 4, 5, 6]), ("a", [7, 8])).of("a")
    assert drafted([9, 2, 3, 4], 3, SUFFIX, recent) == [5, 6]  # to its end
    assert drafted([9, 8, 3, 4], 3, SUFFIX, recent) == []  # two are too few
    own = [2, 3, 4, 0, 9, 2, 3, 4]
    assert drafted(own, 3, SUFFIX, recent) == [0, 9, 2]  # its own, as many agree


def test_answers_of_another_family_are_not_found():
    recent = answers(("a", [1, 2, 3, 4, 5, 6]), ("b", [1, 2]))
    assert recent.of("b").tolist() == [1, 2, SEPARATOR]
    assert recent.of("c").tolist() == []


def test_the_oldest_answers_make_room():
    assert answers(("a", [1]), ("b", [2]), ("a", [3]), most=2).of("a").tolist() == [3, SEPARATOR]
    recent = answers(*(("a", range(i, i + MOST_TOKENS // 4)) for i in range(6)))
    assert len(recent.of("a")) <= MOST_TOKENS
    assert recent.of("a")[0] == 3


@given(texts, texts)
def test_a_draft_counts_up_to_the_first_difference(draft, drawn):
    found = num_equal(draft, drawn)
    assert draft[:found] == drawn[:found]
    assert found in (len(draft), len(drawn)) or draft[found] != drawn[found]


# Lengths


def test_drafts_are_the_longer_the_more_tokens_agree():
    lengths = [Pace(7).length(alike, 7) for alike in range(1, 25)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (3, 7)
    assert Pace(7).length(24, 2) == Pace(2).length(24, 7) == 2


@pytest.mark.parametrize("chances", [CHANCES_OF_MODEL, CHANCES])
def test_right_drafts_make_longer_ones_and_wrong_drafts_shorter_ones(chances):
    right, wrong, new = (Pace(7, chances=chances) for _ in range(3))
    for _ in range(30):
        right.note(4, 7, 7)
        wrong.note(4, 7, 0)
    assert right.length(4, 7) == 7
    assert wrong.length(4, 7) < new.length(4, 7)


def test_place_where_drafts_were_always_wrong_has_none():
    pace = Pace(7)
    for _ in range(30):
        pace.note(1, 3, 0)
    assert (pace.length(1, 7), pace.length(24, 7)) == (0, 7)


def test_drafts_of_model_are_shorter_more_it_costs():
    paces = [Pace(7, cost, CHANCES_OF_MODEL, least=1) for cost in (0.0, 0.1, 0.2, 0.5)]
    lengths = [pace.length(0, 7) for pace in paces]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2
    assert lengths[-1] == 1  # it is asked, or nothing would be known of it
    assert paces[-1].length(0, 0) == 0


def test_model_drafts_pause_without_gain():
    pauses = []
    for cost in (0.1, 2.0):
        pace = Pace(7, cost, CHANCES_OF_MODEL, least=1)
        for _ in range(RUNS):
            pace.note(0, 1, 1)
        pauses.append(pace.pause)
    assert pauses == [0, PAUSE]


def test_useless_drafts_pause_longer_each_time():
    pace, pauses = Pace(7), []
    for _ in range(7):
        for _ in range(RUNS):
            assert not pace.rests()
            pace.note(0, 1, 0)
        pauses.append(pace.pause)
        assert [pace.rests() for _ in range(pace.pause + 1)][-2:] == [True, False]
    assert pauses == [PAUSE, 2 * PAUSE, 4 * PAUSE, 8 * PAUSE, *[LONGEST_PAUSE] * 3]


def test_drafts_that_earn_it_do_not():
    pace = Pace(7)
    for i in range(10 * RUNS):
        assert not pace.rests()
        pace.note(0, 1, int(i % 8 == 0))


def test_after_a_success_a_pause_is_short_again():
    pace = Pace(7)
    for num_right in [0] * 2 * RUNS + [1] * RUNS + [0] * RUNS:
        pace.pause = 0
        pace.note(0, 1, num_right)
    assert pace.pause == PAUSE


# The scheduling


async def generate(engine, prompt, max_tokens, **extra_args):
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args
    )
    outputs = [output async for output in engine.generate(prompt, params, f"r{prompt}")]
    return list(outputs[-1].outputs[0].token_ids)


@pytest.mark.trio
async def test_right_drafts_save_steps_and_change_nothing():
    wanted = expected((1, 2, 3), 33)
    counts = []
    for num_drafts in (0, 7):
        async with simulated_engine(
            max_steps_in_flight=2, num_speculative_tokens=num_drafts
        ) as engine:
            assert await generate(engine, (1, 2, 3), 33) == wanted
            counts.append(engine.statistics().scheduler.num_steps)
    assert counts == [33, 5]  # the prompt's token, then eight a step


@pytest.mark.parametrize(("num_sequences", "most"), [(1, 7), (8, 1), (9, 0)])
def test_plan_is_made_ahead_of_what_becomes_of_drafts_before(num_sequences, most):
    desk = Desk(max_num_seqs=16, max_steps_in_flight=2, num_speculative_tokens=7)
    for i in range(num_sequences):
        desk.admit(i, max_tokens=30)
    desk.step()
    first, second, third = (desk.plan() for _ in range(3))
    assert third is None
    assert (
        first.num_lookahead_tokens
        == second.num_lookahead_tokens
        == (most,) * num_sequences * (most > 0)
    )
    assert first.num_unknown_tokens == ()
    assert second.num_unknown_tokens == first.num_lookahead_tokens


def test_no_plan_is_made_ahead_where_drafts_might_end_sequence():
    desk = Desk(max_steps_in_flight=2, num_speculative_tokens=7)
    desk.admit(max_tokens=9)
    desk.step()
    assert desk.plan().num_lookahead_tokens == (7,)
    assert desk.plan() is None


def test_plans_are_made_ahead_where_no_request_wants_drafts():
    desk = Desk(max_steps_in_flight=2, num_speculative_tokens=7)
    desk.admit(max_tokens=9, extra_args={"num_speculative_tokens": 0})
    desk.step()
    assert [desk.plan() is not None for _ in range(3)] == [True, True, False]


@pytest.mark.trio
async def test_crowd_shares_rows_that_step_verifies():
    async with simulated_engine(max_steps_in_flight=2, num_speculative_tokens=7) as engine:
        async with anyio.create_task_group() as tasks:
            for i in range(8):
                tasks.start_soon(generate, engine, (i + 1, 2), 17)
        stats = engine.statistics().scheduler
    # Two rows of sixteen for each of eight: a draft of one token.
    assert stats.num_draft_tokens == stats.num_drafts
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@pytest.mark.parametrize(("most", "num_steps"), [(0, 33), (1, 17), (7, 5), (100, 5)])
@pytest.mark.trio
async def test_a_request_may_bound_its_own_drafts(most, num_steps):
    async with simulated_engine(max_steps_in_flight=2, num_speculative_tokens=7) as engine:
        tokens = await generate(engine, (1, 2, 3), 33, num_speculative_tokens=most)
        assert tokens == expected((1, 2, 3), 33)
        assert engine.statistics().scheduler.num_steps == num_steps


@pytest.mark.parametrize("wrong", [-1, True, "3", 1.5, None])
def test_a_wrong_bound_of_a_request_is_named(wrong):
    with pytest.raises(TrouperValidationError, match="must be an integer") as raised:
        SamplingParams(extra_args={"num_speculative_tokens": wrong})
    assert raised.value.parameter == "extra_args.num_speculative_tokens"
