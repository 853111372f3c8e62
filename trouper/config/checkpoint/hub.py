"""List and download the files of a repository on the hub."""

from collections.abc import Sequence
from pathlib import Path

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError

# The files of a model folder.
PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "artifact.metadata")
OFFLINE = (
    "no such folder, not among the models that were fetched before, and the hub cannot be reached; "
    "`trouper models` lists what is on this machine"
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
        f"neither a folder nor a hub model that can be fetched ({type(error).__name__})",
        parameter=parameter,
        value=repo_id,
    )
