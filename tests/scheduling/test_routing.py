"""Which replica a request is given to."""

from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.scheduling.routing import OVERLOAD, PrefixTable, ReplicaLoad, Router

loads = st.lists(
    st.builds(ReplicaLoad, st.integers(0, 10_000), st.integers(0, 300), st.booleans()),
    min_size=2,
    max_size=6,
)
STEP = 512


def idle(num):
    return [ReplicaLoad(0, 0)] * num


def available(loads):
    return [i for i, load in enumerate(loads) if load.is_available] or list(range(len(loads)))


@given(loads, st.data())
def test_unavailable_replica_is_chosen_only_where_none_is_available(loads, data):
    routing = Router(len(loads), STEP)
    rank = data.draw(st.none() | st.integers(0, len(loads) - 1))
    session_id = data.draw(st.none() | st.text(min_size=1, max_size=4))
    cached = [0] * len(loads)
    chosen = routing.choose(loads, cached, rank=rank, session_id=session_id)
    assert chosen in available(loads)
    if rank in available(loads):
        assert chosen == rank


@given(loads, st.data())
def test_request_goes_to_least_loaded_replica(loads, data):
    cached = data.draw(st.lists(st.integers(0, 5000), min_size=len(loads), max_size=len(loads)))
    chosen = Router(len(loads), STEP).choose(loads, cached)
    left = [load.num_ahead - hit for load, hit in zip(loads, cached, strict=True)]
    assert left[chosen] == min(left[i] for i in available(loads))


@given(loads, st.text(min_size=1, max_size=8))
def test_session_is_never_on_overloaded_replica_by_its_name_alone(loads, session_id):
    chosen = Router(len(loads), STEP).choose(loads, [0] * len(loads), session_id=session_id)
    least = min(loads[i].num_ahead for i in available(loads))
    assert loads[chosen].num_ahead <= OVERLOAD * least + STEP


def loads_of(*pairs):
    return [ReplicaLoad(num_tokens, 0, expected_s=seconds) for num_tokens, seconds in pairs]


def test_the_earliest_expected_first_token_decides():
    assert Router(2, STEP).choose(loads_of((20_000, 0.3), (5000, 4.0)), [0, 0]) == 0


def test_among_equally_early_replicas_least_work_decides():
    loads = loads_of((20_000, 1.0), (5000, 1.2), (0, 1.3))
    assert Router(3, STEP).choose(loads, [0] * 3) == 1
    assert Router(3, STEP).choose(loads, [16_000, 0, 0]) == 0


def test_where_one_replica_expects_nothing_tokens_decide():
    assert Router(2, STEP).choose(loads_of((20_000, 0.3), (5000, None)), [0, 0]) == 1


def test_unavailable_replica_is_not_asked_what_it_expects():
    loads = [ReplicaLoad(9, 0, False), *loads_of((20_000, 0.3), (5000, 4.0))]
    assert Router(3, STEP).choose(loads, [0] * 3) == 1


def test_lost_replica_moves_only_its_sessions():
    routing, names = Router(4, STEP), [f"session {i}" for i in range(100)]
    before = [routing.choose(idle(4), [0] * 4, session_id=name) for name in names]
    assert before == [routing.choose(idle(4), [0] * 4, session_id=name) for name in names]
    assert set(before) == {0, 1, 2, 3}
    rest = [ReplicaLoad(0, 0, i != 2) for i in range(4)]
    after = [routing.choose(rest, [0] * 4, session_id=name) for name in names]
    assert [a for a, b in zip(after, before, strict=True) if b != 2] == [
        b for b in before if b != 2
    ]


def test_a_session_gives_way_to_load():
    routing = Router(2, STEP)
    home = routing.choose(idle(2), [0, 0], session_id="a")
    busy = [ReplicaLoad(0, 0)] * 2
    busy[home] = ReplicaLoad(STEP + 1, 0)
    assert routing.choose(busy, [0, 0], session_id="a") == 1 - home


def test_equal_replicas_take_turns():
    routing = Router(3, STEP)
    assert [routing.choose(idle(3), [0] * 3) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_rows_that_decode_weigh_less_than_a_prompt():
    routing = Router(2, STEP)
    assert routing.choose([ReplicaLoad(8192, 1), ReplicaLoad(0, 100)], [0, 0]) == 1


def test_prefixes_are_counted_from_the_first_block_on():
    table = PrefixTable(2)
    table.note([b"a", b"b", b"c"], 0)
    table.note([b"a", b"x"], 1)
    assert table.match([b"a", b"b", b"c", b"d"]) == [3, 1]
    assert table.match([b"b"]) == [1, 0]
    assert table.match([]) == [0, 0]
    table.forget(0)
    assert (table.match([b"a", b"b"]), len(table)) == ([0, 1], 2)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 6))))
def test_table_of_prefixes_is_bounded_and_keeps_beginnings(notes):
    table = PrefixTable(3, max_prefixes=8)
    for replica, first, length in notes:
        chain = [f"{first}:{i}".encode() for i in range(length)]
        table.note(chain, replica)
        assert len(table) <= 8
        assert table.match(chain)[replica] == length
