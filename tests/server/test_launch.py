"""`trouper launch`: agents by their programs' names, here stand-ins that write down how they were started."""

import json
import os
import subprocess
import sys
import tomllib

import pytest

from trouper.frontends.cli.chat.remote import RemoteModel
from trouper.frontends.cli.launch import AGENTS, Backend
from trouper.frontends.cli.main import run_line

from .fake import error, response, serving

MODEL = "org/a model"
MODELS = response(json.dumps({"data": [{"id": MODEL, "max_model_len": 20_000}]}).encode())
STAND_IN = """\
#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
raise SystemExit(7)
"""


@pytest.fixture
def server():
    with serving(b"", MODELS) as server:
        yield server


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder in PATH with a stand-in for each agent, and a home that is empty."""
    home = tmp_path / "home"
    home.mkdir()
    for name in AGENTS:
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STAND_IN.format(python=sys.executable))
        program.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("TROUPER_API_KEY", raising=False)
    return home


def started(*line, **variables):
    """The arguments and the environment that an agent was started with, and whether it wrote a complaint."""
    done = subprocess.run(
        [sys.executable, "-m", "trouper", "launch", *line],
        capture_output=True, text=True, env={**os.environ, **variables}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (7, "")
    return json.loads(done.stdout)


def settings_of(arguments):
    """What the arguments -c of Codex say, as it reads them."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    assert all(option == "-c" for option, _ in arguments and pairs)
    return tomllib.loads("\n".join(arguments[1::2]))


def test_codex_gets_a_provider_by_its_arguments(server, programs):
    arguments, variables = started("codex", "--url", server.url, "--", "exec", "-x", "--", "hi")
    *settings, command, option, dashes, prompt = arguments
    assert [command, option, dashes, prompt] == ["exec", "-x", "--", "hi"]
    provider = {"name": "trouper", "base_url": f"{server.url}/v1", "wire_api": "responses"}
    assert settings_of(settings) == {
        "model": MODEL, "model_provider": "trouper", "model_context_window": 20_000,
        "model_providers": {"trouper": provider},
    }  # fmt: skip
    assert "TROUPER_API_KEY" not in variables
    assert not [*programs.iterdir()]


def test_key_goes_to_server_and_to_agent(server, programs):
    arguments, variables = started("codex", "--url", server.url, TROUPER_API_KEY="sesame")
    assert settings_of(arguments)["model_providers"]["trouper"]["env_key"] == "TROUPER_API_KEY"
    assert variables["TROUPER_API_KEY"] == "sesame"
    (_, headers, _), *_ = server.asked
    assert headers["authorization"] == "Bearer sesame"


def test_claude_gets_variables_and_no_second_key(server, programs):
    arguments, variables = started("claude", "--url", f"{server.url}/v1/", ANTHROPIC_API_KEY="x")
    assert arguments == []
    assert variables["ANTHROPIC_BASE_URL"] == server.url
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert variables["ANTHROPIC_MODEL"] == variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == MODEL
    assert "ANTHROPIC_API_KEY" not in variables
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "5000"


def backend(length=65_536, key=None):
    return Backend("http://h:1/v1", RemoteModel("m", length), key)


@pytest.mark.parametrize(
    ("length", "window", "share"),
    [(None, None, None), (200_000, "200000", None), (65_536, "100000", "62"), (18_688, "100000", "15")],
)  # fmt: skip
def test_claude_compacts_before_the_context_is_full(length, window, share):
    variables = AGENTS["claude"].settings(backend(length)).variables
    assert variables.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == window
    assert variables.get("CLAUDE_AUTOCOMPACT_PCT_OVERRIDE") == share
    if share is not None:
        reserve = min(20_000, int(variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]))
        assert (int(window) - reserve) * int(share) / 100 < 0.81 * length


@pytest.mark.parametrize(("length", "limit"), [(65_536, {"context": 65_536, "output": 16_384}), (None, None)])  # fmt: skip
def test_opencode_gets_a_configuration_in_a_variable(length, limit):
    start = AGENTS["opencode"].settings(backend(length, "sesame"))
    config = json.loads(start.variables["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["trouper"]
    assert provider["options"] == {"baseURL": "http://h:1/v1", "apiKey": "sesame"}
    assert provider["models"] == {"m": {} if limit is None else {"limit": limit}}
    assert config["model"] == config["small_model"] == "trouper/m"


def test_qwen_gets_variables_and_its_kind_of_key():
    start = AGENTS["qwen"].settings(backend())
    assert start.arguments == ["--auth-type", "openai"]
    assert start.variables == {
        "OPENAI_BASE_URL": "http://h:1/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "m",
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "16384",
    }  # fmt: skip


@pytest.mark.parametrize("agent", AGENTS)
def test_what_is_printed_starts_agent_in_same_way(server, programs, capsys, agent):
    line = [agent, "--url", server.url, "--", "-p", "it's"]
    direct = started(*line, ANTHROPIC_API_KEY="x")
    assert run_line(["launch", "--print", *line]) == 0
    script = capsys.readouterr().out
    environment = {**os.environ, "ANTHROPIC_API_KEY": "x"}
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    printed = json.loads(done.stdout)
    assert printed[0] == direct[0]
    of_shells = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert {k: v for k, v in printed[1].items() if k not in of_shells} == {
        k: v for k, v in direct[1].items() if k not in of_shells
    }


def complaint(capsys, *line):
    code = run_line(["launch", *line])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return code, err


def test_agent_not_named_with_its_package(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, err = complaint(capsys, "claude")
    assert code == 2
    assert "npm install -g @anthropic-ai/claude-code" in err


@pytest.mark.usefixtures("programs")
class TestMistakes:
    def test_an_unknown_agent(self, capsys):
        code, err = complaint(capsys, "aider")
        assert code == 2
        assert "'codex', 'claude', 'opencode', 'qwen'" in err

    def test_a_server_that_is_not_there(self, capsys):
        code, err = complaint(capsys, "claude", "--url", "http://127.0.0.1:9")
        assert code == 1
        assert "trouper serve" in err

    def test_a_model_that_the_server_has_not(self, capsys, server):
        code, err = complaint(capsys, "qwen", "--url", server.url, "--model-name", "gpt-4o")
        assert code == 2
        assert "gpt-4o" in err
        assert MODEL in err

    def test_a_key_that_the_server_refuses(self, capsys):
        with serving(b"", error("401 Unauthorized")) as server:
            code, err = complaint(capsys, "opencode", "--url", server.url)
        assert code == 2
        assert "401" in err

    @pytest.mark.parametrize("models", [b"{}", b'{"data": []}', b"what"])
    def test_a_server_of_another_kind(self, capsys, models):
        with serving(b"", response(models)) as server:
            code, err = complaint(capsys, "codex", "--url", server.url)
        assert code == 1
        assert "OpenAI-compatible" in err
