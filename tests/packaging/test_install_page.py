"""The memory table on the page about installing is computed from the models' sizes."""

import re
from math import prod
from pathlib import Path

import pytest

from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.native_decoder import kv_cache_specs
from trouper.actors.executor.models.parameters import layer_parameters, outer_parameters
from trouper.config.checkpoint.model_path import GEOMETRIES
from trouper.config.context import KV_SHARE, LEAST_CONTEXT

PAGE = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
# bits of a weight of a layer, and of the output head
FORMATS = {"bfloat16": (16, 16), "12 bits": (12, 12), "int8": (8, 8), "int4": (4.5, 8)}
ROWS = re.findall(r"^\| ([a-z][\w.-]+) \| (\d+\.\d.+) \|$", PAGE, re.MULTILINE)


def size(parameters):
    return sum(prod(shape) for p in parameters for _, shape in p.sources)


def computed(name):
    """Return the GB of the weights in each format, and of the KV cache of a thousand tokens."""
    config = GEOMETRIES[name]
    traits = decoder_traits(config, config["architectures"][0])
    layers = sum(size(layer_parameters(traits, i)) for i in range(len(traits.layers)))
    embedding = traits.vocab_size * traits.hidden_size
    num_parameters = layers + size(outer_parameters(traits))
    weights = [
        (layers * bits + embedding * (16 + head_bits)) / 8 / 1e9
        for bits, head_bits in FORMATS.values()
    ]
    kv = sum(spec.token_size for spec in kv_cache_specs(traits)) * 2 * 1000 / 1e9
    return [f"{num_parameters / 1e9:.1f}", *(f"{gb:.1f}" for gb in weights), f"{kv:.2f}"]


def test_table_has_models_that_have_preset():
    assert {name for name, _ in ROWS} == GEOMETRIES.keys() - {"tiny"}
    head = [name.strip() for name in re.search(r"\| model \|(.*)\|", PAGE)[1].split("|")]
    assert head[1:5] == list(FORMATS)


@pytest.mark.parametrize(("name", "cells"), ROWS, ids=[name for name, _ in ROWS])
def test_memory_of_model_is_what_its_shapes_say(name, cells):
    assert cells.split(" | ") == computed(name)


def test_page_names_default_size_of_kv_cache():
    assert (KV_SHARE, "may use half of the available memory" in PAGE) == (0.5, True)
    assert f"at least {LEAST_CONTEXT:,} tokens" in PAGE
