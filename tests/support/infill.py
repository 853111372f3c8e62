"""Make models with control tokens for filling in the middle."""

import json
import shutil
from pathlib import Path

import trouper

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")  # fmt: skip
DEMO = Path(trouper.__file__).parent / "demo"


def save_demo(folder):
    """Write the bundled model with infill tokens instead of its rarest tokens. Returns their ids by name."""
    for file in DEMO.iterdir():
        if file.is_file():
            shutil.copy(file, folder / file.name)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    rarest = sorted(vocabulary, key=vocabulary.get)[-len(MARKS) :]
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [each for each in merges if "".join(each) not in rarest]
    ids = {mark: vocabulary.pop(text) for mark, text in zip(MARKS, rarest, strict=True)}
    vocabulary |= ids
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": id, "content": mark, **plain, "special": True} for mark, id in ids.items()
    ]
    path.write_text(json.dumps(tokenizer))
    return ids
