"""Find the GGUF files of one model in a folder or a repository, by their names only.

A model is a file, or a split.  Its name is the name of its (first) file without `.gguf` and the suffix of the split.  QUANT
in `ORG/NAME:QUANT` matches complete parts of the name, ignoring case: parts are separated by `-`, `.` and `/`, and may
begin after `_`.  So F16 does not match BF16, and Q4_K matches neither Q4_K_M nor IQ4_K.  A complete name matches exactly.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from trouper.config.gguf.header import SPLIT
from trouper.errors import invalid

# The depth of folders in a folder: repositories have one folder for each QUANT, or none.
DEPTH = 2
MANY = 30  # names in a message
# Files that belong to a model, or were used to make it.
NO_MODELS = {"mmproj", "imatrix"}


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Group file names by model: each model's name with its files in order.

    A model is one file or a split with all its parts.  Other files, such as image projectors, are omitted.

    Args:

        names: paths in the folder or the repository, with `/`.
    """
    known = sorted(name for name in names if name.endswith(".gguf") and name.count("/") <= DEPTH)
    found: dict[str, list[str]] = {}
    for name in known:
        split = SPLIT.fullmatch(name)
        label = name.removesuffix(".gguf") if split is None else split[1]
        if NO_MODELS & set(re.split(r"[-._]", label.rpartition("/")[2].lower())):
            continue
        if split is None or int(split[2]) == 1:
            files = [name] if split is None else [x for x in known if _parts(x) == _parts(name)]
            found[name if label in found else label] = files
    return found


def _parts(name: str) -> tuple[str, str] | None:
    split = SPLIT.fullmatch(name)
    return split and (split[1], split[3])


def choose_gguf(
    names: Iterable[str], quantization: str, place: str, what: str = "its GGUF files"
) -> list[str]:
    """Choose the files of the model that `quantization` names, or of the only model.  Returns no files if there are no models.

    Args:
        names: paths in the folder or the repository, with `/`.
        place: the folder or the repository, for messages.
        what: a word for all of these files, for messages.

    Raises:
        TrouperValidationError: several models match, or none of them; the message lists them.
    """
    models = gguf_models(names)
    matching = _matching(models, quantization) if quantization else list(models)
    if len(matching) == 1 or not models:
        return models[matching[0]] if models else []
    whole = [models[label][0] for label in matching or models]
    shown = ", ".join(whole[:MANY]) + (", …" if len(whole) > MANY else "")
    if not matching:
        rule = f"no {quantization} among {what}: {shown}"
    elif quantization:
        rule = f"{quantization} names several of {what}: {shown}"
    else:
        rule = f"several models among {what}, name one as {place}:QUANT: {shown}"
    raise invalid("model", rule, place)


def _matching(labels: Iterable[str], quantization: str) -> list[str]:
    wanted = quantization.lower().removesuffix(".gguf")
    whole = [
        label for label in labels if wanted in (label.lower(), label.lower().rpartition("/")[2])
    ]
    parts = re.compile(rf"(?:^|[-._/]){re.escape(wanted)}(?:$|[-./])")
    return whole or [label for label in labels if parts.search(label.lower())]


def gguf_names(folder: Path) -> list[str]:
    """List the GGUF files in a folder and its subfolders, as relative paths."""
    patterns = ("*/" * depth + "*.gguf" for depth in range(DEPTH + 1))
    found = (file for pattern in patterns for file in folder.glob(pattern) if file.is_file())
    return sorted(file.relative_to(folder).as_posix() for file in found)


def find_gguf(folder: Path, quantization: str = "", place: str = "") -> Path | None:
    """Find the first file of the model in a folder, or None if there are no models.  Raises the errors of `choose_gguf`."""
    files = choose_gguf(gguf_names(folder), quantization, place or str(folder))
    return folder / files[0] if files else None
