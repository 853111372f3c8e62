"""Find the folder or GGUF file that `model` names, on this machine or on the hub."""

import difflib
import glob
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.hub import cached_folder, download, list_files
from trouper.config.checkpoint.presets import GEOMETRIES
from trouper.config.gguf.files import choose_gguf, find_gguf, gguf_names
from trouper.config.gguf.header import has_magic, is_gguf
from trouper.errors import TrouperValidationError, invalid

DEMO_MODEL = Path(__file__).parents[2] / "demo"
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_ADDRESSES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
SHORT_NAME = (
    "; Ollama's short names do not exist here: give the name on the hub, ORG/NAME:QUANT, "
    "such as Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M"
)
MAX_NAMED = 3  # files in an error
QUANTIZATION = re.compile(r"\w[\w.-]*(/[\w.-]+)*")


def model_path(args: EngineArgs) -> Path:
    """Return the folder or GGUF file of the model, or the name of a geometry.  It may download.

    Raises:
        TrouperValidationError: no model or several models match; the message lists the candidates.
    """
    if args.model is None:
        return DEMO_MODEL
    name, path = args.model, Path(args.model).expanduser()
    if name and path.is_dir():
        return path if is_plain(path, args.load_format) else find_gguf(path) or path
    if name and path.exists():
        return _file(path)
    place, _, quantization = name.rpartition(":")
    if place and QUANTIZATION.fullmatch(quantization):
        if (folder := Path(place).expanduser()).is_dir():
            return _named(find_gguf(folder, quantization, place), place)
        if HUB_ID.fullmatch(place):
            with _as_given(name):
                return _named(_gguf_of_hub(args, place, quantization), place)
    if is_gguf(path) and (not HUB_ID.fullmatch(name) or path.parent.is_dir()):
        raise invalid("model", f"no such file{_others(path)}", name)
    is_dummy, is_geometry = args.load_format == "dummy", name in GEOMETRIES
    if is_dummy and is_geometry:
        return path
    is_preset = is_geometry or (is_dummy and "/" not in name)
    if is_preset or not HUB_ID.fullmatch(name):
        raise _no_folder(name, knows_presets=is_dummy or is_geometry)
    with _as_given(name):
        return _of_hub(args, name)


def _no_folder(name: str, *, knows_presets: bool) -> TrouperValidationError:
    rule = "no such model folder"
    if name.startswith(HUB_ADDRESSES):
        rule = "a model of the hub is named without the address: ORG/NAME or ORG/NAME:QUANT"
    elif knows_presets:
        rule += f"; load_format='dummy' knows {', '.join(GEOMETRIES)}"
    return TrouperValidationError(rule, parameter="model", value=name)


@contextmanager
def _as_given(name: str) -> Generator[None]:
    """Make errors of the hub show the whole name, and explain the form of names if the name may come from Ollama."""
    try:
        yield
    except TrouperValidationError as error:
        if error.parameter != "model":
            raise
        hint = "" if "/" in name else SHORT_NAME
        message = error.message.removesuffix(".") + hint
        raise TrouperValidationError(message, parameter="model", value=name) from error


def _others(path: Path) -> str:
    """Name the GGUF files in the folder of a missing file, the most similar names first."""
    try:
        names = sorted(file.name for file in path.parent.glob("*.gguf"))
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=MAX_NAMED, cutoff=0)
    return f"; {path.parent} has {', '.join(near)}" if near else ""


def is_plain(folder: Path, load_format: str = "auto") -> bool:
    """Distinguish a folder of config.json and safetensors from one of GGUF files.

    If it has both, the requested format decides: `gguf` selects the GGUF files, and any other
    format the safetensors.
    """
    has_config = (folder / "config.json").exists() and load_format != "gguf"
    is_asked = load_format in ("dummy", "safetensors")
    return has_config and (is_asked or any(folder.glob("*.safetensors")))


def _file(path: Path) -> Path:
    if not path.is_file():
        raise invalid("model", "neither a folder nor a regular file", str(path))
    if not (path.suffix == ".gguf" or has_magic(path)):
        raise invalid("model", "not a GGUF file; for safetensors give the folder", str(path))
    return path


def _of_hub(args: EngineArgs, repo_id: str) -> Path:
    """Download a folder with config.json, or the only GGUF model of a repository without one."""
    if args.load_format == "gguf":
        return _named(_gguf_of_hub(args, repo_id), repo_id)
    folder = download(args, repo_id, args.revision)
    if is_plain(folder, args.load_format):
        return folder
    found = _gguf_of_hub(args, repo_id)
    if found is None and not folder.is_dir():
        raise invalid("model", "the repository has neither config.json nor GGUF files", repo_id)
    return found or folder


def _gguf_of_hub(args: EngineArgs, repo_id: str, quantization: str = "") -> Path | None:
    """Choose and download the GGUF files of one model in a repository, or in its snapshot if the hub cannot be reached."""
    names = list_files(args, repo_id, args.revision)
    if names is None:
        folder = cached_folder(args, repo_id, args.revision)
        what = "the GGUF files that were fetched before (the hub cannot be reached)"
        files = choose_gguf(gguf_names(folder), quantization, repo_id, what)
        return folder / files[0] if files else None
    files = choose_gguf(names, quantization, repo_id)
    if not files:
        return None
    patterns = [glob.escape(file) for file in files]
    return download(args, repo_id, args.revision, patterns) / files[0]


def _named(path: Path | None, place: str) -> Path:
    if path is None:
        raise invalid("model", "there are no GGUF files in it", place)
    return path
