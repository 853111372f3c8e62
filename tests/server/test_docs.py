"""The documents' command lines, run against a real server."""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .process import started

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text()
COMMANDS = (ROOT / "docs" / "command-line.md").read_text()
ADDRESS = "127.0.0.1:8000"


@pytest.fixture(scope="module")
def server():
    with started() as server:
        yield server


def blocks(language, page=PAGE):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("line", blocks("sh")[0].splitlines())
def test_curl(server, line):
    assert line.startswith("curl ")
    command = line.replace(ADDRESS, f"127.0.0.1:{server.port}")
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True)
    if '"stream": true' in line:
        assert done.stdout.endswith("data: [DONE]\n\n")
    else:
        assert "error" not in json.loads(done.stdout)


def test_the_openai_example(server):
    code = blocks("python")[0].replace(ADDRESS, f"127.0.0.1:{server.port}")
    out = io.StringIO()
    space = {}
    with contextlib.redirect_stdout(out):
        exec(code, space)
    space["client"].close()
    assert out.getvalue()


def test_the_page_shows_every_route():
    from trouper.frontends.server.asgi.routes import ROUTES

    for route in ROUTES:
        assert f"`{route.method} {route.path}`" in PAGE or f"`{route.path}`" in PAGE, route.path


FROM_THE_HUB = re.compile(
    r"(-m|chat) \w[\w.-]*/\w"
)  # their options are checked with those of all pages


# Each line starts processes.  The default tests parse all lines (`tests/packaging/test_deploy.py`), and run those of README.
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        line
        for block in blocks("sh", COMMANDS)
        for line in block.replace("\\\n", "").splitlines()
        if not FROM_THE_HUB.search(line)
    ],
)
def test_the_commands_of_the_command_line(server, line, tmp_path):
    line = re.sub(r"> ([\w.-]+)$", rf"> {tmp_path}/\1", line)
    line = line.replace("complete --max", f"complete --url http://{ADDRESS} --max")
    line = line.replace(ADDRESS, f"127.0.0.1:{server.port}").replace("-o a", f"-o {tmp_path}/a")
    line = line.replace("trouper ", f"{sys.executable} -m trouper ")
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        input="hi\n/exit\n",
        cwd=ROOT,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert "trouper: " not in done.stderr
    text = "".join(file.read_text() for file in tmp_path.iterdir()) or done.stdout
    assert text.strip()
    if "run-batch" in line:
        assert all(json.loads(row)["response"]["status_code"] == 200 for row in text.splitlines())
