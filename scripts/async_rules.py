"""Run flake8-async's rules on the async code of files and folders: `python scripts/async_rules.py PATH …`.

The command `flake8-async` takes seven minutes of processor time for this repository, for two reasons. It computes the position of
every node of a file once for each of its visitors, although no visitor changes the file, and it also reads files to which no rule
applies. This script computes positions once, skips those files, and uses all processors. Its findings are the
same (`tests/packaging/test_checks.py`).
"""

import argparse
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import patch

import flake8_async
from flake8_async.base import Error
from flake8_async.runner import Flake8AsyncRunner_cst
from libcst.metadata import MetadataWrapper

# Every rule is about async code, a call to one of the three libraries, an HTTP client, or an `except` clause that can catch a
# cancellation or an exception group.
RELEVANT = re.compile(
    r"\b(async|await|anyio|trio|asyncio|httpx|BaseException|\w*ExceptionGroup)\b|except\s*[:*]"
)
STARTABLE = "run,_keep_open,_run_actors,_run_engine,_run_residency,carry_out,forward,listen,run_tasks,run_writer"
# This code may use `from anyio import X`, which ASYNC106 forbids. ASYNC91x demands a checkpoint in every async function; here only a
# few functions promise one, in their docstrings.
DISABLED = "ASYNC106,ASYNC91"
# ASYNC124 forbids an async function that never awaits.  Tests are async to have an event loop, even if they await nothing.
DISABLED_IN_TESTS = f"{DISABLED},ASYNC124"


class FastRunner(Flake8AsyncRunner_cst):
    """Visit a module with all visitors, which share the positions of its nodes.

    The original program visits the whole module once for each rule, and takes seven times as long.
    """

    def run(self) -> Iterator[Error]:
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        for visitor in (*self.utility_visitors, *self.visitors):
            wrapper.visit(visitor)
        yield from self.state.problems
        self.noqas = self.visitors[-1].noqas


def main() -> None:
    parser = argparse.ArgumentParser(description="Run flake8-async's rules on files and folders.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    paths = [file for path in parser.parse_args().paths for file in modules(path)]
    # Start with large files, so that all processors finish at about the same time.
    paths.sort(key=lambda path: path.stat().st_size, reverse=True)
    with ProcessPoolExecutor() as pool:
        found = sorted(line for lines in pool.map(findings, paths) for line in lines)
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.exit(bool(found))


def modules(path: Path) -> list[Path]:
    """List the modules of a folder, or the one file, to which a rule can apply; symbolic links are not followed."""
    files = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return [file for file in files if RELEVANT.search(file.read_text())]


def findings(path: Path, *options: str) -> list[str]:
    """Return one line for each finding in a file, in the format of the command `flake8-async`.

    The caller prints them, and fails if there are any; a file without findings yields an empty list.
    """
    disabled = DISABLED_IN_TESTS if "tests" in path.resolve().parts else DISABLED
    options = options or (f"--disable={disabled}",)
    parser = argparse.ArgumentParser()
    flake8_async.Plugin.add_options(parser)
    flake8_async.Plugin.parse_options(
        parser.parse_args(["--anyio", f"--startable-in-context-manager={STARTABLE}", *options])
    )
    with patch.object(flake8_async, "Flake8AsyncRunner_cst", FastRunner):
        found = sorted(flake8_async.Plugin.from_filename(path).run())
    return [f"{path}:{error}" for error in found]


if __name__ == "__main__":
    main()
