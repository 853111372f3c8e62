"""The block pool: the worked case of spec 6.3, and random use against a model that is plainly right."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trouper.actors.scheduling.state.kv_blocks import FIRST_PARENT, KVBlocks, block_hash

A = list(range(100, 110))


def chain(token_ids, block_size=4):
    """Hashes of the full blocks."""
    hashes, parent = [], FIRST_PARENT
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes


def enter(blocks, token_ids):
    """What the scheduler does for a sequence: look up, share, allocate, register what is full."""
    hit = blocks.match(chain(token_ids)[: (len(token_ids) - 1) // blocks.block_size])
    blocks.share(hit)
    table = hit + blocks.allocate(blocks.num_for(len(token_ids)) - len(hit))
    for block, name in zip(table, chain(token_ids), strict=False):
        blocks.register(block, name)
    return hit, table


@pytest.fixture
def two_guests():
    """A with 10 tokens, then B with the same first 8 and 3 others."""
    blocks = KVBlocks(9, 4, True)
    assert blocks.free_list == (1, 2, 3, 4, 5, 6, 7, 8)
    _, a = enter(blocks, A)
    assert (a, blocks.free_list, blocks.usage) == ([1, 2, 3], (4, 5, 6, 7, 8), 3 / 8)
    hit, b = enter(blocks, [*A[:8], 1, 2, 3])
    assert (hit, b, blocks.free_list, blocks.usage) == ([1, 2], [1, 2, 4], (5, 6, 7, 8), 4 / 8)
    assert [blocks.num_references(block) for block in (1, 2, 4)] == [2, 2, 1]
    return blocks, a, b


def test_freed_blocks_return_tail_first(two_guests):
    blocks, a, b = two_guests
    blocks.free(a)
    assert blocks.free_list == (3, 5, 6, 7, 8)
    assert [blocks.num_references(block) for block in (1, 2)] == [1, 1]
    blocks.free(b)
    assert blocks.free_list == (4, 3, 5, 6, 7, 8, 2, 1)


def test_new_tokens_evict_cached_blocks_in_order(two_guests):
    blocks, a, b = two_guests
    blocks.free(a)
    blocks.free(b)
    _, c = enter(blocks, list(range(32)))
    assert c == [4, 3, 5, 6, 7, 8, 2, 1]
    assert blocks.match(chain(A)) == []


def test_a_hit_never_covers_the_whole_prompt(two_guests):
    blocks, a, b = two_guests
    blocks.free(a)
    blocks.free(b)
    hit, _ = enter(blocks, A[:8])
    assert hit == [1]


def test_allocation_is_all_or_nothing():
    blocks = KVBlocks(5, 4, True)
    assert blocks.allocate(5) is None
    assert blocks.free_list == (1, 2, 3, 4)
    assert blocks.allocate(4) == [1, 2, 3, 4]
    assert blocks.allocate(1) is None
    assert blocks.allocate(0) == []
    assert blocks.usage == 1.0


def test_second_equal_block_replaces_first():
    blocks = KVBlocks(4, 4, True)
    first, second = blocks.allocate(2)
    name = block_hash(FIRST_PARENT, [1, 2, 3, 4])
    blocks.register(first, name)
    blocks.register(second, name)
    assert blocks.match([name]) == [first]
    blocks.free([first])
    blocks.forget([first])
    assert blocks.match([name]) == [second]
    blocks.forget([second])
    assert blocks.match([name]) == []


def test_cache_is_reset_only_while_nothing_is_held():
    blocks = KVBlocks(4, 4, True)
    table = blocks.allocate(1)
    name = block_hash(FIRST_PARENT, [1, 2, 3, 4])
    blocks.register(table[0], name)
    assert not blocks.reset_cache()
    assert blocks.match([name]) == table
    blocks.free(table)
    assert blocks.reset_cache()
    assert blocks.match([name]) == []


def test_without_prefix_caching_nothing_is_ever_found():
    blocks = KVBlocks(4, 4, False)
    table = blocks.allocate(1)
    blocks.register(table[0], b"name")
    assert blocks.match([b"name"]) == []


def test_hash_depends_on_parent_tokens_and_extra_keys():
    base = block_hash(FIRST_PARENT, [1, 2])
    others = [
        block_hash(base, [1, 2]),
        block_hash(FIRST_PARENT, [2, 1]),
        block_hash(FIRST_PARENT, [1, 2], b"salt"),
        block_hash(FIRST_PARENT, [1]),
    ]
    assert len({base, *others}) == 5
    assert base == block_hash(FIRST_PARENT, (1, 2))


def test_empty_pool_has_no_usage():
    blocks = KVBlocks(1, 4, True)
    assert (blocks.num_usable, blocks.usage, blocks.allocate(1)) == (0, 0.0, None)


class BlocksMachine(RuleBasedStateMachine):
    """Against lists that are searched from end to end."""

    @initialize(num_blocks=st.integers(1, 9))
    def build(self, num_blocks):
        self.blocks = KVBlocks(num_blocks, 4, True)
        self.free = list(range(1, num_blocks))
        self.names = {}  # block -> name
        self.offers = []  # (name, block), eldest first
        self.tables = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        got = self.blocks.allocate(count)
        if count > len(self.free):
            assert got is None
            return
        expected, self.free = self.free[:count], self.free[count:]
        assert got == expected
        for block in got:
            self.model_forget(block)
        if got:
            self.tables.append(got)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.sampled_from("abcd"))
    def register(self, data, name):
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        self.blocks.register(block, name.encode())
        if block not in self.names:
            self.names[block] = name
            self.offers.append((name, block))

    @rule(names=st.lists(st.sampled_from("abcd"), max_size=4, unique=True))
    def hit(self, names):
        expected = []
        for name in names:
            found = [block for known, block in self.offers if known == name]
            if not found:
                break
            expected.append(found[0])
        got = self.blocks.match(name.encode() for name in names)
        assert got == expected
        assert self.blocks.num_idle(got) == sum(block in self.free for block in got)
        self.blocks.share(got)
        self.free = [block for block in self.free if block not in got]
        if got:
            self.tables.append(got)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.blocks.free(table)
        for block in reversed(table):
            if any(block in other for other in self.tables):
                continue
            self.free = [*self.free, block] if block in self.names else [block, *self.free]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data):
        table = data.draw(st.sampled_from(self.tables))
        self.blocks.forget(table)
        for block in table:
            self.model_forget(block)

    @rule()
    def reset_cache(self):
        assert self.blocks.reset_cache() == (not self.tables)
        if not self.tables:
            self.names, self.offers = {}, []

    def model_forget(self, block):
        if block in self.names:
            self.offers.remove((self.names.pop(block), block))

    @invariant()
    def agrees(self):
        if not hasattr(self, "blocks"):
            return
        assert self.blocks.free_list == tuple(self.free)
        assert self.blocks.num_free == len(self.free)
        cached = [block for block in self.free if self.blocks.hash_of(block) is not None]
        assert self.blocks.num_cached == len(cached)
        assert 0 not in self.free
        for block in range(1, self.blocks.num_blocks):
            holders = sum(table.count(block) for table in self.tables)
            assert self.blocks.num_references(block) == holders


BlocksMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, database=None
)
TestBlocksAgainstTheModel = BlocksMachine.TestCase
