"""Images in the policy: they are encoded in slices beside streams, and a prompt goes on when the device has the rows."""

from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.messages.media import MediaItem
from trouper.actors.messages.requests import Admit, RequestOptions
from trouper.actors.messages.steps import NEVER, DeviceLost, StepDone
from trouper.actors.scheduling.policy import Policy
from trouper.actors.scheduling.state.kv_blocks import KVBlocks
from trouper.config.engine_config import SchedulerConfig
from trouper.params import RequestOutputKind, SamplingParams

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def image(first, num_tokens=4, key=b"a"):
    return MediaItem(key, "image", (), num_tokens, ((1, num_tokens - 1),), first)


class Desk:
    """A policy, and a device whose images need as many slices as the test says."""

    def __init__(self, num_blocks=100, **config):
        config = {"max_num_seqs": 8, "max_num_scheduled_tokens": 64, "encode_s": 0.03} | config
        self.policy = Policy(SchedulerConfig(**config), KVBlocks(num_blocks + 1, 4, True))
        self.plans = []

    def admit(self, id, num_tokens, *media, kind=DELTA, spans=()):
        self.policy.admit(
            Admit(
                id=id,
                prompt_token_ids=tuple(range(num_tokens)),
                params=SamplingParams(max_tokens=50, output_kind=kind),
                eos_token_id=None,
                stop_token_ids=(),
                options=RequestOptions(),
                arrival_time=float(id),
                media=media,
                spans=spans,
            )
        )

    def plan(self):
        plan = self.policy.plan()
        if plan is not None:
            self.plans.append(plan)
        return plan

    def land(self, *encoded):
        plan = self.plans.pop(0)
        tokens = tuple((7,) * num for num in plan.num_sampled_tokens)
        self.policy.apply(StepDone(plan.step, tokens, encoded=encoded))

    def step(self, *encoded):
        plan = self.plan()
        self.land(*encoded)
        return plan


def shape(plan):
    return plan.num_computed_tokens, plan.num_scheduled_tokens, len(plan.encodes)


def test_prompt_waits_at_each_image():
    desk = Desk()
    desk.admit(0, 20, image(2), image(10))
    assert shape(desk.step()) == ((0,), (3,), 0)
    assert shape(desk.step(3)) == ((), (), 1)
    assert shape(desk.step(11)) == ((), (), 1)
    assert shape(desk.step()) == ((3,), (8,), 0)
    assert shape(desk.step(NEVER)) == ((), (), 1)
    assert shape(desk.step()) == ((11,), (9,), 0)


def test_streams_go_on_while_an_image_is_encoded():
    desk = Desk()
    desk.admit(0, 3)
    desk.step()
    desk.admit(1, 8, image(0))
    assert shape(desk.step()) == ((3, 0), (1, 1), 0)
    for i in range(5):
        plan = desk.step(1)
        assert shape(plan) == ((4 + i,), (1,), 1)
        assert plan.encode_s == 0.03
    desk.step(NEVER)
    assert shape(desk.step()) == ((10, 1), (1, 7), 0)


def test_images_get_more_time_without_streams():
    desk = Desk()
    desk.admit(0, 3, kind=FINAL)
    desk.step()
    desk.admit(1, 8, image(0), kind=FINAL)
    desk.step()
    assert desk.step(1).encode_s == 0.1


def test_texts_pass_a_prompt_with_an_image():
    desk = Desk()
    desk.admit(0, 8, image(0))
    desk.step()
    desk.admit(1, 6)
    plan = desk.step(1)
    assert shape(plan) == ((0,), (6,), 1)


def test_images_are_read_at_once_without_slices():
    desk = Desk(encode_s=0.0)
    desk.admit(0, 20, image(2))
    assert shape(desk.step()) == ((0,), (20,), 0)


def test_a_cached_prefix_may_end_before_an_image():
    desk = Desk()
    desk.admit(0, 9, image(7, 2))
    assert shape(desk.step()) == ((0,), (8,), 0)
    desk.policy.abort(0)
    desk.admit(1, 9, image(7, 2))
    plan = desk.plan()
    assert shape(plan) == ((), (), 1)
    assert [new.sequence for new in plan.new_sequences] == [1]
    desk.land(NEVER)
    assert shape(desk.step()) == ((8,), (1,), 0)


def test_a_failed_step_forgets_encoded_images():
    desk = Desk(max_steps_in_flight=2)
    desk.admit(0, 8, image(0))
    desk.step()
    desk.step(NEVER)
    plan = desk.plan()
    assert shape(plan) == ((1,), (7,), 0)
    desk.policy.fail_step(desk.plans.pop(0).step, "boom")
    # The search for a culprit reads images at once.
    again = desk.plan()
    assert [new.sequence for new in again.new_sequences] == [0]
    assert shape(again) == ((1,), (7,), 0)


def test_an_aborted_image_leaves_the_plan_in_flight():
    desk = Desk()
    desk.admit(0, 8, image(0))
    desk.step()
    desk.plan()
    desk.policy.abort(0)
    desk.land(1)
    assert desk.plan() is None
    assert not desk.policy.holds_blocks


def test_a_preempted_prompt_encodes_again():
    desk = Desk()
    desk.admit(0, 8, image(0))
    desk.step()
    desk.plan()
    desk.policy.preempt_all()
    desk.land(NEVER)
    assert shape(desk.step()) == ((0,), (1,), 0)
    assert shape(desk.step(NEVER)) == ((), (), 1)
    assert shape(desk.step()) == ((1,), (7,), 0)


def test_an_image_that_kills_the_device_ends():
    desk = Desk()
    desk.admit(0, 3)
    desk.step()
    desk.admit(1, 8, image(0))
    desk.step()
    ended, owners = set(), dict[int, int]()
    while not ended:
        plan = desk.plan()
        owners |= {new.request_slot: new.sequence for new in plan.new_sequences}
        entries = zip(plan.request_slots, plan.num_scheduled_tokens, strict=True)
        if plan.encodes or any(owners[slot] == 1 and count > 1 for slot, count in entries):
            desk.plans.clear()
            desk.policy.lose_device(DeviceLost("killed", plan.step, cause="signal"))
            desk.policy.return_device()
        else:
            desk.land()
        news = desk.policy.take_outputs()
        ended = {e.id for e in (news.sequences if news else ()) if e.finish_reason == "error"}
    assert ended == {1}


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=5),
    budget=st.integers(12, 20),
    num_others=st.integers(0, 3),
)
def test_no_plan_divides_a_span(lengths, budget, num_others):
    """`lengths`: of each text and of the span behind it."""
    spans, end = [], 0
    for num_text, num_span in lengths:
        spans.append((end + num_text, end + num_text + num_span))
        end = spans[-1][1]
    desk = Desk(max_num_scheduled_tokens=budget, encode_s=0.0)
    for other in range(num_others):
        desk.admit(other, 5, kind=FINAL)
    desk.admit(9, end + 1, spans=tuple(spans), kind=FINAL)
    slot, computed = None, 0
    for _ in range(60):
        if computed > end:
            break
        plan = desk.step()
        slots = {new.request_slot for new in plan.new_sequences if new.spans}
        slot = slots.pop() if slots else slot
        for entry, start, count in zip(
            plan.request_slots, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            if entry == slot and start <= end:
                computed = start + count
                assert not any(first < computed < last for first, last in spans)
    assert computed > end
