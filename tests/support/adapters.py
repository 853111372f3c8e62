"""Write random adapters in peft's format, for models with Llama's layer names."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

DEMO = Path(__file__).parents[2] / "trouper" / "demo"
CONFIG = {"peft_type": "LORA", "bias": "none", "use_dora": False, "modules_to_save": None}


def shapes_of(model):
    """Return the output and input sizes of each linear layer, by module."""
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    sizes = {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv_heads * width, hidden),
        "self_attn.v_proj": (kv_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    return {
        f"model.layers.{layer}.{name}": size
        for layer in range(config["num_hidden_layers"])
        for name, size in sizes.items()
    }


def random_tensors(rank=4, seed=0, model=DEMO, scale=1.0):
    """Make the tensors of an adapter for every linear layer."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for module, (num_out, num_in) in shapes_of(model).items():
        for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            tensor = torch.randn(shape, generator=generator) * scale / shape[1] ** 0.5
            found[f"base_model.model.{module}.lora_{side}.weight"] = tensor
    return found


def write_adapter(folder, tensors=None, rank=4, **config):
    """Write an adapter folder. `tensors` are random by default; `config` has additional fields of its configuration."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**CONFIG, "r": rank, "lora_alpha": 2 * rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    tensors = random_tensors(rank) if tensors is None else tensors
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return str(folder)
