"""The safetensors files of a model folder, by name; torch is not needed."""

from pathlib import Path

from trouper.config.files import check_folder, checked, read_object
from trouper.errors import invalid

INDEX = "model.safetensors.index.json"


def tensor_files(folder: Path) -> list[str]:
    """List the files of a checkpoint: those of its index, or all that there are.

    Raises:
        TrouperValidationError: there is none, or one lies elsewhere.
    """
    index = read_object(folder / INDEX)
    if index is None:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    else:
        names = sorted(
            set(checked(index.get("weight_map"), dict[str, str], f"{INDEX}: weight_map").values())
        )
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise invalid("model", f"{INDEX}: weight_map: not the name of a safetensors file", name)
    check_folder(folder)
    if not names:
        raise invalid("model", "no safetensors in the model folder", str(folder))
    return names
