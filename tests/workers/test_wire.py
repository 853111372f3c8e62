"""Frames between an engine and its workers: whole, cut anywhere, large, and wrong."""

import os

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.executor.device import DeviceInfo
from trouper.actors.executor.workers import wire
from trouper.actors.messages.controls import LoadAdapter, Wake
from trouper.actors.messages.requests import (
    Embeds,
    Grammar,
    GrammarRules,
    ReasoningRules,
    SequenceId,
    Vocabulary,
)
from trouper.actors.messages.steps import (
    NewSequence,
    PoolDone,
    Sampling,
    StepDone,
    StepFailed,
    StepPlan,
)
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.grammar.matchers import ReceivedGrammars
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.adapters import AdapterConfig, AdapterFiles
from trouper.config.args import EngineArgs
from trouper.config.model import DEMO_MODEL
from trouper.config.resolve import resolve
from trouper.errors import (
    GrammarError,
    RetryableRequestError,
    TrouperValidationError,
    UnsupportedFeatureError,
)
from trouper.params import SamplingParams, StructuredOutputsParams


def a_plan(num_rows=4, num_embeds_bytes=0):
    embeds = ()
    if num_embeds_bytes:
        data = memoryview(bytes(range(256)) * (num_embeds_bytes // 256))
        embeds = (Embeds("float32", 1, num_embeds_bytes // 4, data),)
    new = NewSequence(0, SequenceId(7), (1, 2, 3), 3, (4,), Sampling(seed=2**63), embeds)
    return StepPlan(9, 0, (0,), (0,), (num_rows,), (1,), (new,), ((0, (5, 6)),), ((1, 2),))


VOCABULARY = Vocabulary('{"added_tokens": []}', 3, (0,), ("a", "b", ""))
THINKING = ReasoningRules("<a>", "</a>", (1,), (2,), begins_inside=True, budget=5)
FRAMES = [
    a_plan(),
    StepDone(9, ((5,), ())),
    StepFailed(3, "RuntimeError: x", True),
    wire.Call(1, Wake(frozenset({"weights"}))),
    wire.Call(2, LoadAdapter(3, AdapterFiles.of(AdapterConfig(r=4), b"\0" * 9))),
    wire.Close(),
    wire.Prepare(),
    VOCABULARY,
    wire.Loaded(DeviceInfo(8, 128, "bfloat16", "cpu")),
    wire.Broken(wire.ErrorText("TrouperValidationError", "too little", "kv_cache_memory")),
]


def frames_of(*pieces):
    reader = wire.FrameReader()
    for piece in pieces:
        reader.feed(piece, [])
        while (frame := reader.take()) is not None:
            yield frame


@given(st.lists(st.sampled_from(FRAMES), max_size=5), st.data())
def test_frames_survive_any_cut(frames, data):
    stream = b"".join(wire.encode(frame)[0] for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert list(frames_of(*pieces)) == frames


@pytest.mark.parametrize("num_bytes", [0, 1, wire.MAX_INLINE + 1, 3 * wire.PIECE_BYTES + 7])
def test_adapter_crosses_as_it_is_written_in_pieces(num_bytes):
    weights = bytes(range(256)) * (num_bytes // 256 + 1)
    files = AdapterFiles.of(AdapterConfig(r=4, rank_pattern={"q": 2}), weights[:num_bytes])
    call = wire.Call(2, LoadAdapter(3, files))
    data, file = wire.encode_adapter(call)
    reader = wire.FrameReader()
    reader.feed(data, [file])
    assert reader.take() == call


def test_a_grammar_crosses_as_its_rules():
    rules = GrammarRules(
        source="x" * 2**16, eos_token_ids=(0,), ignore_eos=True, num_tokens=3, reasoning=THINKING
    )
    grammar = Grammar(rules, lambda: "mine", "?".replace)
    new = NewSequence(0, SequenceId(7), (1, 2), 2, (4,), Sampling(), grammar=grammar)
    data, file = wire.encode(StepPlan(1, 0, (0,), (0,), (2,), (1,), (new,)))
    received = ReceivedGrammars()
    received.take(VOCABULARY)
    reader = wire.FrameReader(received.make)
    reader.feed(data, [file])
    taken = reader.take().new_sequences[0].grammar
    assert (taken.rules, taken.reasoning, taken.vocabulary) == (rules, THINKING, None)
    assert [taken.text_of(token) for token in (0, 2, 99)] == ["a", "", ""]


def test_matcher_of_grammar_that_crossed_allows_same_tokens():
    tokenizer = Tokenizer.load(DEMO_MODEL)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-f]+"))
    sent = Grammars(tokenizer, 4096, (0, 2), sends_grammars=True).compile(params)
    received = ReceivedGrammars()
    received.take(sent.vocabulary)
    taken = received.make(sent.rules)
    assert taken.matcher().compute_bitmask() == sent.matcher().compute_bitmask()
    assert [taken.text_of(i) for i in range(4096)] == [tokenizer.token_text(i) for i in range(4096)]


def test_a_resolved_config_crosses():
    config = resolve(EngineArgs())
    (frame,) = frames_of(wire.encode(wire.Load(config, sleep_level=1))[0])
    assert frame == wire.Load(config, sleep_level=1)


def test_large_payload_goes_in_memory_file_closed():
    before = len(os.listdir("/proc/self/fd"))
    plan = a_plan(num_embeds_bytes=2**20)
    data, file = wire.encode(plan)
    assert len(data) == wire.HEADER.size
    reader = wire.FrameReader()
    reader.feed(data, [file])
    taken = reader.take()
    assert taken == plan
    assert bytes(taken.new_sequences[0].embeds[0].data) == bytes(
        plan.new_sequences[0].embeds[0].data
    )
    del taken
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [3, 2**18])
def test_arrays_cross_as_they_are(size):
    done = PoolDone(1, (np.arange(size, dtype=np.float32), np.ones((2, 3), np.float32)))
    data, file = wire.encode(done)
    reader = wire.FrameReader()
    reader.feed(data, [] if file is None else [file])
    taken = reader.take()
    assert taken.step == 1
    for mine, theirs in zip(taken.arrays, done.arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype


@pytest.mark.parametrize(
    "data",
    [
        wire.HEADER.pack(len(wire.TYPES), 0),
        wire.HEADER.pack(0, wire.MAX_INLINE + 1),
        wire.HEADER.pack(8, 1) + b"\xc0",
        wire.HEADER.pack(8 | wire.IN_FILE, 10),
        wire.HEADER.pack(8, 3) + msgspec.msgpack.encode([1]) + b"xx",
    ],
)
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(wire.WireError):
        list(frames_of(data))


def test_large_frame_goes_inline_where_no_descriptor_can():
    plan = a_plan(num_embeds_bytes=2**20)
    data, none = wire.encode(plan, is_inline=True)
    assert none is None
    header, file = wire.encode(plan)
    assert wire.read_inline(header, file) == data
    os.close(file)
    reader = wire.FrameReader(max_inline=wire.MAX_FRAME)
    reader.feed(data[:1000], [])
    assert reader.take() is None
    reader.feed(data[1000:], [])
    assert reader.take().step == plan.step


def test_memory_to_keep_comes_with_its_frame():
    data, _ = wire.encode(wire.KeepMemory())
    kept = os.memfd_create("test")
    reader = wire.FrameReader()
    reader.feed(data, [kept])
    assert reader.take() == wire.KeepMemory(kept)
    os.close(kept)
    reader.feed(data, [])
    with pytest.raises(wire.WireError, match="missing"):
        reader.take()


def test_files_of_frames_not_taken_are_closed():
    _, file = wire.encode(a_plan(num_embeds_bytes=2**20))
    reader = wire.FrameReader()
    reader.feed(b"", [file])
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


@pytest.mark.parametrize("kind", [TrouperValidationError, UnsupportedFeatureError])
def test_error_of_our_own_comes_out_as_it_went_in(kind):
    found = wire.as_exception(wire.describe_error(kind("lora_path: bad", parameter="lora_path")))
    assert type(found) is kind
    assert (str(found), found.parameter) == (
        str(kind("lora_path: bad", parameter="lora_path")),
        "lora_path",
    )


@pytest.mark.parametrize(
    "error",
    [
        GrammarError("bad", parameter="regex", code="invalid_grammar"),
        RetryableRequestError("later", "device_restarting"),
    ],
    ids=["grammar", "retryable"],
)
def test_the_code_of_an_error_crosses(error):
    found = wire.as_exception(wire.describe_error(error))
    assert (found.code, getattr(found, "parameter", None)) == (
        error.code,
        getattr(error, "parameter", None),
    )
