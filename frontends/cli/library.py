"""`trouper pull`, `show`, `rm`, `ps`, `load` and `unload`: manage downloaded models, and the models of a server."""

import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from trouper.config.args import EngineArgs
from trouper.config.checkpoint.model_path import model_path
from trouper.errors import RemoteError, TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.models import find_models, size_text, table
from trouper.frontends.cli.options import expand_options

SERVER = "http://127.0.0.1:8000"
PS_TIMEOUT_S = 10.0
# A load reads weights from disk, and an unload waits for requests.
LOAD_TIMEOUT_S = 600.0
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="ORG/NAME or ORG/NAME:QUANT on the hub, or a path.")
]
DownloadDir = Annotated[
    Path | None,
    typer.Option("--download-dir", help="Folder of downloaded models; the hub's cache by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@expand_options
def pull(
    ctx: typer.Context,
    name: Name,
    download_dir: DownloadDir = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")
    ] = None,
    hf_token: Annotated[
        str | None, typer.Option("--hf-token", help="Token for models that need one.")
    ] = None,
) -> None:
    """Download a model from the hub and check whether it can be served.

    For example: trouper pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M

    Existing files are not downloaded again. Every command downloads a missing model on first use; `pull` does it in
    advance.
    """
    args = EngineArgs(name, revision=revision, hf_token=hf_token)
    if download_dir is not None:
        args.download_dir = str(download_dir)
    path = model_path(args)
    # The name is that of a preset, which has random weights and no files.
    if not path.exists():
        raise TrouperValidationError(
            "is a preset with random weights, which needs no download", parameter="name", value=name
        )
    (entry,) = find_models([path], hub=False)[:1]
    if entry["reason"]:
        output.complain(f"{name} is on this machine, but cannot be served: {entry['reason']}")
        raise typer.Exit(1)
    print(
        f"{name} is on this machine ({size_text(entry['size_bytes'])}); serve it: trouper serve {name}"
    )


@expand_options
def show(
    ctx: typer.Context,
    name: Name,
    download_dir: DownloadDir = None,
    template: Annotated[
        bool, typer.Option("--template", help="Print only the model's chat template.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Describe a model on this machine: type, size, context, defaults, and what it can do.

    For example: trouper show Qwen/Qwen3-0.6B

    Nothing is downloaded and no weights are read.
    """
    entry = _on_this_machine(name, download_dir)
    if template:
        print(_template(entry["path"]) or "")
        return
    facts = _facts(entry)
    print(json.dumps(facts, indent=2) if as_json else "\n".join(_lines(facts)))


@expand_options
def rm(
    ctx: typer.Context,
    name: Name,
    download_dir: DownloadDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking first.")] = False,
) -> None:
    """Delete a model from the hub's cache; files elsewhere are never touched.

    For example: trouper rm Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
    """
    entry = _on_this_machine(name, download_dir)
    if entry["repository"] is None:
        rule = "is not in the hub's cache; delete its files yourself"
        raise TrouperValidationError(rule, parameter="name", value=name)
    what = f"{name} ({size_text(entry['size_bytes'])})"
    if not yes:
        if not output.is_terminal(sys.stdin):
            rule = f"would delete {what}; add --yes to delete without a confirmation at a terminal"
            raise TrouperValidationError(rule, parameter="yes")
        typer.confirm(f"delete {what}?", abort=True)
    _delete(entry, download_dir)
    print(f"deleted {what}")


@expand_options
def ps(
    ctx: typer.Context,
    url: Annotated[str, typer.Option("--url", help="Address of the server to ask.")] = SERVER,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="API key to send.", envvar="TROUPER_API_KEY")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the models that a server has loaded.

    For example: trouper ps --url http://127.0.0.1:11434

    It also works with Ollama's servers.
    """
    found = _ask(url, api_key)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [("model", "size", "on", "context")]
    for each in found:
        size = int(each.get("size") or 0)
        on = "GPU" if each.get("size_vram") else "CPU"
        rows.append(
            (str(each.get("name")), size_text(size), on, str(each.get("context_length", "-")))
        )
    print("\n".join(table(rows)))


ServedName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a model of the server.")]
Url = Annotated[str, typer.Option("--url", help="Address of the server's control routes.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", help="Admin key to send.", envvar="TROUPER_ADMIN_KEY")
]


@expand_options
def load(
    ctx: typer.Context, name: ServedName, url: Url = SERVER, admin_key: AdminKey = None
) -> None:
    """Load a model of a server with several models, and wait until it is awake.

    For example: trouper load chat --url http://127.0.0.1:8000
    """
    found = _call(url, "/models/load", admin_key, {"model": name}, LOAD_TIMEOUT_S)
    print(f"{name} is {found.get('state')} after {found.get('seconds')} s")


@expand_options
def unload(
    ctx: typer.Context,
    name: ServedName,
    url: Url = SERVER,
    admin_key: AdminKey = None,
    abort: Annotated[
        bool, typer.Option("--abort", help="Abort its requests instead of waiting for them.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Unload it although it is pinned.")
    ] = False,
) -> None:
    """Unload a model of a server with several models, when its requests have ended.

    For example: trouper unload chat
    """
    body = {"model": name, "mode": "abort" if abort else "wait", "force": force}
    found = _call(url, "/models/unload", admin_key, body, LOAD_TIMEOUT_S)
    print(f"{name} is {found.get('state')} after {found.get('seconds')} s")


def _ask(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """Return the loaded models of a server.  Raises RemoteError if no trouper or Ollama server answers."""
    found = _call(url, "/api/ps", api_key, None, PS_TIMEOUT_S).get("models")
    if not isinstance(found, list):
        raise RemoteError(f"{url}: not an answer of trouper or Ollama")
    return cast("list[dict[str, Any]]", found)


def _call(
    url: str, path: str, key: str | None, body: dict[str, Any] | None, timeout_s: float
) -> dict[str, Any]:
    """Send a request (a POST with a body, else a GET) and return the parsed answer.

    Raises:
        RemoteError: no server answers, or it answers with an error.
    """
    import httpx2

    address = f"{url.rstrip('/').removesuffix('/v1')}{path}"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    method = "GET" if body is None else "POST"
    try:
        answer = httpx2.request(method, address, json=body, headers=headers, timeout=timeout_s)
    except (httpx2.TransportError, httpx2.InvalidURL, ValueError) as error:
        raise RemoteError(f"no server answers at {address}: {error}") from error
    if answer.status_code != 200:
        hint = (
            "; control routes need --admin-key or --dev-mode" if answer.status_code == 404 else ""
        )
        hint = hint if path.startswith("/models") else ""
        raise RemoteError(f"{address} answered {answer.status_code}: {answer.text[:200]}{hint}")
    try:
        found: Any = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RemoteError(f"{address}: not an answer of trouper or Ollama")
    return cast("dict[str, Any]", found)


def _on_this_machine(name: str, download_dir: Path | None) -> dict[str, Any]:
    """Find a model by its name in the hub's cache, or by its path.

    Raises:
        TrouperValidationError: it is not there; the message names similar ones.
    """
    path = Path(name).expanduser()
    found = find_models([path], hub=False) if path.exists() else []
    if len(found) == 1:
        return found[0]
    known = found or find_models([], download_dir)
    names = [entry["model"] for entry in known]
    place, _, label = name.rpartition(":")
    hits = [entry for entry in known if entry["model"] == name]
    hits = hits or [entry for entry in known if entry["repository"] == name]
    hits = hits or [
        entry for entry in known if entry["repository"] == place and _is_labelled(entry, label)
    ]
    if len(hits) == 1:
        return hits[0]
    near = [entry["model"] for entry in hits] or difflib.get_close_matches(name, names, cutoff=0.4)
    more = f"; similar names: {', '.join(near)}" if near else ""
    rule = f"matches {len(hits) or 'no'} model{'s' * (len(hits) != 1)} on this machine{more}"
    raise TrouperValidationError(
        f"{rule}; to download one: trouper pull NAME", parameter="name", value=name
    )


def _is_labelled(entry: dict[str, Any], label: str) -> bool:
    """Return whether the name of a GGUF model ends with the requested quantization."""
    return str(entry["model"]).lower().endswith(label.lower())


def _facts(entry: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": entry["model"],
        "path": entry["path"],
        "architecture": entry["type"] or None,
        "task": entry["task"] or None,
        "served by": entry["served_by"] or f"not served: {entry['reason']}",
    }
    if entry["reason"]:
        return facts
    # Imported here, so that the other commands start faster.
    from trouper.config.generation import describe_sampling
    from trouper.config.model import ModelConfig, ModelFiles

    model = ModelConfig.load(EngineArgs(entry["path"]))
    files = ModelFiles.of(model)
    return {
        **facts,
        "parameters": files.parameters,
        "size": size_text(files.num_bytes),
        "weights": files.level,
        "context": model.max_position_embeddings,
        "chat template": _template(entry["path"]) is not None,
        "sampling": f"{describe_sampling(model.default_sampling)} ({model.sampling_source})",
    }


def _template(path: str) -> str | None:
    from trouper.actors.rendering.tokenizer import Tokenizer

    try:
        return Tokenizer.load(path).chat_templates.get("default")
    except TrouperValidationError:
        return None


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = {None: "-", True: "yes", False: "no"}.get(value, value)
        yield f"{name:<{width}}  {shown}"


def _delete(entry: dict[str, Any], download_dir: Path | None) -> None:
    """Delete a model's repository from the cache; of a repository with several GGUF models, only this model's files."""
    from huggingface_hub import scan_cache_dir

    if entry["files"] is None:
        repos = scan_cache_dir(download_dir).repos
        (repo,) = (each for each in repos if each.repo_id == entry["repository"])
        commits = [revision.commit_hash for revision in repo.revisions]
        scan_cache_dir(download_dir).delete_revisions(*commits).execute()
        return
    for file in map(Path, entry["files"]):
        blob = file.resolve()
        file.unlink()
        if blob != file:
            blob.unlink(missing_ok=True)
