"""Optional packages, and the command that installs them for every kind of installation."""

import importlib.util
import re
from importlib import metadata

# Features of requests: the module each needs, and the extra that brings it.
REQUEST_EXTRAS = {
    "structured outputs and forced tool calls": ("llguidance", "grammar"),
}


def install_hint(extra: str) -> str:
    """Return the command to install the packages of an extra, such as "pip install 'llguidance>=1.9,<2'".

    It names the packages themselves, because trouper is on no package index, and installing an extra of it works
    differently for a checkout, a wheel and an installed copy.
    """
    packages = [
        requirement.split(";")[0].strip()
        for requirement in _requirements()
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", requirement)
    ]
    if not packages:
        return f"install trouper with its extra `{extra}`"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def missing_features() -> dict[str, str]:
    """Return what requests cannot ask for since an optional package is missing: each feature with its install command.

    Packages that a model or an option needs are not among them: without those the start fails.
    """
    return {
        feature: install_hint(extra)
        for feature, (module, extra) in REQUEST_EXTRAS.items()
        if importlib.util.find_spec(module) is None
    }


def _requirements() -> list[str]:
    """Return what the installed distribution requires; nothing where the sources run without being installed."""
    try:
        return metadata.requires("trouper") or []
    except metadata.PackageNotFoundError:
        return []
