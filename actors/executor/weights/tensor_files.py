"""Choose the safetensors files of a model folder, as transformers does; torch is not needed.

A folder often holds more than its checkpoint: an older copy, the same weights in Mistral's own format
(`consolidated.safetensors`), an adapter.  Reading all files would let a stray one replace the checkpoint's tensors.
"""

import re
from pathlib import Path

from trouper.config.adapters import WEIGHTS as ADAPTER
from trouper.config.files import check_folder, checked, read_object
from trouper.errors import invalid

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def tensor_files(folder: Path) -> list[str]:
    """List the files of a checkpoint: `model.safetensors`, else those of the index, else all but an adapter's.

    Raises:
        TrouperValidationError: there is none, a numbered shard is missing, or the index names one outside the folder.
    """
    check_folder(folder)
    if (folder / SINGLE).is_file():
        return [SINGLE]
    index = read_object(folder / INDEX)
    if index is None:
        names = sorted(path.name for path in folder.glob("*.safetensors") if path.name != ADAPTER)
        check_numbers(names)
    else:
        weight_map = checked(index.get("weight_map"), dict[str, str], f"{INDEX}: weight_map")
        names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise invalid("model", f"{INDEX}: weight_map: not the name of a safetensors file", name)
    if not names:
        raise invalid("model", "no safetensors in the model folder", str(folder))
    return names


def check_numbers(names: list[str]) -> None:
    """Refuse shards whose names, such as `model-00002-of-00003.safetensors`, show that others are missing."""
    present = set(names)
    for name in names:
        if shard := SHARD.fullmatch(name):
            stem, _, count = shard.groups()
            # The first missing one is at most the number of files + 1, whatever count a stray's name claims.
            for number in range(1, min(int(count), len(names) + 1) + 1):
                wanted = f"{stem}-{number:05}-of-{count}.safetensors"
                if wanted not in present:
                    raise invalid("model", f"the folder lacks {wanted}, which belongs to", name)
