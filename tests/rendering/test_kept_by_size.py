"""A cache whose room is counted in bytes, and shared by its owners."""

from trouper.actors.rendering.grammar.matchers import KeptBySize


def those(kept, keys="abcdefg"):
    return "".join(key for key in keys if key in kept._entries)


def test_what_was_used_last_stays_as_long_as_room():
    kept = KeptBySize(100)
    for key, size in (("a", 40), ("b", 40)):
        kept.put(key, key.upper(), size)
    assert kept.get("a") == "A"
    kept.put("c", "C", 30)
    assert (those(kept), kept.num_bytes) == ("ac", 70)
    kept.put("d", "D", 101)
    assert (those(kept), kept.num_bytes) == ("", 0)


def test_a_value_that_is_put_again_counts_once():
    kept = KeptBySize(100)
    for size in (60, 70):
        kept.put("a", size, size)
    assert (kept.get("a"), kept.num_bytes, len(kept)) == (70, 70, 1)


def test_owner_has_half_of_room_and_pushes_out_its_own():
    kept = KeptBySize(100)
    kept.put("a", 1, 40, "one")
    for key in "bcde":
        kept.put(key, 1, 20, "two")
    assert (those(kept), kept.num_bytes) == ("ade", 80)
