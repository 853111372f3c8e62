"""Tiny random models of causal language models of the transformers library, by `model_type`."""

import inspect

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 211
# Under the names of all families; a config takes those that it knows.
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "sliding_window": 8,
    "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96,
    "word_embed_proj_dim": 64, "ffn_dim": 96,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "attention_chunk_size": None,
}  # fmt: skip
LATENT = {"head_dim": None, "num_key_value_heads": 4}  # keys and values of their own widths
ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
# Families that were computed right, and the fields in which a tiny one differs from SMALL.
FAMILIES = {
    name: {} for name in ["afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "beam", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "diffllama", "dory", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "kolibri1", "laguna", "llama", "llama4_text", "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma"]
} | {
    "axk1": LATENT, "deepseek_v2": LATENT, "deepseek_v3": LATENT, "glm4_moe_lite": LATENT, "minicpm3": LATENT,
    "youtu": LATENT,
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8}, "ctrl": {"n_embd": 32, "dff": 64},
    "dbrx": {
        "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8}},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ALTERNATING["layer_types"]}},
    "gemma3n_text": ALTERNATING | {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4},
    "gemma4_text": ALTERNATING | {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
    "gemma4_unified_text": ALTERNATING | {"hidden_size_per_layer_input": 0},
}  # fmt: skip
# Of recurrent families, under the names of all; the state decays within tens of tokens.
RECURRENT_SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "state_size": 16, "expand": 2,
    "time_step_rank": 8, "n_groups": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16, "chunk_size": 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
HYBRID_LAYERS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
}
HYBRIDS = {
    "qwen3_next": {"head_dim": 32}, "qwen3_5_text": {"head_dim": 32}, "qwen3_5_moe_text": {"head_dim": 32},
    "olmo_hybrid": {"head_dim": None},
    "kimi_linear": HYBRID_LAYERS | {
        "linear_num_heads": 4, "linear_head_dim": 16, "num_key_value_heads": 4, "q_lora_rank": None, "head_dim": None},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1},
    "mamba": {}, "falcon_mamba": {}, "mamba2": {"head_dim": 16, "num_heads": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 96, "mamba_n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_groups": 1},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "conv_kernel": 4, "num_hidden_layers": None},
    "zamba2": {
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "num_key_value_heads": 4, "mamba_ngroups": 1,
        "mamba_headdim": 16, "n_mamba_heads": 8, "adapter_rank": 8, "head_dim": None},
}  # fmt: skip
# Families that are refused, with words of the reason.
OWN_ATTENTION = "attention of its own"
NOT_CAUSAL = "is_decoder=false"
REFUSED = dict.fromkeys(["bart", "big_bird", "biogpt", "falcon", "gpt_neo", "gpt_neox_japanese", "openai-gpt", "rembert", "roformer", "stablelm", "trocr", "xglm"], OWN_ATTENTION) | dict.fromkeys(["bert", "camembert", "electra", "roberta", "xlm-roberta-xl"], NOT_CAUSAL) | {"deepseek_v32": "'indexed_attention'", "recurrent_gemma": "RecurrentGemma", "rwkv": "RwkvSelfAttention", "minimax": "'linear_attention'"}  # fmt: skip
REFUSED_FIELDS = {
    "gpt_neo": {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "num_hidden_layers": None, "num_attention_heads": None},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
}  # fmt: skip


def architecture_of(model_type):
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def tiny_config(model_type):
    cls = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(cls.__init__).parameters, *cls.attribute_map}
    small = SMALL
    changes = FAMILIES.get(model_type) or REFUSED_FIELDS.get(model_type, {})
    if model_type in HYBRIDS:
        small, changes = SMALL | RECURRENT_SMALL, HYBRIDS[model_type]
    fields = {name: value for name, value in small.items() if name in known} | changes
    kept_none = {"attention_chunk_size"}
    return cls(**{k: v for k, v in fields.items() if v is not None or k in kept_none})


def tiny_model(model_type, folder):
    """Save a model whose weights are large enough for attention, norms and biases to matter; returns it as it is read."""
    torch.manual_seed(0)
    cls = getattr(transformers, architecture_of(model_type))
    config = tiny_config(model_type)
    model = cls._from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data = torch.rand_like(parameter) * 1.5
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            parameter.data = torch.randn_like(parameter) * 0.5 - 1
        elif parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
        else:
            parameter.data = torch.randn_like(parameter) * 1.2 / parameter.shape[-1] ** 0.5
    model.save_pretrained(folder)
    plain = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }  # as float64 takes it too
    return cls.from_pretrained(folder, dtype=torch.float32, **plain).eval()
