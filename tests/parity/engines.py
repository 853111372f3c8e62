"""Whole engines on a tiny random model, on both devices."""

from trouper import LLM
from trouper.inputs import TokensPrompt

from .driver import random_prompts
from .test_architectures import VOCAB, tiny_model

BASE = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "block_size": 4,
    "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32,
    "enforce_eager": True,
}  # fmt: skip
PROMPTS = random_prompts((9, 20, 3, 33), VOCAB, seed=3)


def make_model(folder, name="Qwen3", **changes):
    tiny_model(name, {"num_hidden_layers": 2, "head_dim": 32, **changes}, folder)
    return str(folder)


def open_llm(folder, device, **options):
    return LLM(folder, device=device, **{**BASE, **options})


def run(llm, params, prompts=PROMPTS):
    """(token ids, logprobs) of all completions of each prompt, in order."""
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [[(c.token_ids, c.logprobs) for c in output.outputs] for output in outputs]


def tokens(found):
    return [[ids for ids, _ in completions] for completions in found]
