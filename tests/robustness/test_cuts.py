"""Conversations in turn, in less memory than they take together: what windows leave behind must not push out what comes back."""

import random

import pytest

from trouper.actors.messages.requests import Admit, RequestId
from trouper.actors.messages.steps import StepDone
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.config.engine_config import SchedulerConfig
from trouper.config.kv_layout import KVLayout
from trouper.params import SamplingParams

BLOCK, WINDOW, STEP = 128, 1024, 1024
# One group of layers without a window and five with one.
LAYOUT = KVLayout(BLOCK, (None, *[WINDOW] * 5), 512)
NUM_SESSIONS, NUM_TURNS, NUM_FIRST, NUM_NEW, NUM_OUT = 8, 12, 3000, 300, 128


class Desk:
    """A policy with a device that answers at once."""

    def __init__(self, num_blocks, layout=LAYOUT):
        config = SchedulerConfig(max_model_len=16_384, max_num_scheduled_tokens=STEP)
        self.blocks = KVBlocks(num_blocks + 1, layout.block_size, True, layout)
        self.policy = Policy(config, self.blocks)
        self.dice = random.Random(0)
        self.next_id = 0

    def answer(self, prompt, num_out=NUM_OUT):
        """Run one request to its end; returns its output and the cached tokens of its prompt."""
        self.next_id += 1
        params = SamplingParams(max_tokens=num_out, ignore_eos=True, seed=1)
        admit = Admit(
            id=RequestId(self.next_id), prompt_token_ids=tuple(prompt), params=params, eos_token_id=None,
            stop_token_ids=(),
        )  # fmt: skip
        self.policy.admit(admit)
        output, cached = [], None
        while (plan := self.policy.plan()) is not None:
            drawn = tuple((self.dice.randrange(1000),) * n for n in plan.num_sampled_tokens)
            self.policy.apply(StepDone(plan.step, drawn))
            news = self.policy.take_outputs()
            for entry in () if news is None else news.sequences:
                assert entry.error is None
                output += entry.token_ids
                cached = entry.num_cached_tokens if cached is None else cached
        return output, cached


def hit_rate(num_blocks):
    """The share of prompt tokens found in the cache, from the second turn on."""
    desk = Desk(num_blocks)
    dice = random.Random(1)
    new = lambda count: [dice.randrange(1000) for _ in range(count)]  # noqa: E731
    sessions = [new(NUM_FIRST) for _ in range(NUM_SESSIONS)]
    queries = hits = 0
    for turn in range(NUM_TURNS):
        for session in sessions:
            output, cached = desk.answer(session)
            if turn:
                queries += len(session)
                hits += cached
            session += output + new(NUM_NEW)
    return hits / queries


# What all conversations take at their end if all layers keep all blocks.
WHOLE = NUM_SESSIONS * -(-(NUM_FIRST + NUM_TURNS * (NUM_NEW + NUM_OUT)) // BLOCK) * 6


def test_eight_conversations_fit_third_of_memory():
    assert hit_rate(WHOLE // 3) >= 0.9


@pytest.mark.slow
def test_blocks_without_cuts_push_out_conversations(monkeypatch):
    """Keeping every block that a window leaves, as a full layer's, finds almost nothing in the same memory."""

    def naive(self, blocks):
        self.free([*blocks])

    monkeypatch.setattr(KVBlocks, "spare", naive)
    assert hit_rate(WHOLE // 3) < 0.5


def test_common_beginning_of_prompts_stays_cached():
    """The first miss shows where prompts part.  From then on this place is kept, although memory is short."""
    desk = Desk(6 * 40)
    dice = random.Random(2)
    new = lambda count: [dice.randrange(1000) for _ in range(count)]  # noqa: E731
    system = new(10 * BLOCK)
    found = [desk.answer(system + new(20 * BLOCK), 16)[1] for _ in range(6)]
    assert found[3:] == [10 * BLOCK] * 3
