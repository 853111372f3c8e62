"""The store of responses against a model that keeps everything and counts anew each time."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trouper.frontends.server.service.response_store import (
    ENTRY_BYTES,
    EVENT_BYTES,
    PIECE_BYTES,
    ResponseStore,
    StoredResponse,
)

MAX_BYTES = 6 * ENTRY_BYTES
OWNERS = st.sampled_from(["key 0", "key 1"])
STATUSES = st.sampled_from(["queued", "in_progress", "completed", "failed", "cancelled"])


def stored(*pieces, owner="", status="completed", body=b"{}"):
    return StoredResponse(owner=owner, status=status, body=body, pieces=pieces)


class StoreMachine(RuleBasedStateMachine):
    """Conversations grow, fork, are read and are forgotten."""

    def __init__(self):
        super().__init__()
        self.store = ResponseStore(MAX_BYTES)
        self.kept = {}  # the one that was used last at the end
        self.logs = {}  # bytes of events, by the id of what is kept
        self.num_made = 0

    def cost(self):
        pieces = {id(piece): piece for each in self.kept.values() for piece in each.pieces}
        return sum(each.own_bytes for each in self.kept.values()) + sum(
            PIECE_BYTES + len(piece) for piece in pieces.values()
        ) + sum(self.logs.values())  # fmt: skip

    def make_room(self, newest):
        """The oldest that is finished goes first, then the newest's events."""
        while self.cost() > MAX_BYTES:
            finished = [each for each in self.kept if not self.kept[each].is_running]
            oldest = next((each for each in finished if each != newest), None)
            if oldest is None and newest not in self.logs:
                return
            self.kept.pop(oldest, None)
            self.logs.pop(newest if oldest is None else oldest, None)

    @rule(owner=OWNERS, status=STATUSES, length=st.integers(0, 900), data=st.data())
    def put(self, owner, status, length, data):
        old = data.draw(st.sampled_from([None, *self.kept]))
        is_follow_up = data.draw(st.booleans())
        pieces = self.kept[old].pieces if old and is_follow_up else ()
        self.num_made += 1
        name = old if old and not is_follow_up else f"resp_{self.num_made}"
        new = stored(*pieces, bytes(length), owner=owner, status=status)
        self.kept.pop(name, None)
        alone = new.own_bytes + sum(PIECE_BYTES + len(piece) for piece in (*pieces, bytes(length)))
        if alone <= MAX_BYTES:
            self.kept[name] = new
            self.make_room(name)
            if self.cost() > MAX_BYTES:
                self.kept.pop(name)
        else:
            self.logs.pop(name, None)
        assert self.store.put(name, new) == (name in self.kept)

    @rule(length=st.integers(0, 900), data=st.data())
    def append(self, length, data):
        name = data.draw(st.sampled_from(["none", *self.kept]))
        if name in self.kept and self.store.log(name) is None:
            self.store.open_log(name)
            self.logs[name] = 0
        if name in self.logs:
            self.logs[name] += EVENT_BYTES + length
            self.make_room(name)
        self.store.append(name, bytes(length))
        assert (self.store.log(name) is None) == (name not in self.logs)

    @rule(owner=OWNERS, data=st.data())
    def get(self, owner, data):
        name = data.draw(st.sampled_from(["none", *self.kept]))
        found = self.kept.get(name)
        if found is not None and found.owner == owner:
            self.kept[name] = self.kept.pop(name)
        else:
            found = None
        assert self.store.get(name, owner) is found

    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(["none", *self.kept]))
        self.kept.pop(name, None)
        self.logs.pop(name, None)
        self.store.remove(name)

    @invariant()
    def counts_what_is_kept(self):
        assert len(self.store) == len(self.kept)
        assert self.store.num_bytes == self.cost() <= MAX_BYTES

    def teardown(self):
        for name in list(self.kept):
            self.store.remove(name)
        assert (len(self.store), self.store.num_bytes) == (0, 0)
        assert not self.store._holders
        assert not self.store._logs


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_a_follow_up_shares_what_it_follows():
    store = ResponseStore(2**20)
    first = stored(bytes(1000))
    store.put("a", first)
    before = store.num_bytes
    store.put("b", stored(*first.pieces, bytes(10)))
    assert store.num_bytes - before < 1000
    store.remove("a")
    assert store.get("b", "").pieces[0] == bytes(1000)


def test_what_runs_is_never_evicted():
    store = ResponseStore(3 * ENTRY_BYTES)
    assert store.put("a", stored(status="in_progress"))
    assert store.put("b", stored())
    assert store.put("c", stored(status="queued"))
    assert store.get("b", "") is None
    assert not store.put("d", stored())
    assert store.get("a", "").is_running
    assert store.get("c", "").is_running


@pytest.mark.parametrize("max_bytes", [0, ENTRY_BYTES])
def test_what_is_too_large_evicts_nothing(max_bytes):
    store = ResponseStore(max_bytes)
    assert not store.put("a", stored(bytes(max_bytes)))
    assert store.num_bytes == 0
