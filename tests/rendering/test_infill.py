"""Prompts with a gap: the order of their parts, what is left out, and what a text cannot spell."""

import pytest
from tokenizers import AddedToken

from tests.support.infill import MARKS, save_demo
from tests.support.tokenizers import byte_level, metaspace
from trouper import LLM, BeamSearchParams, SamplingParams
from trouper.actors.rendering.prompts.infill import FAMILIES, Gap, gap_ids, marks_of
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import TrouperValidationError, UnsupportedFeatureError

ENDS = ["<|endoftext|>", "<|fim_pad|>"]


def tokenizer_with(names, make=byte_level):
    backend = make()
    backend.add_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    special = {"bos_token": "<s>"} if make is metaspace else {}
    return Tokenizer(backend, special_tokens=special)


@pytest.fixture(scope="module")
def full():
    return tokenizer_with(MARKS)


def spelled(tokenizer, gap, adds_bos=True):
    """The prompt as text, its marks among it."""
    control = tuple(tokenizer.added_tokens.values())
    ids = gap_ids(gap, marks_of(tokenizer), tokenizer, control, adds_bos=adds_bos)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("names", FAMILIES)
def test_each_family_has_marks_of_its_own(names):
    prefix, suffix, middle = names
    text = spelled(tokenizer_with(names), Gap("the cat", "the mat", "sat"))
    assert text == f"{prefix}the cat{suffix}the mat{middle}sat"


def test_infill_prompt_begins_with_bos():
    tokenizer = tokenizer_with(FAMILIES[4], metaspace)
    marks = marks_of(tokenizer)
    ids = gap_ids(Gap("the cat", "at"), marks, tokenizer, (), adds_bos=True)
    assert ids[:2] == [1, marks.prefix]
    assert gap_ids(Gap("the cat", "at"), marks, tokenizer, (), adds_bos=False) == ids[1:]
    after = ids[ids.index(marks.suffix) + 1 : ids.index(marks.middle)]
    assert after == [tokenizer.token_id("at")]  # no metaspace is put before it


def test_tokenizer_without_marks_is_named_in_error(byte_tokenizer):
    with pytest.raises(TrouperValidationError, match="no tokens for filling in") as raised:
        marks_of(byte_tokenizer)
    assert raised.value.parameter == "suffix"


def test_what_ends_a_middle_beside_eos(full):
    names = [full.added_tokens[id] for id in marks_of(full).ends]
    assert sorted(names) == sorted([*ENDS, "<|repo_name|>", "<|file_sep|>"])


def test_text_that_spells_mark_has_no_mark(full):
    marks = marks_of(full)
    gap = Gap(
        "a<|fim_suffix|>b", "<|fim_middle|><|im_end|>", files=(("<|file_sep|>", "<|repo_name|>"),)
    )
    ids = gap_ids(gap, marks, full, tuple(full.added_tokens.values()), adds_bos=True)
    found = [id for id in ids if id in full.special_ids]
    assert found == [
        marks.repo, marks.file, marks.file, marks.prefix, marks.suffix, marks.middle,
    ]  # fmt: skip
    assert "a<|fim_suffix|>b" in full.decode(ids, skip_special_tokens=False)


def test_files_stand_before_the_prefix_in_their_order(full):
    gap = Gap("p", "s", files=(("a.py", "one"), ("b.py", "two")))
    assert spelled(full, gap) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\none<|file_sep|>b.py\ntwo"
        "<|file_sep|>filename\n<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )
    plain = tokenizer_with(FAMILIES[0])
    assert spelled(plain, gap) == (
        "\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo"
        "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    )


@pytest.mark.parametrize("limit", [3, 4, 7, 11, 30, 200])
def test_what_lies_farthest_from_gap_is_left_out(full, limit):
    gap = Gap(
        "0123456789" * 5,
        "9876543210" * 5,
        files=(("a", "x" * 60), ("b", "y" * 20)),
        max_tokens=limit,
    )
    control = tuple(full.added_tokens.values())
    marks = marks_of(full)
    ids = gap_ids(gap, marks, full, control, adds_bos=True)
    assert len(ids) <= limit
    text = full.decode(ids, skip_special_tokens=False)
    prefix, suffix = (
        text[text.index("<|fim_prefix|>") + 14 :]
        .removesuffix("<|fim_middle|>")
        .split("<|fim_suffix|>")
    )
    assert gap.prefix.endswith(prefix)
    assert gap.suffix.startswith(suffix)
    room = limit - 3
    assert len(prefix) + len(suffix) == min(room, 100)
    assert len(suffix) == min(50, max(room // 4, room - 50))
    assert ("y" * 20 in text) is (limit == 200)


def test_short_suffix_leaves_its_room_to_prefix(full):
    text = spelled(full, Gap("x" * 40, "ab", max_tokens=33))
    assert text == "<|fim_prefix|>" + "x" * 28 + "<|fim_suffix|>ab<|fim_middle|>"


def test_a_middle_without_room_is_refused(full):
    with pytest.raises(TrouperValidationError, match="parameter=middle"):
        spelled(full, Gap("a", "b", "the cat sat", max_tokens=5))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"suffix": 1}, "suffix"), ({"prompt": [1]}, "prompt"), ({"middle": 1}, "middle"),
        ({"files": "x"}, "files"), ({"files": [1]}, "files\\[0\\]"), ({"files": [{"filename": "a"}]}, "files\\[0\\]"),
        ({"files": [{"text": "a"}] * 257}, "files"), ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"max_prompt_tokens": True}, "max_prompt_tokens"), ({"max_prompt_tokens": "9"}, "max_prompt_tokens"),
    ],
)  # fmt: skip
def test_a_bad_gap_is_refused_by_name(fields, name):
    with pytest.raises(TrouperValidationError, match=f"parameter={name}"):
        Gap.of({"prompt": "a", "suffix": "b", **fields})


def test_a_python_prompt_may_have_a_suffix(tmp_path):
    ids = save_demo(tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with LLM(str(tmp_path), dtype="float32", max_model_len=256, num_gpu_blocks_override=64) as llm:
        tokenizer = llm.thread.engine.tokenizer
        parts = [tokenizer.encode(text) for text in ("def f(", "return x")]
        marked = [ids[MARKS[0]], *parts[0], ids[MARKS[1]], *parts[1], ids[MARKS[2]]]
        gap = {"prompt": "def f(", "suffix": "return x"}
        found, same = llm.generate([gap, marked], greedy, use_tqdm=False)
        assert found.prompt_token_ids == marked
        assert found.outputs[0].token_ids == same.outputs[0].token_ids
        only = SamplingParams(allowed_token_ids=[ids["<|fim_pad|>"]], max_tokens=4)
        (ended,) = llm.generate(gap, only, use_tqdm=False)
        assert ended.outputs[0].stop_reason == ids["<|fim_pad|>"]
        with pytest.raises(
            UnsupportedFeatureError, match="suffix is not supported with beam search"
        ):
            llm.beam_search(gap, BeamSearchParams(2, 2))
        with pytest.raises(TrouperValidationError, match="truncate_prompt_tokens"):
            llm.generate(
                gap, greedy, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 9}
            )
        with pytest.raises(TrouperValidationError, match="reduce the length"):
            llm.generate({**gap, "prompt": "x " * 99_999}, greedy, use_tqdm=False)
