"""The light tokenizer: equal to transformers', whole characters in streams, texts for logprobs."""

import itertools
import json
import re
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from trouper.actors.rendering import token_stream
from trouper.actors.rendering.tokenizer import LONG_TEXT_CHARS, Tokenizer
from trouper.errors import GenerationError, TrouperValidationError, UnsupportedFeatureError
from trouper.extras import install_hint

TEXTS = [
    "the cat sat on the mat", "", " ", "  two  spaces ", "日本語 🎉", "line\n\nline\t", "\u200b" * 9,
    "<|im_start|>user\nhello<|im_end|>", "<s>hello</s> <think>x", "a\0b", "the<|im_end|> cat",
]  # fmt: skip


@pytest.fixture(params=["bytes", "metaspace"])
def pair(request, make_folder):
    """Ours and transformers' tokenizer of one folder."""
    folder = make_folder(request.param)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_it_encodes_and_decodes_as_transformers_does(pair, add_special_tokens):
    ours, theirs = pair
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_long_text_is_encoded_as_short_one(pair):
    ours, theirs = pair
    text = "the cat sat on the mat " * LONG_TEXT_CHARS
    assert ours.encode(text) == theirs.encode(text)
    with pytest.raises(TrouperValidationError, match="surrogate"):
        ours.encode("\ud800" * LONG_TEXT_CHARS)


def test_other_threads_run_while_long_text_is_encoded(byte_tokenizer):
    ran, is_over = [], threading.Event()

    def beat():
        while not is_over.wait(0.0001):
            ran.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that only who gives the interpreter away is interrupted
    beats = threading.Thread(target=beat)
    try:
        beats.start()
        ran.clear()
        byte_tokenizer.encode("xyz, " * 10**5)
        num_beats = len(ran)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        beats.join()
    assert num_beats > 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_it_cuts_two_texts_where_transformers_does(pair, side):
    ours, theirs = pair
    theirs.truncation_side = side
    texts = ["one " * num for num in range(1, 6)]
    longest = max(len(theirs(one, two)["input_ids"]) for one in texts for two in texts)
    for one, two, length in itertools.product(texts, texts, range(6, longest + 2)):
        cut = theirs(one, two, truncation=True, max_length=length)["input_ids"]
        ids, _ = ours.encode_within(one, two, max_length=length, keeps_end=side == "left")
        assert ids == cut, (one, two, length)


def test_it_knows_what_transformers_knows(pair):
    ours, theirs = pair
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.max_id == max(theirs.get_vocab().values())
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert type(ours.hf_tokenizer()) is type(theirs)


def test_only_tokenizer_json_works_without_transformers(make_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it raises ImportError
    ours = Tokenizer.load(make_folder("bytes"))
    assert ours.decode(ours.encode("the cat")) == "the cat"
    # It differs where trouper is not installed but only importable.
    hint = re.escape(install_hint("transformers"))
    with pytest.raises(UnsupportedFeatureError, match=hint):
        ours.hf_tokenizer()
    with pytest.raises(UnsupportedFeatureError, match=rf"no tokenizer\.json.*{hint}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_add_bos_token_works_like_transformers(make_folder, add_bos_token, tokenizer_class):
    folder = make_folder("metaspace", add_bos_token=add_bos_token, tokenizer_class=tokenizer_class)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert Tokenizer.load(folder).encode("the cat") == theirs.encode("the cat")


def test_config_tokens_are_added_like_transformers(make_folder):
    folder = make_folder(
        "bytes",
        pad_token={"content": "<pad>", "__type": "AddedToken"},
        additional_special_tokens=["<extra>"],
        added_tokens_decoder={"900": {"content": "<new>", "special": False}},
    )
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    text = "a<pad>b<extra>c<new>d"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.vocab_size == len(theirs)


def test_the_legacy_special_tokens_map_is_read(make_folder):
    folder = make_folder("bytes")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>"}')
    theirs = AutoTokenizer.from_pretrained(folder)
    assert Tokenizer.load(folder).bos_token_id == theirs.bos_token_id == 0


def test_a_folder_without_tokenizer_json_is_converted(tmp_path):
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the cats") == [2, 5, 6, 7, 3]
    assert tokenizer.decode([2, 5, 6, 7, 3]) == "the cats"


def test_folder_without_tokenizer_is_validation_error(tmp_path):
    with pytest.raises(TrouperValidationError, match="tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.parameter == "tokenizer"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", '{"bos_token": {"no": 1}}'])
def test_broken_files_are_validation_errors(make_folder, name, content):
    folder = make_folder("bytes")
    (folder / name).write_text(content)
    with pytest.raises(TrouperValidationError, match=name):
        Tokenizer.load(folder)


def test_loading_tokenizer_json_imports_neither_transformers_nor_torch(make_folder):
    script = (
        "import sys; from trouper.actors.rendering.tokenizer import Tokenizer;"
        f"Tokenizer.load({str(make_folder())!r}).encode('hello');"
        "print(json.dumps([m for m in ('torch', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", "import json;" + script], capture_output=True)
    assert json.loads(done.stdout) == []


def test_a_lone_surrogate_is_a_validation_error(byte_tokenizer):
    with pytest.raises(TrouperValidationError, match="Unicode"):
        byte_tokenizer.encode("a\ud800")


def test_panic_in_library_is_error_like_any_other(byte_tokenizer, monkeypatch):
    class PanicException(BaseException):
        pass

    class Panicking:
        def encode(self, text, **options):
            raise PanicException("index out of bounds")

    monkeypatch.setattr(byte_tokenizer, "_backend", Panicking())
    with pytest.raises(GenerationError, match="index out of bounds"):
        byte_tokenizer.encode("a")


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_pieces_are_encoded_without_spaces_and_tokens_across_seams(request, kind):
    tokenizer = request.getfixturevalue(f"{'byte' if kind == 'bytes' else kind}_tokenizer")
    end = "<|im_end|>" if kind == "bytes" else "</s>"
    ids = tokenizer.encode_pieces(["the " + end[0], end[1:] + " cat"])
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == f"the {end} cat"
    assert tokenizer.encode_pieces(["the cat"], True) == tokenizer.encode("the cat")


# --- streams ---


def streamed(tokenizer, ids, prompt=(), **options):
    stream = tokenizer.stream(prompt, **options)
    return "".join(stream.push(token) for token in ids)


@pytest.mark.parametrize("text", [text for text in TEXTS if text.strip()])
@pytest.mark.parametrize("kind", ["byte", "metaspace"])
def test_a_stream_gives_the_whole_text(request, kind, text):
    tokenizer = request.getfixturevalue(f"{kind}_tokenizer")
    ids = tokenizer.encode(text)
    for skip in (True, False):
        assert streamed(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip)


def test_a_stream_gives_only_whole_characters(byte_tokenizer):
    stream = byte_tokenizer.stream()
    pieces = [stream.push(token) for token in byte_tokenizer.encode("é語🎊")]
    assert len(pieces) > 3
    assert "".join(pieces) == "é語🎊"
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_character_at_end_is_held_back(byte_tokenizer):
    ids = byte_tokenizer.encode("a🎊")
    assert streamed(byte_tokenizer, ids[:-1]) == "a"


def test_the_prompt_gives_the_first_word_its_space(metaspace_tokenizer):
    prompt = metaspace_tokenizer.encode("the")
    ids = metaspace_tokenizer.encode("cat", add_special_tokens=False)
    assert streamed(metaspace_tokenizer, ids, prompt) == " cat"
    assert streamed(metaspace_tokenizer, ids) == "cat"


def test_a_character_that_the_prompt_began_is_completed(byte_tokenizer):
    ids = byte_tokenizer.encode("hello hello hello hello é語")
    assert streamed(byte_tokenizer, ids[-1:], ids[:-1]) == "語"


def test_invalid_bytes_are_emitted_at_end(byte_tokenizer):
    half = byte_tokenizer.encode("🎊")[0]
    text = streamed(byte_tokenizer, [half] * 100)
    assert set(text) == {"\ufffd"}
    assert len(text) >= 100 - token_stream.MAX_HELD
    assert streamed(byte_tokenizer, [half] * 3 + byte_tokenizer.encode("the cat")).endswith(
        "the cat"
    )


def test_unknown_ids_and_skipped_special_tokens_have_no_text(byte_tokenizer):
    ids = byte_tokenizer.encode("the cat")
    noise = [-1, 10**9, *byte_tokenizer.special_ids] * 50
    assert streamed(byte_tokenizer, ids[:1] + noise + ids[1:], noise) == "the cat"


def test_invalid_prefix_resets_stream_with_warning(byte_tokenizer, monkeypatch, caplog):
    class Failing:
        def __init__(self, **options):
            pass

        def step(self, backend, token_id):
            raise Exception("Invalid prefix encountered while decoding stream.")

    ids = byte_tokenizer.encode("the cat")
    monkeypatch.setattr(token_stream, "DecodeStream", Failing)
    assert streamed(byte_tokenizer, ids) == "the cat"
    assert "reset" in caplog.text


def test_added_tokens_stand_without_spaces_when_asked(make_folder):
    backend = json.loads((folder := make_folder("bytes")).joinpath("tokenizer.json").read_text())
    backend["decoder"] = None  # such a decoder joins tokens with spaces
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = Tokenizer.load(folder)
    options = {"skip_special_tokens": False}
    assert streamed(tokenizer, [1, 2, 1], **options) == "<|im_start|> <|im_end|> <|im_start|>"
    options["spaces_between_special_tokens"] = False
    assert streamed(tokenizer, [1, 2, 1], **options) == "<|im_start|><|im_end|><|im_start|>"


@given(data=st.data(), skip=st.booleans())
def test_concatenated_stream_is_whole_text_for_any_text(byte_tokenizer, data, skip):
    letters = st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])
    ids = byte_tokenizer.encode(data.draw(st.text(letters, max_size=40)))
    assert streamed(byte_tokenizer, ids, skip_special_tokens=skip) == byte_tokenizer.decode(
        ids, skip
    )


@given(ids=st.lists(st.integers(0, 340), max_size=60))
def test_concatenated_stream_is_prefix_of_whole_text_for_any_tokens(byte_tokenizer, ids):
    text, whole = streamed(byte_tokenizer, ids), byte_tokenizer.decode(ids)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"} or len(whole) - len(text) < token_stream.MAX_HELD


# --- texts of single tokens ---


def test_token_that_completes_character_has_its_text(byte_tokenizer):
    ids = byte_tokenizer.encode("a é🎊 the")
    texts = [byte_tokenizer.token_text(id, ids[max(0, i - 3) : i]) for i, id in enumerate(ids)]
    assert "".join(texts) == "a é🎊 the"
    assert not any("\ufffd" in text for text in texts)


def test_special_tokens_have_text_and_unknown_ids_have_none(byte_tokenizer):
    assert byte_tokenizer.token_text(byte_tokenizer.eos_token_id) == "<|im_end|>"
    assert byte_tokenizer.token_text(10**9) == ""


def test_folder_with_config_and_no_tokenizer_is_named(tmp_path):
    """transformers makes an empty tokenizer of the config's kind for such a folder."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrouperValidationError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
