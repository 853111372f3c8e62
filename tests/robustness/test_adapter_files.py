"""Malformed adapters cause a typed error that names the fault, leave the slot unchanged, and never crash."""

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.support.adapters import CONFIG, DEMO, random_tensors, shapes_of, write_adapter
from trouper.actors.executor.models.parameters import Parameter
from trouper.actors.executor.steps.adapter_slots import AdapterHeads, AdapterSlots
from trouper.config.adapters import LoRAConfig, read_adapter
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.kernels.linear import AdapterRows
from trouper.kernels.select import make_linear

EXPECTED = (TrouperValidationError, UnsupportedFeatureError)
NAME = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{NAME}.lora_A.weight"
SIZE = shapes_of(DEMO)[NAME]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def slots():
    """Make adapter slots for one layer, with an adapter in slot 1."""
    rows, heads = AdapterRows(16), AdapterHeads((32, SIZE[1]))
    slots = AdapterSlots(LoRAConfig(num_slots=2, max_rank=8), torch.float32, rows, heads=heads)
    parameter = Parameter("q", ((f"{NAME}.weight", SIZE),))
    slots.layer = slots.wrap(parameter, make_linear(torch.zeros(SIZE)))
    rows.begin_step(np.array([1]))
    return slots


def one_layer(rank=4, seed=0):
    return {key: x for key, x in random_tensors(rank, seed).items() if NAME + "." in key}


def head_of(num_out=32, num_in=SIZE[1], value=0.5):
    """Return the tensors of one layer and of a head."""
    return {**one_layer(), "base_model.model.lm_head.weight": torch.full((num_out, num_in), value)}


def output(slots):
    return slots.layer.apply(torch.ones((1, SIZE[1]))).clone()


def without(key):
    return {name: tensor for name, tensor in one_layer().items() if name != key}


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        (
            {**one_layer(), KEY: torch.zeros(4, 7)},
            {},
            r"lora_A has shape \[4, 7\] instead of \[4, 256\]",
        ),
        (one_layer(16), {"r": 16}, "LoRA rank 16 is greater than max_lora_rank 8"),
        (one_layer(2), {"r": 4}, "instead of"),
        ({**one_layer(), KEY: torch.full((4, 256), torch.nan)}, {}, "non-finite"),
        ({**one_layer(), KEY: torch.zeros((4, 256), dtype=torch.int64)}, {}, "int64"),
        (without(KEY), {}, "only lora_B"),
        ({}, {}, "no matrix"),
        ({**one_layer(), "x": torch.zeros(1)}, {}, "unexpected tensors: x"),
        ({**one_layer(), KEY.replace("q_proj", "r_proj"): torch.zeros(4, 4)}, {}, "r_proj"),
        ({KEY.replace("lora_A", "lora_embedding_A"): torch.zeros(4, 4)}, {}, "lora_embedding_A"),
        (one_layer(), {"peft_type": "IA3"}, "peft_type='IA3'"),
        (one_layer(), {"use_dora": True}, "use_dora=True"),
        (one_layer(), {"bias": "all"}, "bias='all'"),
        (one_layer(), {"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        (one_layer(), {"modules_to_save": ["lm_head", "embed_tokens"]}, "embed_tokens"),
        (one_layer(), {"modules_to_save": "lm_head"}, "modules_to_save"),
        (one_layer(), {"modules_to_save": ["lm_head"]}, "it has no tensor of the head"),
        (head_of(3, 4), {"modules_to_save": ["lm_head"]}, r"has shape \[3, 4\] instead of"),
        (head_of(value=float("nan")), {"modules_to_save": ["lm_head"]}, "non-finite"),
        (head_of(), {}, "unexpected tensors"),
        (one_layer(), {"layer_replication": [[0, 1]]}, "layer_replication"),
        (one_layer(), {"init_lora_weights": "pissa"}, "pissa"),
        (one_layer(), {"r": 0}, "r: "),
        (one_layer(), {"r": "four"}, "r: "),
        (one_layer(), {"lora_alpha": "much"}, "lora_alpha"),
        (one_layer(), {"rank_pattern": {"(a+)+$": 3}}, "is too complex"),
        (one_layer(), {"rank_pattern": {"((a|a))*$": 3}}, "is too complex"),
        (one_layer(), {"rank_pattern": {"((a+)b)?c": 3}}, "is too complex"),
        (one_layer(), {"rank_pattern": {r"(a)\1": 3}}, "is too complex"),
        (one_layer(), {"alpha_pattern": {".*a.*b.*c.*": 3}}, "is too complex"),
        (one_layer(), {"alpha_pattern": {"a" * 513: 3}}, "is too complex"),
        (one_layer(), {"alpha_pattern": {"(a": 3}}, "is not a regular expression"),
        (one_layer(), {"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
    ],
)
def test_what_does_not_fit_is_named(slots, tmp_path, tensors, config, named):
    slots.load(1, read_adapter(write_adapter(tmp_path / "good", one_layer())))
    before = output(slots)
    assert before.any()
    folder = write_adapter(tmp_path / "bad", tensors, **config)
    with pytest.raises(EXPECTED, match=named):
        slots.load(1, read_adapter(folder))
    assert output(slots).equal(before)


def test_head_belongs_to_slot_of_its_adapter(slots, tmp_path):
    folder = write_adapter(tmp_path / "headed", head_of(), modules_to_save=["lm_head"])
    slots.load(2, read_adapter(folder))
    assert slots.heads.of(2).apply(torch.ones((1, SIZE[1]))).allclose(torch.tensor(SIZE[1] / 2))
    assert slots.heads.of(1) is None
    slots.load(2, read_adapter(write_adapter(tmp_path / "plain", one_layer())))
    assert slots.heads.of(2) is None


def test_head_is_refused_where_none_is_replaced(tmp_path):
    slots = AdapterSlots(LoRAConfig(num_slots=2, max_rank=8), torch.float32, AdapterRows(16))
    folder = write_adapter(tmp_path / "headed", head_of(), modules_to_save=["lm_head"])
    with pytest.raises(UnsupportedFeatureError, match="only on the CPU") as caught:
        slots.load(1, read_adapter(folder))
    assert caught.value.parameter == "lora_path"


def test_only_safetensors_are_read(tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": 4}))
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedFeatureError, match="is a pickle"):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").mkdir()
    with pytest.raises(TrouperValidationError, match="not a regular file"):
        read_adapter(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_missing_is_named(tmp_path, name):
    folder = write_adapter(tmp_path / "a", one_layer())
    (tmp_path / "a" / name).unlink()
    with pytest.raises(TrouperValidationError, match=name):
        read_adapter(folder)


def mutated(dice, data):
    """Return the bytes with a random change, cut, repetition or truncation."""
    data = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) or 1)
        match dice.randrange(5):
            case 0:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del data[at : at + dice.randint(1, 9)]
            case 2:
                data[at:at] = data[at : at + dice.randint(1, 9)]
            case 3:
                data = data[: at + 1]
            case _:  # the length of the header
                data[:8] = struct.pack(
                    "<Q", dice.choice([0, 1, len(data), 2**40, 2**63, 2**64 - 1])
                )
    return bytes(data)


def mutate(slots, folder, num_times, seed):
    """Load mutated adapters and count the refused ones."""
    dice = random.Random(seed)
    header = save(one_layer())
    header = header[: 8 + struct.unpack("<Q", header[:8])[0] + 64]  # where the structure is
    weights = save(one_layer())
    config = json.dumps({**CONFIG, "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 4}}).encode()
    num_refused = 0
    for _ in range(num_times):
        files = {"adapter_config.json": config, "adapter_model.safetensors": weights}
        if dice.random() < 0.5:
            files["adapter_config.json"] = mutated(dice, config)
        else:
            front = mutated(dice, header)
            files["adapter_model.safetensors"] = front + weights[len(header) :]
        for name, data in files.items():
            (folder / name).write_bytes(data)
        try:
            slots.load(2, read_adapter(folder))
        except EXPECTED as error:
            num_refused += len(str(error)) < 2000
        assert output(slots).isfinite().all()
    return num_refused


def test_mutated_adapters_are_loaded_or_refused_by_name(slots, tmp_path):
    assert mutate(slots, tmp_path, 100, seed=1) > 25


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_mutated_adapters_are_loaded_or_refused(slots, tmp_path):
    assert mutate(slots, tmp_path, 10_000, seed=2) > 2500


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "its header declares"),
        (lambda data: data + b"x", "its header declares"),
        (lambda data: data[:7], "is truncated, or is not a safetensors file"),
        (
            lambda data: struct.pack("<Q", 2**40) + data[8:],
            "is truncated, or is not a safetensors file",
        ),
        (lambda data: data[:8] + b"!" + data[9:], "its header cannot be read"),
        (lambda data: struct.pack("<Q", 4) + b"[1] ", "its header cannot be read"),
        (lambda data: struct.pack("<Q", 9) + b'{"a": {}}', "its header cannot be read"),
    ],
)
def test_weights_with_wrong_header_are_not_read(tmp_path, change, words):
    folder = Path(write_adapter(tmp_path / "a", random_tensors()))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(change(weights.read_bytes()))
    with pytest.raises(TrouperValidationError, match=words) as caught:
        read_adapter(folder)
    assert caught.value.parameter == "lora_path"
