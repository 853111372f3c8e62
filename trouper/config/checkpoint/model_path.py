"""Find the folder or GGUF file of a model by its name, on this machine or on the hub.

From a repository on the hub only the files that an engine reads are downloaded (`PATTERNS`).  With `load_format="dummy"`, the names in
`GEOMETRIES` are models without files: each geometry has the fields of config.json that determine the sizes of weights and the cost
of steps.  `tiny` is for trying a command.
"""

import difflib
import glob
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trouper.config.args import EngineArgs
from trouper.config.gguf.header import has_magic, is_gguf
from trouper.config.gguf.names import choose_gguf, find_gguf, gguf_names
from trouper.errors import TrouperValidationError, invalid

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 151_645,
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen3-14b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
    },
    "tiny": _QWEN3
    | {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    },
}


# The files of a model folder.
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "artifact.metadata")
OFFLINE = (
    "is neither a folder nor a downloaded model, and the hub cannot be reached; "
    "`trouper models` lists the models on this machine"
)


def download(
    args: EngineArgs,
    repo_id: str,
    revision: str | None,
    patterns: Sequence[str] = PATTERNS,
    *,
    parameter: str = "model",
) -> Path:
    """Download a snapshot with a progress bar, or find it in the cache: only the files that match the patterns.

    The folder does not exist if no file matches.

    Raises:
        TrouperValidationError: the repository does not exist, or can neither be reached nor found in the cache.
    """
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # untyped dicts in it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=args.download_dir,
                token=args.hf_token,
                allow_patterns=list(patterns),
            )
        )
    except LocalEntryNotFoundError as error:
        raise TrouperValidationError(OFFLINE, parameter=parameter, value=repo_id) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _unknown(repo_id, error, parameter) from error


def cached_folder(args: EngineArgs, repo_id: str, revision: str | None) -> Path:
    """Find the cached files of a repository, which may be incomplete.

    Used when the hub is not reachable.  The folder is the newest snapshot of the revision in
    `download_dir`, or in the default cache.

    Raises:

        TrouperValidationError: the cache has no files of the repository.
    """
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # untyped dicts in it

    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=args.download_dir,
            # Other patterns would refuse an incomplete snapshot.
            allow_patterns=[],
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise TrouperValidationError(OFFLINE, parameter="model", value=repo_id) from error
    return Path(folder)


def list_files(args: EngineArgs, repo_id: str, revision: str | None) -> list[str] | None:
    """List the files of a repository, as relative paths.

    Returns None if the hub cannot be reached, so the caller can fall back to the cache.

    Raises:

        TrouperValidationError: the repository or revision does not exist.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        # `list_repo_files` would retry for 23 s without a network.
        found = HfApi(token=args.hf_token).model_info(repo_id, revision=revision)
        return [file.rfilename for file in found.siblings or ()]
    except (RepositoryNotFoundError, RevisionNotFoundError, ValueError) as error:
        raise _unknown(repo_id, error, "model") from error
    except (
        OSError,
        httpx2.TransportError,
    ):  # of the former are the offline mode, and answers ≥ 500
        return None


def _unknown(repo_id: str, error: Exception, parameter: str) -> TrouperValidationError:
    return TrouperValidationError(
        f"is neither a folder nor a model that can be downloaded from the hub ({type(error).__name__})",
        parameter=parameter,
        value=repo_id,
    )


DEMO_MODEL = Path(__file__).parents[2] / "demo"
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_ADDRESSES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
SHORT_NAME = (
    "; Ollama's short names are not supported: give the model's name on the hub, ORG/NAME:QUANT, "
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
        rule = "give a model's name on the hub without the address: ORG/NAME or ORG/NAME:QUANT"
    elif knows_presets:
        rule += f"; presets for load_format='dummy': {', '.join(GEOMETRIES)}"
    return TrouperValidationError(rule, parameter="model", value=name)


@contextmanager
def _as_given(name: str) -> Generator[None]:
    """Show the user's whole name in errors of the block, with a hint if it may be one of Ollama's short names."""
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
        raise invalid("model", "is neither a folder nor a regular file", str(path))
    if not (path.suffix == ".gguf" or has_magic(path)):
        raise invalid("model", "is not a GGUF file; for safetensors give the folder", str(path))
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
        what = "the downloaded GGUF files (the hub cannot be reached)"
        files = choose_gguf(gguf_names(folder), quantization, repo_id, what)
        return folder / files[0] if files else None
    files = choose_gguf(names, quantization, repo_id)
    if not files:
        return None
    patterns = [glob.escape(file) for file in files]
    return download(args, repo_id, args.revision, patterns) / files[0]


def _named(path: Path | None, place: str) -> Path:
    if path is None:
        raise invalid("model", "contains no GGUF files", place)
    return path
