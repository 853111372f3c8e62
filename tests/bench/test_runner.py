"""Prompts of a peer's process take its adapters in turn."""

from types import SimpleNamespace

import pytest

from trouper.bench import runner

OPTIONS = {
    "model": "folder", "dtype": "bfloat16", "max_model_len": 8, "max_num_seqs": 3, "load_format": "auto",
}  # fmt: skip


class FakeLLM:
    def __init__(self, **options):
        self.options = options

    def generate(self, prompts, params, *, use_tqdm, lora_request):
        self.chosen = lora_request
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2])]) for _ in prompts]


@pytest.fixture(params=["trouper", "vllm"])
def api(request, monkeypatch):
    """Both programs, whose requests of adapters are in different modules."""
    engine = SimpleNamespace(
        __version__="1", SamplingParams=lambda **_: None, LLM=FakeLLM, LoRARequest=lambda *a: a
    )
    modules = {"trouper": engine, "vllm": engine, "vllm.lora.request": engine}
    monkeypatch.setattr(runner, "import_module", modules.__getitem__)
    for name in ("TROUPER_CPU_KVCACHE_SPACE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "1")  # so that what it sets is taken back
    return request.param


def test_prompts_take_the_adapters_in_turn(api):
    engine = runner.Offline({**OPTIONS, "adapters": ["a", "b"], "rank": 4}, api)
    assert engine.generate([[1]] * 3, 2) == 6
    first, second = ("adapter-1", 1, "a"), ("adapter-2", 2, "b")
    assert engine._llm.chosen == [first, second, first]
    wanted = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
    assert wanted.items() <= engine._llm.options.items()


def test_engine_without_adapters_is_not_told_of_any(api):
    engine = runner.Offline({**OPTIONS, "adapters": [], "rank": 16}, api)
    assert engine.generate([[1]], 2) == 2
    assert engine._llm.chosen is None
    assert "enable_lora" not in engine._llm.options
