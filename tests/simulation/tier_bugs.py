"""Bugs of the tier on disk: in the scheduler's decisions, in the thread, and in the files."""

import msgspec

from trouper.actors.executor.steps import tier_files
from trouper.actors.executor.steps.tier_files import Checksum, RefusedError, TierFolder
from trouper.actors.executor.steps.tier_thread import TierThread
from trouper.actors.messages.steps import is_state
from trouper.actors.scheduling.state.tier import Tier

from .bugs import bug
from .scenario import draw_with_bad_disk, draw_with_states_on_disk, draw_with_tier
from .simulated_device import SimulatedSteps

# Decisions


@bug(Tier, "_next_fetch", draw_with_tier)
def fetched_block_is_offered_before_its_answer(right):
    def faulty(self):
        order = right(self)
        if order is not None:
            for block, name in zip(order.blocks, order.names, strict=True):
                self._blocks.register(block, name)
        return order

    return faulty


@bug(Tier, "_take_in", draw_with_tier)
def every_fetched_block_counts(right):
    return lambda self, fetch, answer: right(
        self, fetch, msgspec.structs.replace(answer, num_done=len(fetch.names))
    )


@bug(Tier, "take_cancel", draw_with_tier)
def cancel_of_the_orders_is_not_sent(right):
    return lambda self: right(self) and []


@bug(Tier, "_patience_s", draw_with_tier)
def a_hanging_disk_is_waited_for(right):
    return lambda self, num_blocks, num_ahead: 3600.0


@bug(Tier, "cancel", draw_with_tier)
def blocks_of_the_tier_are_not_given_back(right):
    return lambda self: False


@bug(Tier, "note", draw_with_tier)
def stored_block_stays_held(right):
    def faulty(self, answer):
        held = self._stores.get(answer.number)
        if held is not None:
            self._blocks.share([held[0]])
        right(self, answer)

    return faulty


# The thread and the device


@bug(TierThread, "_fetch", draw_with_tier)
def refused_block_is_used(right):
    def faulty(self, folder, block, name, generation):
        done = right(self, folder, block, name, generation)
        if not done and self._pages is not None and generation == self._generation:
            self._pages.copy_in(block, self._room(self._pages))
        return True

    return faulty


@bug(TierThread, "_forget", draw_with_tier)
def cancelled_order_is_performed(right):
    return lambda self: []


@bug(TierThread, "_report", draw_with_tier)
def failure_of_the_tier_is_not_answered(right):
    def faulty(self, number, num_done, seconds):
        if not number or num_done:
            right(self, number, num_done, seconds)

    return faulty


@bug(SimulatedSteps, "_pass_orders", draw_with_tier)
def order_overtakes_the_plans(right):
    return lambda self, step: right(self, 2**62)


@bug(TierThread, "_store", draw_with_tier)
def block_is_stored_after_its_answer(right):
    """The thread copies the block of the order before."""

    def faulty(self, folder, order, generation):
        late, self.late_order = getattr(self, "late_order", None), order
        if late is not None and late.names[0] not in folder:
            right(self, folder, late, generation)
        return 1

    return faulty


# Recurrent states


@bug(Tier, "_fetch_state", draw_with_states_on_disk)
def state_of_another_block_is_fetched(right):
    def faulty(self, sought, prefix):
        order = right(self, sought, prefix)
        others = [name for name in sorted(self._known) if is_state(name)]
        return order and msgspec.structs.replace(order, names=(others[0],))

    return faulty


@bug(TierThread, "_store", draw_with_states_on_disk)
def stored_state_is_older_than_its_blocks(right):
    """The thread copies the row of the state before."""

    def faulty(self, folder, order, generation):
        if is_state(order.names[0]):
            older, self.older = getattr(self, "older", order.blocks), order.blocks
            order = msgspec.structs.replace(order, blocks=older)
        return right(self, folder, order, generation)

    return faulty


@bug(Tier, "_take_in_state", draw_with_states_on_disk)
def every_fetched_state_counts(right):
    return lambda self, fetch, row, answer: right(
        self, fetch, row, msgspec.structs.replace(answer, num_done=1)
    )


# The files


@bug(Checksum, "of", draw_with_bad_disk)
def file_has_no_sum(right):
    return lambda self, data, name: 0


@bug(TierThread, "_read", draw_with_tier)
def file_is_trusted(right):
    def faulty(self, folder, pages, name, raw):
        entry = folder._entries.get(tier_files.key_of(folder._name, name))
        if entry is None:
            return False
        try:
            data = folder._disk.read(folder._file(tier_files.key_of(folder._name, name)), 2**20)
        except (OSError, RefusedError):
            return False
        raw[: len(data[-len(raw) :])] = data[-len(raw) :]
        return True

    return faulty


@bug(TierFolder, "_make_room", draw_with_tier)
def folder_has_no_bound(right):
    return lambda self, needed, *, is_exact: None


@bug(TierFolder, "_read_space", draw_with_tier)
def files_are_counted_from_zero(right):
    return lambda self, space, changed_ns: None
