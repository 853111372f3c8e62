"""Find missing optional packages, and the command that installs them."""

import importlib.util
import re
from importlib import metadata

# Features of requests, each with the module that it needs and the extra that installs this module.
REQUEST_EXTRAS = {
    "structured outputs and forced tool calls": ("llguidance", "grammar"),
}


def install_hint(extra: str) -> str:
    """Return the command to install the packages of an extra, such as "pip install 'llguidance>=1.9,<2'".

    The command lists the packages themselves, because trouper is not on a package index, and the command to install an extra
    differs between a checkout and a wheel.
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
    """Return the features that requests cannot use because an optional package is missing, with the install command of each.

    Packages required by a model or an option are not included, because the start fails without them.
    """
    return {
        feature: install_hint(extra)
        for feature, (module, extra) in REQUEST_EXTRAS.items()
        if importlib.util.find_spec(module) is None
    }


def _requirements() -> list[str]:
    """Return the requirements of the installed distribution, or nothing if the sources run without an installation."""
    try:
        return metadata.requires("trouper") or []
    except metadata.PackageNotFoundError:
        return []
