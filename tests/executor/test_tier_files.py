"""Files of the tier on disk: their format, damage, the bound of the folder and the order of removal."""

import json
import os
import stat
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.executor.steps import tier_files
from trouper.actors.executor.steps.tier_files import (
    FIRST_PARENT,
    HEAD,
    RAW,
    Checksum,
    PackedBlock,
    RefusedError,
    TierDisk,
    TierEntry,
    TierFolder,
    removals,
)
from trouper.actors.executor.steps.tier_thread import IDLE_S, TierThread
from trouper.actors.executor.workers import tier_space
from trouper.actors.messages.steps import state_of
from trouper.config.args import EngineArgs
from trouper.config.parallel import CPU_BIND, PARTITION
from trouper.config.resolve import resolve
from trouper.config.tier import TierConfig

SPACE = b"s" * 16
NUM_RAW = 4096
SUM = Checksum()


def name_of(number):
    return number.to_bytes(8, "big") * 4


def raw_of(number):
    return np.random.default_rng(number).integers(0, 256, NUM_RAW, dtype=np.uint8)


def block_of(number):
    raw = raw_of(number)
    checksum = SUM.of(raw, name_of(number))
    return PackedBlock(RAW, np.empty(0, np.uint32), raw, NUM_RAW, checksum)


def a_folder(path, *, max_bytes=2**20, min_free=0.0, disk=None, space=SPACE):
    os.makedirs(path, mode=0o700, exist_ok=True)
    return TierFolder(TierConfig(str(path), max_bytes, min_free, 2**30), space, disk)


def put(folder, number, parent=None):
    folder.write(name_of(number), b"" if parent is None else name_of(parent), block_of(number))


def read(folder, number):
    """Return the bytes of a block as the thread does: after the check of its sum."""
    packed = folder.read(name_of(number), NUM_RAW)
    if SUM.of(packed.payload, name_of(number)) != packed.checksum:
        raise RefusedError("sum")
    return packed.payload


def path_of(path, number):
    (found,) = [f for f in path.rglob("*") if f.name.startswith(name_of(number).hex() + ".")]
    return found


def test_block_is_found_after_a_restart(tmp_path):
    put(a_folder(tmp_path), 1)
    folder = a_folder(tmp_path)
    assert folder.take_changes() == ((name_of(1),), ())
    assert (read(folder, 1) == raw_of(1)).all()
    assert name_of(1) not in a_folder(tmp_path, space=b"t" * 16)


def test_only_the_owner_may_read_files(tmp_path):
    put(a_folder(tmp_path), 1)
    modes = {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.rglob("*") if f.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / SPACE.hex()).stat().st_mode) == 0o700


def a_head(data):
    head = bytes(data[: HEAD.size])
    return head + zlib.crc32(head).to_bytes(4, "little")


def damages(data, other):
    """Yield contents that differ from the file's in each way that a disk or a user may cause."""
    for place in (
        0,
        4,
        5,
        8,
        16,
        24,
        40,
        72,
        HEAD.size,
        HEAD.size + 4,
        len(data) // 2,
        len(data) - 1,
    ):
        yield data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
    yield from (data[:size] for size in (0, 1, HEAD.size, HEAD.size + 3, len(data) - 1))
    yield data + b"\0"
    yield data[:2000] + bytes(1000) + data[3000:]
    yield data[:1000] + data[2000:3000] + data[1000:2000] + data[3000:]
    yield bytes(len(data))
    yield other
    # A head of the right name and sum with the contents of another block.
    yield data[: HEAD.size + 4] + other[HEAD.size + 4 :]
    wide = bytearray(data)
    wide[8:12] = (2**31).to_bytes(4, "little")
    yield a_head(wide) + bytes(data[HEAD.size + 4 :])


def test_no_damaged_file_is_used(tmp_path):
    folder = a_folder(tmp_path)
    put(folder, 1)
    put(folder, 2)
    path, other = path_of(tmp_path, 1), path_of(tmp_path, 2).read_bytes()
    good = path.read_bytes()
    count = 0
    for data in damages(good, other):
        count += 1
        folder = a_folder(tmp_path)
        path.write_bytes(data)
        try:
            read(folder, 1)
        except RefusedError:
            # What the folder has refused itself is gone; the thread removes what its sum refuses.
            folder.remove(name_of(1))
        else:
            pytest.fail(f"damage {count} was not found")
        assert not path.exists()
        path.write_bytes(good)
    assert count == 24
    assert (read(a_folder(tmp_path), 1) == raw_of(1)).all()


def a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replace", [a_link, a_pipe, a_directory, os.unlink])
def test_only_plain_files_are_read(tmp_path, replace):
    folder = a_folder(tmp_path)
    put(folder, 1)
    replace(path_of(tmp_path, 1))
    with pytest.raises(RefusedError):
        read(folder, 1)
    assert name_of(1) not in folder
    assert name_of(1) not in a_folder(tmp_path)


def num_bytes(path):
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


@pytest.fixture
def always_reads(monkeypatch):
    """Read changed folders at once, however long the last reading took."""
    monkeypatch.setattr(tier_files, "REST", 0)


@pytest.mark.usefixtures("always_reads")
def test_two_writers_stay_within_the_bound_at_all_times(tmp_path):
    size = NUM_RAW + HEAD.size + 4
    bound, seen = 5 * size, []

    class Watched(TierDisk):
        def write(self, path, parts):
            super().write(path, parts)
            seen.append(num_bytes(tmp_path))

    one = a_folder(tmp_path, max_bytes=bound, disk=Watched())
    two = a_folder(tmp_path, max_bytes=bound, disk=Watched(), space=b"t" * 16)
    for number in range(1, 40):
        put(one if number % 3 else two, number)
    assert max(seen) == bound
    assert 3 * size <= num_bytes(tmp_path) <= bound
    assert a_folder(tmp_path, max_bytes=bound).num_bytes == num_bytes(tmp_path)


def test_smaller_bound_holds_from_the_start(tmp_path):
    folder = a_folder(tmp_path)
    for number in range(8):
        put(folder, number)
    assert a_folder(tmp_path, max_bytes=folder.num_bytes // 2).num_bytes <= folder.num_bytes // 2
    assert num_bytes(tmp_path) <= folder.num_bytes // 2


def put_state(folder, number):
    name, raw = state_of(name_of(number)), raw_of(100 + number)
    packed = PackedBlock(RAW, np.empty(0, np.uint32), raw, NUM_RAW, SUM.of(raw, name))
    folder.write(name, name_of(number), packed)


def test_state_has_the_name_of_its_block(tmp_path):
    folder = a_folder(tmp_path)
    with pytest.raises(RefusedError, match="parent"):
        put_state(folder, 1)
    put(folder, 1)
    put_state(folder, 1)
    again = a_folder(tmp_path)
    assert set(again.take_changes()[0]) == {name_of(1), state_of(name_of(1))}
    assert (again.read(state_of(name_of(1)), NUM_RAW).payload == raw_of(101)).all()
    assert (read(again, 1) == raw_of(1)).all()
    # It is used with its block, and removed before it.
    again.touch(state_of(name_of(1)))
    size = 3 * num_bytes(tmp_path) // 4
    smaller = a_folder(tmp_path, max_bytes=size)
    assert name_of(1) in smaller
    assert state_of(name_of(1)) not in smaller


def test_state_and_block_are_not_exchanged(tmp_path):
    folder, name = a_folder(tmp_path), name_of(1)
    put(folder, 1)
    put_state(folder, 1)
    block, state = path_of(tmp_path, 1), next(tmp_path.rglob(f"{name.hex()}ff.*"))
    contents = block.read_bytes(), state.read_bytes()
    block.write_bytes(contents[1])
    state.write_bytes(contents[0])
    for each in (name, state_of(name)):
        with pytest.raises(RefusedError, match="name"):
            folder.read(each, NUM_RAW)
    assert SUM.of(raw_of(1), name) != SUM.of(raw_of(1), state_of(name))


def test_children_go_before_parents(tmp_path):
    size = NUM_RAW + HEAD.size + 4
    folder = a_folder(tmp_path, max_bytes=5 * size)
    for number, parent in ((1, None), (2, 1), (3, 2), (4, None), (5, 4)):
        put(folder, number, parent)
    # The second chain was used later than the first one.
    folder.touch(name_of(5))
    put(folder, 6)
    here = [number for number in range(1, 7) if name_of(number) in folder]
    assert here in ([1, 2, 4, 5, 6], [1, 4, 5, 6])


def test_block_without_its_parent_is_not_written(tmp_path):
    folder = a_folder(tmp_path)
    with pytest.raises(RefusedError, match="parent"):
        put(folder, 2, 1)
    assert not list((tmp_path / SPACE.hex()).iterdir())


def test_full_file_system_takes_no_block(tmp_path):
    class Full(TierDisk):
        def num_free(self, path):
            return 2**20, 2**30

    folder = a_folder(tmp_path, min_free=0.05, disk=Full())
    with pytest.raises(RefusedError, match="full"):
        put(folder, 1)


def test_interrupted_write_leaves_nothing(tmp_path):
    class Broken(TierDisk):
        def write(self, path, parts):
            super().write(path, parts[:1])
            raise OSError(28, "No space left on device")

    folder = a_folder(tmp_path, disk=Broken())
    with pytest.raises(OSError, match="No space"):
        put(folder, 1)
    assert folder.num_bytes == 0
    assert not list((tmp_path / SPACE.hex()).iterdir())
    (tmp_path / SPACE.hex() / f"{name_of(1).hex()}.tmp").write_bytes(b"of a dead process")
    a_folder(tmp_path)
    assert not list((tmp_path / SPACE.hex()).iterdir())


def test_circle_of_names_can_be_removed():
    entries = {("s", a): TierEntry(b"", b, 1, 0.0, 0.0) for a, b in (("1", "2"), ("2", "1"))}
    assert len(removals(entries, 2)) == 2


@pytest.mark.usefixtures("always_reads")
def test_files_of_another_process_are_found(tmp_path):
    one, two = a_folder(tmp_path), a_folder(tmp_path)
    put(one, 1)
    two.look()
    assert two.take_changes() == ((name_of(1),), ())
    one.clear()
    two.look()
    assert two.take_changes() == ((), (name_of(1),))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_removal_frees_enough_and_leaves_no_orphan(data):
    count = data.draw(st.integers(1, 12))
    entries = {}
    for i in range(count):
        parent = data.draw(st.integers(-1, i - 1))
        label = FIRST_PARENT if parent < 0 else f"{parent + 1:016x}"
        size, used = data.draw(st.integers(1, 9)), float(data.draw(st.integers(0, 9)))
        entries["s", f"{i + 1:016x}"] = TierEntry(b"", label, size, used, used)
    wanted, files = data.draw(st.integers(0, 80)), data.draw(st.integers(0, 4))
    gone = removals(entries, wanted, files)
    left = {key: entry for key, entry in entries.items() if key not in gone}
    assert len(set(gone)) == len(gone)
    assert not left or sum(entries[key].num_bytes for key in gone) >= wanted
    assert len(gone) >= min(files, count)
    assert all(e.parent == FIRST_PARENT or ("s", e.parent) in left for e in left.values())
    if gone and sum(entries[key].num_bytes for key in gone[:-1]) >= wanted:
        assert len(gone) <= files
    # Among chains of one block the least recently used goes first.
    lone = [k for k in gone if all(e.parent != k[1] for e in entries.values())]
    kept = [k for k in left if all(e.parent != k[1] for e in entries.values())]
    assert all(entries[a].used_s <= entries[b].used_s for a in lone for b in kept)


@given(st.integers(0, 2**20), st.integers(1, 2**32 - 1), st.integers(8, 300_000))
@settings(max_examples=60, deadline=None)
def test_sum_finds_every_change_of_a_word(place, change, size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = SUM.of(data, b"n" * 32)
    assert before != SUM.of(data, b"m" * 32)
    place %= size // 4
    data[: size // 4 * 4].view(np.uint32)[place] ^= change
    assert SUM.of(data, b"n" * 32) != before


def test_weights_are_read_once_while_they_do_not_change(tmp_path, monkeypatch):
    file, memory, read = tmp_path / "w", tmp_path / "weights.json", []
    file.write_bytes(b"weights")
    right = tier_space._digest
    monkeypatch.setattr(tier_space, "_digest", lambda path: read.append(path) or right(path))
    first = tier_space._digests([file], memory)
    assert tier_space._digests([file], memory) == first
    assert len(read) == 1
    os.truncate(file, 3)
    assert tier_space._digests([file], memory) != first
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600


def test_processes_that_start_together_read_weights_once(tmp_path, monkeypatch):
    """Another process writes its digests while this one waits for the lock."""
    file, memory = tmp_path / "w", tmp_path / "weights.json"
    file.write_bytes(b"weights")
    first, known = tier_space._digests([file], memory), memory.read_bytes()
    memory.unlink()
    monkeypatch.setattr(tier_space.fcntl, "flock", lambda lock, how: memory.write_bytes(known))
    monkeypatch.setattr(tier_space, "_digest", lambda path: pytest.fail("read again"))
    assert tier_space._digests([file], memory) == first
    assert stat.S_IMODE((tmp_path / "weights.lock").stat().st_mode) == 0o600


def test_each_part_of_a_model_has_its_own_space(tmp_path, monkeypatch):
    spaces = []
    for options, cuts, bound in (
        ({}, "", ""),
        ({"pipeline_parallel_size": 2}, "", ""),
        ({"pipeline_parallel_size": 2}, "1,8", ""),
        ({"tensor_parallel_size": 2}, "", ""),
        # A rank's part depends on the threads of the other one.
        ({"tensor_parallel_size": 2}, "", "0|0,1"),
    ):
        monkeypatch.setenv(CPU_BIND, bound)
        with monkeypatch.context() as patch:
            if cuts:
                patch.setenv(PARTITION, cuts)
            tier = {"kv_tier_dir": str(tmp_path / "t"), "load_format": "dummy"}
            config = resolve(EngineArgs(**options, **tier))
        workers = range(config.workers_per_replica)
        spaces += [tier_space.find_space(config, worker, 1) for worker in workers]
    assert len(set(spaces)) == len(spaces) == 9


def test_length_that_chooses_rotary_factors_is_named(tmp_path):
    """LongRoPE turns keys otherwise in an engine whose `max_model_len` is beyond the trained length."""
    model, rope = tmp_path / "model", {"rope_type": "longrope", "factor": 8.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "original_max_position_embeddings": 64,
    }  # fmt: skip
    model.mkdir()
    spaces = []
    # The second config only mentions the field's name.
    for more in ({}, {"id2label": {"0": "long_factor"}}, {"rope_scaling": rope}):
        (model / "config.json").write_text(json.dumps({**fields, **more}))
        for length in (64, 128):
            args = EngineArgs(
                str(model),
                load_format="dummy",
                max_model_len=length,
                kv_tier_dir=str(tmp_path / "t"),
                skip_tokenizer_init=True,
            )
            spaces.append(tier_space.find_space(resolve(args), 0, 1))
    assert spaces[0] == spaces[1]
    assert spaces[2] == spaces[3]
    assert len(set(spaces)) == 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b'{"a": 1'),
        lambda path: path.write_bytes(b'{"a": 1}'),
        lambda path: os.truncate(path, 2**30),
        a_link,
        a_pipe,
        a_directory,
        os.unlink,
    ],
)
def test_bad_memory_of_digests_is_not_used(tmp_path, spoil):
    file, memory = tmp_path / "w", tmp_path / "weights.json"
    file.write_bytes(b"weights")
    first = tier_space._digests([file], memory)
    spoil(memory)
    assert tier_space._digests([file], memory) == first


def test_stores_leave_the_cores_to_a_busy_device(tmp_path):
    idle_s = [0.0]
    config = TierConfig(str(tmp_path), 2**20, 0.0, 2**30)
    thread = TierThread(config, lambda: SPACE, lambda: idle_s[0])
    try:
        assert thread._wait_s() <= 0
        thread._core_s = -1.0
        assert thread._wait_s() == IDLE_S
        idle_s[0] = 1.0
        assert thread._wait_s() <= 0
    finally:
        thread.close()
