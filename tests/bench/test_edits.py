"""Edits beside peers: llama.cpp's prompt lookup on a model of arithmetic, and engines in turn."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from trouper.bench import peers, runner
from trouper.bench.studies.models import edits

VOCABULARY = 7


def follower(tokens):
    """The next token of a text: a cycle with a slip now and then, so that some drafts are wrong."""
    return (tokens[-1] + 1 + (len(tokens) % 11 == 0)) % VOCABULARY


class Api:
    """A cache of tokens, and logits that say what follows them."""

    __version__ = "1"

    def __init__(self):
        self.cache, self.num_decoded, self.num_removed = [], [], 0

    def llama_batch_init(self, size, _embeds, _sequences):
        columns = ("token", "pos", "logits", "n_seq_id")
        return SimpleNamespace(
            n_tokens=0, **{name: [0] * size for name in columns}, seq_id=[[0] for _ in range(size)]
        )

    def llama_decode(self, _context, batch):
        self.found = []
        for i in range(batch.n_tokens):
            assert batch.pos[i] == len(self.cache), "a position that is there, or behind a gap"
            self.cache.append(batch.token[i])
            self.found.append(np.eye(VOCABULARY)[follower(self.cache)])
        self.num_decoded.append(batch.n_tokens)

    def llama_memory_seq_rm(self, _memory, _sequence, first, last):
        assert last == -1
        self.num_removed += len(self.cache) - first
        del self.cache[first:]

    def llama_get_logits_ith(self, _context, i):
        assert self._batch.logits[i]
        return np.ctypeslib.as_ctypes(self.found[i])

    def __getattr__(self, name):
        return lambda *_: SimpleNamespace()


class Drafts:
    """Three tokens of the cycle without its slips."""

    def __init__(self, max_ngram_size, num_pred_tokens):
        assert max_ngram_size == 2
        self.length = num_pred_tokens

    def __call__(self, ids):
        assert ids.dtype == np.intc
        return np.array([(ids[-1] + 1 + i) % VOCABULARY for i in range(self.length)])


@pytest.mark.parametrize("length", [1, 3, 40])
def test_prompt_lookup_of_llama_cpp_draws_what_it_would_without(monkeypatch, length):
    api = Api()
    api.llama_vocab_n_tokens = lambda _: VOCABULARY
    modules = {
        "llama_cpp": api,
        "numpy": np,
        "llama_cpp.llama_speculative": SimpleNamespace(LlamaPromptLookupDecoding=Drafts),
    }
    monkeypatch.setattr(runner, "import_module", modules.__getitem__)
    lookup = {"max_ngram_size": 2, "num_pred_tokens": 3}
    engine = runner.LlamaCpp({"model": "m", "threads": 1, "speculation": lookup})
    api._batch = engine._batch
    prompt = [1, 2, 3]
    assert engine.generate([prompt], length) == length
    text = list(prompt)
    while len(text) < len(prompt) + length:
        text.append(follower(text))
    assert api.cache == text[:-1]  # the last token is known and not computed
    assert len(api.num_decoded) <= 1 + length // 2
    assert (api.num_removed > 0) == (length > 11)  # drafts over a slip


class FakePeer:
    version, ready_s = "1", 0.0

    def __init__(self, seconds):
        self.seconds = seconds

    def measure(self, prompts, output_len):
        assert len(prompts) == 1
        return peers.Answer(self.seconds, output_len - (self.seconds == 0))


def compare(monkeypatch, seconds):
    settings = peers.Settings(model="m", dtype="float32")
    drafting = peers.Settings(model="m", dtype="float32", speculation=edits.OURS)
    engines = {"trouper with drafts": drafting, "trouper": settings}

    @contextmanager
    def started(name, settings, works):
        assert name == "trouper"
        assert works == [peers.Workload(1, 3, 8)]
        yield FakePeer(seconds[settings.speculation is not None])

    monkeypatch.setattr(peers, "started", started)
    return edits.compare(engines, [[1, 2], [1, 2, 3]], 8, 3)


def test_each_prompt_is_asked_alone_and_first_engine_is_compared(monkeypatch):
    found = compare(monkeypatch, {True: 0.5, False: 1.5})
    assert found["trouper with drafts"]["output_tok_s"] == 16.0
    assert found["trouper"]["all_s"] == [3.0, 3.0, 3.0]
    assert found["trouper"]["trouper_is"] == 3.0


def test_an_engine_that_makes_fewer_tokens_is_named(monkeypatch):
    with pytest.raises(peers.PeerError, match="trouper made 7 tokens"):
        compare(monkeypatch, {True: 0.5, False: 0})


def test_without_a_peer_there_is_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["edits", "--gguf", "none.gguf"])
    with pytest.raises(SystemExit) as caught:
        edits.main()
    assert caught.value.code == 2
    assert "--llama-python or --vllm-python" in capsys.readouterr().err
