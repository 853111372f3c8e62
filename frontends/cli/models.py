"""`trouper models`: list the models on this machine and whether each can be served.

It answers "can I serve this model?" before a download or a start: the same check that the engine makes reads only the
configuration files, so no weights are loaded.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trouper.config.checkpoint.model_path import is_plain
from trouper.config.gguf.names import gguf_models, gguf_names
from trouper.errors import TrouperValidationError
from trouper.frontends.cli.options import expand_options

SHOWN = ("model", "path", "size_bytes", "type", "task", "served_by", "state_bytes", "reason")
HEADINGS = ("model", "size", "type", "task", "served by")


@expand_options
def models(
    ctx: typer.Context,
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]",
            help="Further model folders, GGUF files, or folders that contain them.",
        ),
    ] = None,
    download_dir: Annotated[
        Path | None,
        typer.Option(
            "--download-dir", help="Folder of downloaded models; the hub's cache by default."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models on this machine with size and type, and whether each can be served or why not.

    For example: trouper models ~/models

    Nothing is downloaded and no weights are read. A model served through transformers is checked again when it is
    loaded.
    """
    found = find_models(folders or (), download_dir)
    if as_json:
        shown = [{name: e[name] for name in SHOWN} for e in found]
        print(json.dumps(shown, indent=2))
        return
    rows = [
        (e["model"], size_text(e["size_bytes"]), e["type"] or "-", e["task"] or "-", _served_by(e))
        for e in found
    ]  # fmt: skip
    nothing = _nothing_found(download_dir, folders or ())
    print("\n".join(table([HEADINGS, *rows])) if found else nothing)


def find_models(
    folders: Sequence[Path], download_dir: Path | None = None, *, hub: bool = True
) -> list[dict[str, Any]]:
    """Find the models of the hub's cache and of some folders.

    Returns:
        For each model the fields of `trouper models --json`; `repository`, its id on the hub or None; and `files`, the files of a
        model that shares its repository with others.
    """
    found = list(_of_the_hub(download_dir)) if hub else []
    return [*found, *(entry for folder in folders for entry in _of_folder(folder))]


def _nothing_found(download_dir: Path | None, folders: Sequence[Path]) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    searched = [f"the hub's cache {download_dir or HF_HUB_CACHE}", *map(str, folders)]
    return f"no models in {', '.join(searched)}; name another folder: trouper models FOLDER"


def _of_the_hub(download_dir: Path | None) -> Iterator[dict[str, Any]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(download_dir).repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        for entry in _of_folder(newest.snapshot_path, repo.repo_id):
            yield entry | {"repository": repo.repo_id}


def _of_folder(path: Path, name: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the models in a folder: the folder itself, its GGUF files, and model folders one level below.

    Args:
        name: the model's name on the hub, if the folder is in the hub's cache.
    """
    path = path.expanduser()
    if path.is_file():
        yield _entry(path, str(path), _split_files(path))
        return
    if not path.is_dir():
        raise TrouperValidationError("no such folder", parameter="folders", value=str(path))
    models = gguf_models(gguf_names(path))
    if _is_model(path) or (not models and (path / "config.json").is_file()):
        yield _entry(path, name or str(path))
        return
    for label, files in models.items():
        found = [path / file for file in files]
        yield _entry(found[0], f"{name}:{label}" if name else str(found[0]), found)
    if name is None:
        for folder in sorted(path.iterdir()):
            has_config = folder.is_dir() and (folder / "config.json").is_file()
            if has_config and (_is_model(folder) or not gguf_models(gguf_names(folder))):
                yield _entry(folder, str(folder))


def _is_model(folder: Path) -> bool:
    return is_plain(folder) and (folder / "config.json").is_file()


def _split_files(path: Path) -> list[Path]:
    """Return all files of a split GGUF model if `path` is its first file, else only `path`."""
    for files in gguf_models(gguf_names(path.parent)).values():
        if files[0] == path.name:
            return [path.parent / file for file in files]
    return [path]


def _entry(path: Path, name: str, files: list[Path] | None = None) -> dict[str, Any]:
    from trouper.actors.executor.workers.model_files import judge

    verdict = judge(path)
    own = None if files is None else [str(file) for file in files]
    if files is None:
        files = [file for file in path.rglob("*") if file.is_file()]
    return {
        "model": name,
        "path": str(path),
        "size_bytes": sum(file.stat().st_size for file in files),
        "type": verdict.architecture,
        "task": verdict.task,
        "served_by": verdict.code,
        "state_bytes": verdict.state_bytes,
        "reason": verdict.reason,
        "repository": None,
        "files": own,
    }


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Align all columns of rows except the last; the first row contains the headings.

    Cells are separated by two spaces.  The last column is not padded, so long names do not wrap the lines.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]])


def _served_by(entry: dict[str, Any]) -> str:
    if not entry["served_by"]:
        return f"no: {entry['reason']}"
    num_bytes = entry["state_bytes"]
    states = f", states: {size_text(num_bytes)} a sequence" if num_bytes else ""
    return entry["served_by"] + states


def size_text(num_bytes: int) -> str:
    if num_bytes >= 1e8:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
