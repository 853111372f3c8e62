"""Sampling parameters through the whole engine: what ends a request, and what it hands out on the way."""

import math

import msgspec
import pytest
import trio

from tests.simulation.simulated_device import simulated_logprobs, simulated_tokens
from tests.support.engines import VOCAB_SIZE, engine_config, expected, simulated_engine
from trouper.actors.messages.requests import RequestOptions
from trouper.actors.messages.steps import Sampling
from trouper.errors import TrouperValidationError
from trouper.outputs import Logprob
from trouper.params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.trio

PROMPT = [1, 2, 3, 4, 5, 6, 7]
CUMULATIVE, DELTA, FINAL = RequestOutputKind
EOS, SECOND_EOS = 11, 12


def greedy(max_tokens=8, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def engine_with_eos(*eos_token_ids, **options):
    """Whatever the model would say, `allowed_token_ids` makes it say what a test wants."""
    config = engine_config()
    model = msgspec.structs.replace(config.model, eos_token_ids=eos_token_ids)
    return simulated_engine(config=msgspec.structs.replace(config, model=model, **options))


async def run(engine, params, request_id="a", prompt=PROMPT, **options):
    return [o async for o in engine.generate(prompt, params, request_id, RequestOptions(**options))]


async def last(engine, params, **options):
    return (await run(engine, params, **options))[-1].outputs[0]


def ended(completion):
    return completion.finish_reason, completion.stop_reason


# Ends


async def test_primary_eos_stops_without_reason_and_stays_in_ids(autojump_clock):
    async with engine_with_eos(EOS, SECOND_EOS) as engine:
        found = await last(engine, greedy(allowed_token_ids=[EOS]))
    assert ended(found) == ("stop", None)
    assert found.token_ids == [EOS]


async def test_a_secondary_eos_reports_its_id(autojump_clock):
    async with engine_with_eos(EOS, SECOND_EOS) as engine:
        assert ended(await last(engine, greedy(allowed_token_ids=[SECOND_EOS]))) == (
            "stop",
            SECOND_EOS,
        )


async def test_ignore_eos_goes_on_to_the_length(autojump_clock):
    async with engine_with_eos(EOS, SECOND_EOS) as engine:
        for token in (EOS, SECOND_EOS):
            found = await last(engine, greedy(allowed_token_ids=[token], ignore_eos=True))
            assert ended(found) == ("length", None)
            assert found.token_ids == [token] * 8


async def test_stop_token_ends_output_and_is_reported(autojump_clock):
    tokens = expected(PROMPT, 8)
    async with simulated_engine() as engine:
        for i in (0, 3):
            found = await last(engine, greedy(stop_token_ids=[tokens[i], tokens[7]]))
            assert ended(found) == ("stop", tokens[i])
            assert found.token_ids == tokens[: i + 1]


async def test_ignore_eos_does_not_ignore_stop_token_ids(autojump_clock):
    async with engine_with_eos(EOS) as engine:
        params = greedy(allowed_token_ids=[EOS], ignore_eos=True, stop_token_ids=[EOS])
        assert ended(await last(engine, params)) == ("stop", EOS)


async def test_until_min_tokens_neither_eos_nor_stop_tokens_are_sampled(autojump_clock):
    async with engine_with_eos(EOS) as engine:
        params = greedy(20, allowed_token_ids=[EOS, 13, 20], stop_token_ids=[13], min_tokens=6)
        found = await last(engine, params)
    assert found.token_ids[:6] == [20] * 6
    assert found.token_ids[-1] in (EOS, 13)
    assert set(found.token_ids[6:-1]) <= {20}


async def test_the_context_is_a_length_limit_too(autojump_clock):
    async with simulated_engine() as engine:
        prompt = [1 + n % 90 for n in range(250)]
        found = await last(engine, greedy(None), prompt=prompt)
    assert ended(found) == ("length", None)
    assert found.token_ids == expected(prompt, 6)


# Logprobs


def one(position, token, num_candidates):
    entry = simulated_logprobs(token, position, num_candidates, VOCAB_SIZE)
    pairs = zip(entry.token_ids, entry.logprobs, strict=True)
    return dict(pairs)


def plain(positions):
    return [{token: entry.logprob for token, entry in p.items()} for p in positions]


@pytest.mark.parametrize("num_candidates", [0, 1, 5])
async def test_each_token_has_its_logprobs_sampled_one_first(num_candidates, autojump_clock):
    async with simulated_engine() as engine:
        found = await last(engine, greedy(5, logprobs=num_candidates))
    wanted = [one(7 + i, token, num_candidates) for i, token in enumerate(found.token_ids)]
    assert plain(found.logprobs) == wanted
    assert [next(iter(p)) for p in found.logprobs] == found.token_ids
    assert all(isinstance(entry, Logprob) for p in found.logprobs for entry in p.values())
    assert all(entry.rank >= 1 for p in found.logprobs for entry in p.values())
    gained = math.fsum(p[t] for p, t in zip(wanted, found.token_ids, strict=True))
    assert found.cumulative_logprob == pytest.approx(gained)


async def test_the_whole_vocabulary_can_be_asked_for(autojump_clock):
    async with engine_with_eos(max_logprobs=-1) as engine:
        found = await last(engine, greedy(2, logprobs=-1))
    assert [len(position) for position in found.logprobs] == [VOCAB_SIZE] * 2


async def test_more_logprobs_than_engine_allows_fail_that_request(autojump_clock):
    async with simulated_engine() as engine:
        with pytest.raises(TrouperValidationError, match="max_logprobs"):
            await last(engine, greedy(logprobs=21))


async def test_without_logprobs_there_are_none_and_no_sum(autojump_clock):
    async with simulated_engine() as engine:
        for params in (greedy(), greedy(prompt_logprobs=1)):
            found = await last(engine, params)
            assert (found.logprobs, found.cumulative_logprob) == (None, None)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
async def test_logprobs_are_as_many_as_token_ids_beside_them(kind, autojump_clock):
    async with simulated_engine() as engine:
        outputs = await run(engine, greedy(6, logprobs=1, output_kind=kind))
    completions = [o.outputs[0] for o in outputs]
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions)
    assert [len(c.token_ids) for c in completions] == {
        CUMULATIVE: [1, 2, 3, 4, 5, 6], DELTA: [1] * 6, FINAL: [6]
    }[kind]  # fmt: skip
    sums = [c.cumulative_logprob for c in completions]
    assert sums == sorted(sums, reverse=True)  # of all so far, under DELTA as well


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
async def test_prompt_logprobs_start_with_none_and_come_once_under_delta(kind, autojump_clock):
    params = greedy(4, prompt_logprobs=2, output_kind=kind)
    async with simulated_engine(max_num_scheduled_tokens=8) as engine:
        for n in range(2):  # the second finds the prompt in the cache and must not read it
            outputs = await run(engine, params, str(n), prompt=PROMPT * 3)
            found = [o.prompt_logprobs for o in outputs]
            first = found[0]
            assert first[0] is None
            assert plain(first[1:]) == [
                one(i, token, 2) for i, token in enumerate(PROMPT * 3) if i > 0
            ]
            rest = [None] * 3 if kind == DELTA else [first] * 3
            assert found[1:] == ([] if kind == FINAL else rest)


async def test_a_prompt_of_one_token_has_one_entry(autojump_clock):
    async with simulated_engine() as engine:
        outputs = await run(engine, greedy(2, prompt_logprobs=0), prompt=[5])
    assert outputs[-1].prompt_logprobs == [None]


# Streaming


@pytest.mark.parametrize(
    ("engine_interval", "own_interval", "sizes"),
    [(1, None, [1] * 10), (4, None, [1, 4, 4, 1]), (1, 3, [1, 3, 3, 3]), (4, 2, [1, 4, 4, 1])],
)
async def test_first_token_then_every_interval_then_last(
    engine_interval, own_interval, sizes, autojump_clock
):
    async with engine_with_eos(stream_interval=engine_interval) as engine:
        params = greedy(10, output_kind=DELTA, stream_interval=own_interval)
        outputs = await run(engine, params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == sizes
    assert [id for o in outputs for id in o.outputs[0].token_ids] == expected(PROMPT, 10)


# Order and n


async def test_larger_priority_runs_first_and_equals_in_order_of_arrival(autojump_clock):
    order = []
    async with simulated_engine(max_num_active_seqs=1) as engine, trio.open_nursery() as nursery:

        async def client(name, priority):
            await run(engine, greedy(3), name, priority=priority, arrival_time=float(name[-1]))
            order.append(name)

        stream = engine.generate(PROMPT, greedy(10), "takes the seat")
        await anext(stream)
        for name, priority in (
            ("low-3", 0),
            ("low-2", 0),
            ("high-5", 9),
            ("high-4", 9),
            ("below-1", -1),
        ):
            nursery.start_soon(client, name, priority)
        async for _ in stream:
            pass
    assert order == ["high-4", "high-5", "low-2", "low-3", "below-1"]


async def test_child_i_has_the_seed_plus_i(autojump_clock):
    async with simulated_engine() as engine:
        params = SamplingParams(n=3, seed=40, max_tokens=6, output_kind=FINAL)
        (output,) = await run(engine, params)
    for completion in output.outputs:
        sampling = Sampling(seed=40 + completion.index)
        wanted = simulated_tokens(tuple(PROMPT), sampling, 6, VOCAB_SIZE)
        assert completion.token_ids == list(wanted)


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
async def test_streamed_completions_are_told_when_they_change_and_end_once(kind, autojump_clock):
    params = SamplingParams(
        n=3, seed=1, max_tokens=30, output_kind=kind, stop_token_ids=list(range(0, 90, 3))
    )
    async with simulated_engine() as engine:
        outputs = await run(engine, params)
    ends = [c.index for o in outputs for c in o.outputs if c.finish_reason]
    assert sorted(ends) == [0, 1, 2]
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(3):
        mine = [c for o in outputs for c in o.outputs if c.index == index]
        assert mine[-1].finish_reason is not None
        assert not any(c.finish_reason for c in mine[:-1])


async def test_greedy_completions_would_be_equal():
    with pytest.raises(TrouperValidationError, match="n must be 1"):
        greedy(n=2)
