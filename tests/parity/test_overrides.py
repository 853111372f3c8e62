"""Fields that `hf_overrides` replaces reach the model, on own code and by way of transformers."""

import pytest
import torch
import transformers

from trouper.actors.executor.runners.cpu.runner import CpuRunner
from trouper.actors.messages.steps import Sampling

from .driver import Driver, engine_config, hf_runner, random_prompts
from .test_architectures import LINEAR, LLAMA3, VOCAB, YARN, check_against, tiny_model


@pytest.mark.parametrize("runner", [CpuRunner, hf_runner])
def test_yarn_by_override_equals_transformers_beyond_trained_length(runner, tmp_path):
    tiny_model("Qwen3", {"head_dim": 16, "max_position_embeddings": 64}, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters, config.max_position_embeddings = YARN, 256
    plain = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **plain).eval()
    overrides = {"rope_parameters": YARN}
    driver = Driver(runner(engine_config(tmp_path, hf_overrides=overrides, max_model_len=200)))
    (s,) = driver.run(random_prompts((150,), VOCAB), 6, Sampling(temperature=0.0, logprobs=-1))
    check_against(model, [s])


@pytest.mark.parametrize("wish", [LINEAR, LLAMA3, YARN], ids=lambda wish: wish["rope_type"])
@pytest.mark.parametrize("runner", [CpuRunner, hf_runner])
def test_old_name_of_scaling_stretches_config_with_new_one(runner, wish, tmp_path):
    lengths = {"max_position_embeddings": 64 if wish is YARN else 256}
    theta = {"rope_theta": 500.0, "rope_type": "default"}
    tiny_model("Llama", {**lengths, "rope_parameters": theta}, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters, config.max_position_embeddings = wish | {"rope_theta": 500.0}, 256
    plain = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **plain).eval()
    overrides = {"rope_scaling": {k: v for k, v in wish.items() if k != "rope_theta"}}
    resolved = engine_config(tmp_path, hf_overrides=overrides)
    # As in vLLM, linear scaling multiplies the length, and YaRN's original length is the shorter one.
    assert resolved.max_model_len == 256 * (int(wish["factor"]) if wish is LINEAR else 1)
    driver = Driver(runner(resolved))
    (s,) = driver.run(random_prompts((100,), VOCAB), 6, Sampling(temperature=0.0, logprobs=-1))
    check_against(model, [s], atol=1e-5, rtol=1e-5)
