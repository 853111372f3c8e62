"""Prompts of every form, truncation, limits, and what the model fills into sampling parameters."""

import pytest
from tokenizers.processors import TemplateProcessing

from trouper.actors.messages.requests import Render, RequestId, RequestOptions
from trouper.actors.rendering.prompts.prompts import Prompts
from trouper.actors.rendering.prompts.sampling import ModelLimits, resolve_sampling
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.errors import (
    ChatTemplateResolutionError,
    TrouperValidationError,
    UnsupportedFeatureError,
)
from trouper.params import MAX_STRINGS, SamplingParams

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
VOCAB = 400
LIMITS = ModelLimits(vocab_size=VOCAB, max_model_len=50, eos_token_ids=(2, 7, 9))
SLOT = object()  # lent to the Detokenizer; rendering never looks at it


def message(prompt, *, params=None, **options):
    return Render(
        id=RequestId(5),
        prompt=prompt,
        params=params or SamplingParams(),
        slot=SLOT,
        arrival_time=1.5,
        options=RequestOptions(priority=3, **options),
    )


@pytest.fixture(scope="module")
def tokenizer(make_folder):
    return Tokenizer.load(make_folder("bytes", chat_template=CHAT, bos_token="<|endoftext|>"))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return Prompts(tokenizer, LIMITS)


def refused(prompts, prompt, **options):
    with pytest.raises(TrouperValidationError) as caught:
        prompts.render(message(prompt, **options))
    return caught.value


# --- forms ---


def test_text_becomes_the_two_messages(prompts, tokenizer):
    rendered = prompts.render(message("the cat"))
    track, admit = rendered.track, rendered.admit
    ids = tuple(tokenizer.encode("the cat"))
    assert (track.id, track.prompt_token_ids, track.prompt, track.slot) == (5, ids, "the cat", SLOT)
    assert (admit.id, admit.prompt_token_ids, admit.options.priority, admit.arrival_time) == (
        5,
        ids,
        3,
        1.5,
    )


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([5, 6], None),
        ((5, 6), None),
        (range(5, 7), None),
        ({"prompt_token_ids": [5, 6]}, None),
        ({"prompt_token_ids": [5, 6], "prompt": "shown", "type": "token"}, "shown"),
    ],
)
def test_ids_pass_as_they_are(prompts, prompt, text):
    rendered = prompts.render(message(prompt))
    track, admit = rendered.track, rendered.admit
    assert (track.prompt_token_ids, admit.prompt_token_ids, track.prompt) == ((5, 6), (5, 6), text)


def test_integers_of_other_libraries_are_ids_too(prompts):
    numpy = pytest.importorskip("numpy")
    ids = prompts.render(message([numpy.int64(5), 6])).track.prompt_token_ids
    assert [type(token_id) for token_id in ids] == [int, int]


def test_conversation_goes_through_template_and_gets_no_further_special_tokens(make_folder):
    tokenizer = Tokenizer.load(make_folder("metaspace", chat_template=CHAT))
    chat = {"messages": [{"role": "user", "content": "the cat"}]}
    track = Prompts(tokenizer, LIMITS).render(message(chat)).track
    assert track.prompt == "<s>the cat"
    assert track.prompt_token_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(("wish", "count"), [(None, 1), (True, 1), (False, 0)])
def test_text_gets_special_tokens_unless_caller_says_no(metaspace_tokenizer, wish, count):
    prompts = Prompts(metaspace_tokenizer, LIMITS)
    track = prompts.render(message("the cat", add_special_tokens=wish)).track
    assert track.prompt_token_ids.count(metaspace_tokenizer.bos_token_id) == count


def test_template_of_request_wins_over_engines_and_that_over_tokenizers(tokenizer):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    mine = chat | {"chat_template": "mine{{ word }}", "chat_template_kwargs": {"word": "!"}}
    assert Prompts(tokenizer, LIMITS).render(message(chat)).track.prompt == "<|endoftext|>x"
    engine = Prompts(tokenizer, LIMITS, "engine")
    assert engine.render(message(chat)).track.prompt == "engine"
    assert engine.render(message(mine)).track.prompt == "mine!"


def test_without_template_conversation_is_typed_error(byte_tokenizer):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(ChatTemplateResolutionError):
        Prompts(byte_tokenizer, LIMITS).render(message(chat))


def test_named_templates_are_picked_by_name_and_by_tools(make_folder):
    named = [{"name": n, "template": n} for n in ("default", "tool_use", "rag")]
    prompts = Prompts(Tokenizer.load(make_folder("bytes", chat_template=named)), LIMITS)
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for more, text in (
        ({}, "default"),
        ({"tools": [{}]}, "tool_use"),
        ({"chat_template": "rag"}, "rag"),
    ):
        assert prompts.render(message(chat | more)).track.prompt == text


def test_a_cache_salt_reaches_the_scheduler(prompts):
    assert prompts.render(message({"prompt": "x", "cache_salt": "s"})).admit.cache_salt == "s"


# --- refusals ---


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(prompts, prompt):
    assert "empty" in str(refused(prompts, prompt))


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31, True, 1.0, "x", None, [5]])
def test_ids_that_are_none_are_refused(prompts, wrong):
    for prompt in ([5, wrong], {"prompt_token_ids": [wrong]}):
        error = refused(prompts, prompt)
        assert error.parameter == "prompt_token_ids"


@pytest.mark.parametrize(
    "prompt",
    [
        None, 5, b"bytes", {}, {"prompt": 5}, {"prompt_token_ids": "text"}, {"prompt_token_ids": 5},
        {"prompt": "x", "messages": []}, {"messages": "x"}, {"messages": []}, {"promt": "x"},
        {"prompt": "x", "unknown": 1}, {"messages": [{"role": "user"}], "tools": ["x"]},
        {"messages": [{"role": "user"}], "chat_template_kwargs": 5},
        {"messages": [{"role": "user"}], "chat_template": 5},
        {"prompt": "x", "cache_salt": ""}, {"prompt": "x", "cache_salt": "a/b"},
        {"prompt": "x", "cache_salt": "a" * 129}, {"prompt": "x", "cache_salt": 5}, "a\ud800",
    ],
)  # fmt: skip
def test_other_forms_are_refused(prompts, prompt):
    refused(prompts, prompt)


def test_later_stages_are_unsupported_not_ignored(prompts):
    with pytest.raises(UnsupportedFeatureError, match="encoder_prompt"):
        prompts.render(message({"prompt": "x", "encoder_prompt": object()}))


def test_tokenizer_with_ids_that_model_lacks_harms_nobody(tokenizer):
    limits = ModelLimits(vocab_size=100, max_model_len=50)
    assert refused(Prompts(tokenizer, limits), "hello").parameter == "prompt_token_ids"


def test_ids_around_text_that_no_vocabulary_has_harm_nobody(make_folder):
    tokenizer = Tokenizer.load(make_folder("bytes"))
    limits = ModelLimits(vocab_size=tokenizer.max_id + 1, max_model_len=50)
    assert Prompts(tokenizer, limits).render(message("hello")).admit.prompt_token_ids

    beyond = TemplateProcessing("$A", "$A $B <x>", special_tokens=[("<x>", limits.vocab_size)])
    tokenizer._backend.post_processor = beyond
    assert tokenizer.gives_below(limits.vocab_size + 1)
    assert not tokenizer.gives_below(limits.vocab_size)
    tokenizer._backend.post_processor = TemplateProcessing("$A <x>", special_tokens=[("<x>", 999)])
    assert refused(Prompts(tokenizer, limits), "hello").parameter == "prompt_token_ids"


# --- length ---


@pytest.mark.parametrize("length", [50, 51, 5000])
def test_too_long_prompt_names_length_and_limit(prompts, length):
    text = str(refused(prompts, [5] * length))
    assert str(length) in text
    assert "50" in text


def test_the_longest_prompt_leaves_room_for_one_token(prompts):
    admit = prompts.render(message([5] * 49, params=SamplingParams(max_tokens=None))).admit
    assert admit.params.max_tokens == 1


def test_hopeless_text_is_refused_before_it_is_tokenised(tokenizer):
    class Untouchable(Tokenizer):
        def encode(self, text, add_special_tokens=True):
            raise AssertionError("tokenised")

    prompts = Prompts(Untouchable.load(tokenizer.folder), LIMITS)
    text = str(refused(prompts, "x" * (50 * tokenizer.longest_token_chars + 1)))
    assert "50 tokens" in text


@pytest.mark.parametrize(
    ("truncate", "kept"), [(3, [7, 8, 9]), (-1, [5, 6, 7, 8, 9]), (5, [5, 6, 7, 8, 9])]
)
def test_truncation_keeps_the_end(prompts, truncate, kept):
    track = prompts.render(message([5, 6, 7, 8, 9], truncate_prompt_tokens=truncate)).track
    assert list(track.prompt_token_ids) == kept


def test_truncation_to_maximum_leaves_room_for_one_token(prompts):
    track = prompts.render(message([5] * 80, truncate_prompt_tokens=-1)).track
    assert len(track.prompt_token_ids) == 49


def test_a_tokenizer_may_ask_for_the_beginning(make_folder):
    prompts = Prompts(Tokenizer.load(make_folder("bytes", truncation_side="right")), LIMITS)
    track = prompts.render(message([5, 6, 7], truncate_prompt_tokens=2)).track
    assert track.prompt_token_ids == (5, 6)


@pytest.mark.parametrize("truncate", [0, -2, 51, True, 1.5])
def test_impossible_truncations_are_refused(prompts, truncate):
    error = refused(prompts, [5, 6], truncate_prompt_tokens=truncate)
    assert error.parameter == "truncate_prompt_tokens"


def test_huge_text_is_cut_before_tokenization(tokenizer):
    seen = []

    class Watched(Tokenizer):
        def encode(self, text, add_special_tokens=True):
            seen.append(len(text))
            return super().encode(text, add_special_tokens)

    text = "the cat sat " * 10_000
    prompts = Prompts(Watched.load(tokenizer.folder), LIMITS)
    track = prompts.render(message(text, truncate_prompt_tokens=9)).track
    assert max(seen) <= (9 + 64) * tokenizer.longest_token_chars
    assert list(track.prompt_token_ids) == tokenizer.encode(text[-500:])[-9:]


# --- sampling parameters ---


def resolved(tokenizer=None, length=10, limits=LIMITS, **params):
    return resolve_sampling(SamplingParams(**params), length, limits, tokenizer)


def test_max_tokens_none_means_rest_of_context():
    params = SamplingParams(max_tokens=None)
    assert resolve_sampling(params, 10, LIMITS, None).params.max_tokens == 40
    assert params.max_tokens is None
    assert resolved(max_tokens=1000).params.max_tokens == 1000  # ends with "length" in the engine


def test_first_eos_is_primary_and_others_stop():
    answer = resolved(stop_token_ids=[3, 7])
    assert (answer.eos_token_id, answer.stop_token_ids) == (2, (3, 7, 9))


def test_the_tokenizers_eos_is_the_primary_one(tokenizer):
    answer = resolved(
        tokenizer, limits=ModelLimits(vocab_size=400, max_model_len=9, eos_token_ids=(7,))
    )
    assert (answer.eos_token_id, answer.stop_token_ids) == (tokenizer.eos_token_id, (7,))


def test_ignore_eos_leaves_the_callers_stop_ids_only(tokenizer):
    answer = resolved(tokenizer, stop_token_ids=[3], ignore_eos=True)
    assert (answer.eos_token_id, answer.stop_token_ids) == (None, (3,))


def test_a_model_without_eos_has_none():
    assert resolved(limits=ModelLimits(vocab_size=9, max_model_len=9)).eos_token_id is None


def test_bad_words_are_tokenised_with_and_without_leading_space_once(tokenizer):
    answer = resolved(tokenizer, bad_words=["cat", " cat", "the cat"])
    forms = [tokenizer.encode(text) for text in ("cat", " cat", "the cat", " the cat")]
    assert answer.bad_words_ids == tuple(map(tuple, forms))


def test_as_many_bad_words_as_parameters_allow_are_tokenised(tokenizer):
    words = [f"w{i}" for i in range(MAX_STRINGS["bad_words"])]
    assert len(resolved(tokenizer, bad_words=words).bad_words_ids) == 2 * len(words)


def test_what_rows_of_device_have_no_room_for_is_refused(tokenizer):
    limits = ModelLimits(
        vocab_size=400, max_model_len=9, eos_token_ids=(2,), max_edits=4, max_bad_word=3
    )
    fitting = {"logit_bias": {1: 1.0}, "min_tokens": 1, "stop_token_ids": [3, 4]}
    resolved(limits=limits, **fitting)
    resolved(limits=limits, logit_bias=dict.fromkeys(range(4), 1.0), stop_token_ids=[3])
    with pytest.raises(TrouperValidationError, match="5 biased, banned and stop tokens") as caught:
        resolved(limits=limits, **{**fitting, "logit_bias": {1: 1.0, 2: 1.0}})
    assert caught.value.parameter == "logit_bias"
    with pytest.raises(TrouperValidationError, match="at most 3 tokens") as caught:
        resolved(tokenizer, limits=limits, bad_words=["the cat and the dog and the bird"])
    assert caught.value.parameter == "bad_words"


@pytest.mark.parametrize(
    "params", [{"stop": "x"}, {"bad_words": ["x"]}, {"stop_token_ids": [VOCAB]}, {"logprobs": 21}]
)
def test_what_model_or_missing_tokenizer_cannot_do_is_refused(params):
    with pytest.raises(TrouperValidationError) as caught:
        resolved(**params)
    assert caught.value.parameter == next(iter(params))


@pytest.mark.parametrize("prompt", ["text", {"messages": [{"role": "user", "content": "x"}]}])
def test_an_engine_without_tokenizer_takes_ids_only(prompt):
    prompts = Prompts(None, LIMITS)
    assert "skip_tokenizer_init" in str(refused(prompts, prompt))
    assert prompts.render(message([5, 6])).track.prompt_token_ids == (5, 6)
