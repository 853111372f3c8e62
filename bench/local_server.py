"""Start servers on this machine, to be measured by a benchmark."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from trouper.config.model import DEMO_MODEL


class LocalServer(NamedTuple):
    """A running server process on this machine. The id allows measuring its memory and processor time."""

    port: int
    pid: int


@contextmanager
def local_server(*arguments: str) -> Iterator[LocalServer]:
    """Run `trouper serve` with these arguments on a free port until the block ends.

    Raises:
        SystemExit: the server did not start, or ended with another code than 0.
    """
    command = [sys.executable, "-m", "trouper", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if "serving" in line:
                break
        else:
            raise SystemExit("the server did not start: " + "".join(lines[-3:]).strip())
        try:
            yield LocalServer(int(re.findall(r":(\d+)", line)[-1]), server.pid)
        finally:
            server.terminate()
            server.stderr.read()
    if server.returncode:
        raise SystemExit(f"the server ended with {server.returncode}")


@contextmanager
def demo_of_length(num_positions: int) -> Iterator[str]:
    """Yield a folder with the demo model, changed to take more positions than it was trained on.

    Answers have no meaning beyond the trained positions, but their speed is real.
    """
    with tempfile.TemporaryDirectory() as folder:
        for file in DEMO_MODEL.iterdir():
            (Path(folder) / file.name).symlink_to(file)
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        (Path(folder) / "config.json").unlink()
        config["max_position_embeddings"] = num_positions
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder
