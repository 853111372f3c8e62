"""Unmodified coding agents from npm complete a session with a server: a forced tool call, its result, and an end.

`AGENTS` names the folder of their installation (`npm install --prefix FOLDER`). If the machine allows it, they run in a network
namespace with only the loopback.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .agent_session import LAST, MARK

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(os.environ.get("AGENTS", "agents")) / "node_modules" / ".bin"
NAMESPACE = ["unshare", "--map-root-user", "--net"]
LOOPBACK = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
ASK = "Say what the tool says."
WORDS = {
    "codex": ["exec", "--skip-git-repo-check", "--json", ASK],
    "claude": ["-p", ASK, "--allowedTools", "Bash", "--output-format", "json"],
    "opencode": ["run", ASK],
    "qwen": ["--yolo", "-p", ASK],
}


def isolated():
    """Return the command prefix that removes the network."""
    is_allowed = shutil.which(NAMESPACE[0]) and shutil.which("ip")
    if not is_allowed or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        return []
    return [*NAMESPACE, *LOOPBACK]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("agent", WORDS)
def test_an_agent_calls_a_tool_and_ends(agent, tmp_path):
    if not (PROGRAMS / agent).exists():
        pytest.skip(f"{agent} is not in {PROGRAMS}")
    launch = [sys.executable, "-m", "trouper", "launch", agent, "--url", "URL", "--"]
    session = [sys.executable, "-m", "tests.clients.agent_session", str(tmp_path), agent]
    done = subprocess.run(
        [*isolated(), *session, *launch, *WORDS[agent]],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PATH": f"{PROGRAMS.resolve()}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    asked = [(each["method"], each["path"], each["status"]) for each in found["requests"]]
    assert found["code"] == 0, (asked, found["stdout"][-2000:], found["stderr"][-2000:])
    assert {status for method, _, status in asked if method == "POST"} == {200}, asked
    assert LAST in found["stdout"]
    bodies = [json.dumps(each["body"]) for each in found["requests"]]
    # the agent has run the tool, and has sent what it said
    assert any(MARK in body.replace(f"echo {MARK}", "") for body in bodies)
