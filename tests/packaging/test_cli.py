"""The command line: results on stdout, one line on stderr for every mistake, exit codes."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields

import msgspec
import numpy as np
import pytest

from tests.support.adapters import random_tensors, write_adapter
from trouper import __version__
from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError, UnsupportedFeatureError
from trouper.frontends.cli import options, output, serve
from trouper.frontends.cli.chat import terminal
from trouper.frontends.cli.chat.subjects import CUT
from trouper.frontends.cli.chat.terminal import quick_message
from trouper.frontends.cli.main import run_line
from trouper.frontends.server.shared.settings import ServeSettings

GREEDY = ["--temperature", "0"]
GENERATE_RESOLVE = "trouper.frontends.cli.running.resolve"


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    """Use 80 columns, no colour, and an empty stdin without a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("warnings.showwarning", None)  # the command line has its own; undone after


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version(capsys, flag):
    assert run_line([flag]) == 0
    assert capsys.readouterr().out == f"trouper {__version__}\n"


def test_every_engine_argument_is_an_option():
    shown = {name for panel in options.ENGINE_HELP.values() for name in panel}
    assert shown | {"seed"} == {field.name for field in fields(EngineArgs)}


def test_options_become_engine_args(monkeypatch):
    seen = []
    monkeypatch.setattr(GENERATE_RESOLVE, lambda args, **_: seen.append(args) or 1 / 0)
    arguments = ["x", "-m", "folder", "--max-model-len", "8k", "--max-num-seqs", "3", "--seed", "7"]
    arguments += ["--no-enable-prefix-caching", "--enforce-eager", "--watermark", "0.5"]
    arguments += [
        "--cudagraph-capture-sizes",
        "1,2",
        "--override-generation-config",
        '{"top_k": 4}',
    ]
    arguments += ["--served-model-name", "a", "--served-model-name", "b"]
    assert run_line(["generate", *arguments]) == 1
    assert seen == [
        EngineArgs(
            "folder", max_model_len="8k", max_num_seqs=3, seed=7, enable_prefix_caching=False,
            enforce_eager=True, watermark=0.5, cudagraph_capture_sizes=[1, 2],
            override_generation_config={"top_k": 4}, served_model_name=["a", "b"],
        )
    ]  # fmt: skip
    assert run_line(["generate", "x"]) == 1
    assert seen[1] == EngineArgs(max_num_seqs=1)


CONFIG = """
model = "folder"
port = 9000
api-key = ["a", "b"]
max_model_len = "8k"
max-num-seqs = 3
enable-prefix-caching = false
cudagraph-capture-sizes = [1, 2]
access-log = true
log-level = "debug"
[default-chat-template-kwargs]
enable_thinking = false
"""


def test_command_line_overrides_server_options_of_file(monkeypatch, tmp_path):
    monkeypatch.delenv("TROUPER_DEVICE", raising=False)  # the tests' own
    (tmp_path / "config.toml").write_text(CONFIG)
    seen = []
    monkeypatch.setattr(serve, "_run", lambda *options: seen.append(options))
    monkeypatch.setattr(serve, "resolve", lambda args, **_: args)
    given = ["--config", str(tmp_path / "config.toml"), "--port", "1", "--max-num-seqs", "4"]
    assert run_line(["serve", *given]) == 0
    assert [options[:2] for options in seen] == [
        (
            ServeSettings(
                port=1, api_keys=("a", "b"), logs_access=True, log_level="debug",
                default_chat_template_kwargs={"enable_thinking": False},
            ),
            EngineArgs(
                "folder", max_model_len="8k", max_num_seqs=4, max_step_ms=None, enable_prefix_caching=False,
                cudagraph_capture_sizes=[1, 2],
            ),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "has unknown options: prot"),
        ("config = 'x'", "has unknown options: config"),
        ("port: 1", "config.toml"),
        ("port = 'many'", "Invalid value for '--port'"),
        (None, "No such file"),
    ],
)
def test_a_file_that_says_nonsense_is_a_mistake(capsys, tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.toml").write_text(text)
    assert run_line(["serve", "--config", str(tmp_path / "config.toml")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "given", "wanted"),
    [
        ({"TROUPER_PORT": "7"}, [], {"port": 7}),
        ({"TROUPER_PORT": "7"}, ["--port", "8"], {"port": 8}),
        ({"TROUPER_DEV_MODE": "1"}, [], {"is_dev_mode": True}),
        ({"VLLM_SERVER_DEV_MODE": "1"}, [], {"is_dev_mode": True}),
        ({"TROUPER_MAX_MODEL_LEN": "8k", "TROUPER_ENABLE_PREFIX_CACHING": "0"}, [], {"max_model_len": "8k", "enable_prefix_caching": False}),
        ({"TROUPER_POOLER_CONFIG": '{"task": "embed"}'}, [], {"pooler_config": {"task": "embed"}}),
        ({}, ["--pooler-config.task", "embed", "--pooler-config.dimensions=3"], {"pooler_config": {"task": "embed", "dimensions": 3}}),
    ],
)  # fmt: skip
def test_options_come_from_variables_and_dots_too(monkeypatch, variables, given, wanted):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(serve, "_run", lambda *options: seen.extend(options))
    monkeypatch.setattr(serve, "resolve", lambda args, **_: args)
    assert run_line(["serve", *given]) == 0
    found = {**msgspec.structs.asdict(seen[0]), **vars(seen[1])}
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(("given", "code"), [([], 0), (["--host", "0.0.0.0"], 2), (["--host", "0.0.0.0", "--admin-key", "k"], 0), (["--uds", "x"], 0)])  # fmt: skip
def test_control_routes_without_key_are_local_only(monkeypatch, given, code):
    monkeypatch.setattr(serve, "_run", lambda *options: None)
    monkeypatch.setattr(serve, "resolve", lambda args, **_: args)
    assert run_line(["serve", "--dev-mode", *given]) == code


MISTAKES = [
    ("serve --pooler-config.task", 2, "--pooler-config.task: needs a value"),
    ("generate x --temprature 1", 2, "--temperature"),
    ("generat x", 2, "No such command 'generat'"),
    ("generate x --max-tokens many", 2, "Invalid value for '--max-tokens'"),
    ("generate x --max-tokens", 2, "--max-tokens"),
    ("generate x --max-tokens 0", 2, "max_tokens: must be at least 1"),
    ("generate x --temperature 3", 2, "temperature: must be in [0, 2]"),
    ("generate x --n 2 --temperature 0", 2, "n must be 1"),
    ("generate x --n 0", 2, "n: must be in"),
    ("generate x --n 2 --stream", 2, "--stream"),
    ("generate x -m /no/such/folder", 2, "no such model folder"),
    ("generate x -m ./typo.gguf", 2, "model: no such file"),
    ("generate x -m typo.gguf", 2, "model: no such file"),
    ("generate x -m docs/typo.gguf", 2, "model: no such file"),
    ("generate x --tokenizer /no/such/folder", 2, "folder"),
    ("generate x --quantization fp8", 2, "is not quantized; use int8 or int4 to round its weights"),
    ("generate x --quantization int5", 2, "must be None or int8 or int4"),
    ("generate x --kv-cache-dtype fp8", 2, "kv_cache_dtype='fp8' is not supported yet"),
    ("generate x --max-num-seqs 8 --max-num-batched-tokens 4", 2, "(4) must be at least"),
    ("generate x --dtype int3", 2, "dtype must be auto"),
    ("generate x --max-model-len 9M", 2, "max_model_len"),
    ("generate x --override-generation-config {", 2, "not JSON"),
    ("generate x --cudagraph-capture-sizes 1,b", 2, "not a list of integers"),
    ("generate", 2, "the prompt is empty"),
    ("generate --prompt-file /no/such/file", 2, "No such file or directory"),
    ("generate --prompt-file /", 2, "Is a directory"),
    ("generate --prompt-file -", 2, "no prompt in -"),
    ("generate x -o texts.txt", 2, "must end in .jsonl, .npy, .parquet"),
    ("generate x -o texts.npy", 2, "not an array of numbers"),
    ("generate x -o texts.jsonl --stream", 2, "--stream"),
    ("generate x --column text", 2, "needs --prompt-file"),
    ("generate --prompt-file texts.json", 2, "cannot read .json files"),
    ("generate --prompt-file x --input-format json", 2, "--input-format"),
    ("embed x --task token_embed -o vectors.npy", 2, "not an array of numbers"),
    ("embed x --runner pooling -o /no/such/folder/x.npy", 2, "cannot be written"),
    ("score query", 2, "the prompt is empty"),
    ("score query --prompt-file /dev/null", 2, "no prompt in /dev/null"),
    ("chat -q hello -m /no/such/folder", 2, "no such model folder"),
    ("chat -q hello --max-tokens 0", 2, "max_tokens"),
    ("chat /no/such/folder -q hello", 2, "no such model folder"),
    ("chat folder -m folder -q hello", 2, "give only one of them"),
    ("chat -q hello -m one --model two", 2, "--model is given more than once"),
    ("serve --model one --model b=two", 2, "needs a name among several models"),
    ("chat one two", 2, "two"),
    ("chat a --url http://host --model-name b -q hello", 2, "give only one of them"),
    ("chat -q hello --url ftp://host", 2, "must be http://"),
    ("chat -q hello --url http://host:port", 2, "url"),
    ("chat -q hello --url nonsense", 2, "must be http://"),
    (
        "chat -q hello --url http://host -m folder",
        2,
        "cannot be combined with options of a local engine",
    ),
    ("chat -q hello --model-name x", 2, "needs --url"),
    ("complete -q hello --url http://host --api-key ключ", 2, "api_key"),
    ("complete -q hello --max-tokens many", 2, "--max-tokens"),
    ("complete -m folder", 2, "-m"),
    ("run-batch", 2, "--input-file"),
    ("run-batch -i /no/such/file -o -", 2, "cannot be read: No such file or directory"),
    ("run-batch -i / -o -", 2, "cannot be read: Is a directory"),
    ("run-batch -i /dev/null -o /no/such/folder/x", 2, "cannot be written"),
    ("run-batch -i /dev/null -o /", 2, "cannot be written"),
    ("run-batch -i /dev/null -o - --max-inflight 0", 2, "--max-inflight"),
    ("run-batch -i /dev/null -o - -m /no/such/folder", 2, "no such model folder"),
    ("collect-env surplus", 2, "surplus"),
    ("generate ../typo.gguf", 2, "trouper generate -m ../typo.gguf"),
    ("generate trouper/demo", 2, "trouper generate -m trouper/demo"),
    ("embed typo.gguf", 2, "trouper embed -m typo.gguf"),
    ("score typo.gguf x", 2, "trouper score -m typo.gguf"),
    ("complete typo.gguf", 2, "trouper generate -m typo.gguf"),
    ("complete hello", 2, 'trouper complete -q "hello"'),
    ("chat folder hello there", 2, 'trouper chat MODEL -q "hello there"'),
    ("--model folder", 2, "trouper chat --model folder"),
    ("-m folder serve", 2, "trouper serve -m folder"),
    ("-ngl 99", 2, "-ngl is an option of llama.cpp"),
    ("typo.gguf", 2, "trouper chat -m typo.gguf"),
    ("chat hf.co/org/name:Q4_K_M -q hello", 2, "ORG/NAME:QUANT"),
    ("embed hello", 2, "generates text; use trouper generate"),
    ("score hello world", 2, "generates text; use trouper generate"),
    (
        "generate x --runner pooling",
        2,
        "makes embeddings and does not generate text; use trouper embed",
    ),
    (
        "chat -q hello --runner pooling",
        2,
        "makes embeddings and does not generate text; use trouper embed",
    ),
    ("generate x --json-schema {", 2, "not valid JSON"),
]


@pytest.mark.parametrize(("line", "code", "message"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_mistake_is_one_line_and_exit_code(capsys, line, code, message):
    assert run_line(line.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trouper: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_adapter_changes_the_text(capsys, tmp_path):
    folder = write_adapter(tmp_path / "adapter", random_tensors(seed=3))
    line = ["generate", "def f(", *GREEDY, "--max-tokens", "8", "--no-echo"]
    texts = []
    for more in ([], ["--lora", folder]):
        assert run_line([*line, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    assert run_line([*line, "--lora", f"{folder}/nowhere"]) == 2
    assert "lora_path" in capsys.readouterr().err


def test_a_conversation_has_an_adapter(capsys, tmp_path):
    folder = write_adapter(tmp_path / "adapter", random_tensors(seed=3))
    line = ["chat", "-q", "hi", *GREEDY, "--max-tokens", "8"]
    texts = []
    for more in ([], ["--lora", folder]):
        assert run_line([*line, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]
    assert run_line([*line, "--url", "http://127.0.0.1:9", "--lora", folder]) == 2
    assert "--model-name" in capsys.readouterr().err


def test_an_empty_prompt_is_a_mistake(capsys):
    assert run_line(["generate", "x", ""]) == 2
    assert capsys.readouterr().err == "trouper: the prompt is empty\n"


def test_no_prompt_on_a_terminal_is_a_mistake(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert run_line(["generate"]) == 2
    assert "PROMPT: missing: give one" in capsys.readouterr().err


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(GENERATE_RESOLVE, lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_line(["generate", "x", "--debug"])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ZeroDivisionError("a\nb"), 1, f"ZeroDivisionError: a\nb{output.HINT}"),
        (ValueError("a defect"), 1, f"ValueError: a defect{output.HINT}"),
        (TrouperValidationError("first", parameter="n"), 2, "n: first"),
        (
            TrouperValidationError("n: must be 1", parameter="n", value=2),
            2,
            "n: must be 1 (given: 2)",
        ),
        (TrouperValidationError("no file x", parameter="file", value="x"), 2, "no file x"),
        (
            TrouperValidationError("model: empty", parameter="model", value=""),
            2,
            "model: empty (given: '')",
        ),
        (UnsupportedFeatureError("not yet"), 2, "not yet"),
        (ExceptionGroup("two", [TrouperValidationError("first"), KeyError("second")]), 2, "first"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BaseExceptionGroup("two", [KeyError("x"), KeyboardInterrupt()]), 130, "interrupted"),
        (output.Interrupted(signal.SIGTERM), 143, "terminated"),
    ],
)
def test_every_exception_has_its_exit_code(error, code, message):
    assert output.explain(error) == (code, message)


def test_an_unexpected_cause_is_told():
    error = RuntimeError("the device is gone")
    error.__cause__ = OSError("cable")
    line = "RuntimeError: the device is gone (caused by OSError: cable)"
    assert output.explain(error)[1] == line + output.HINT


@pytest.fixture(autouse=True)
def untold_sampling(monkeypatch):
    """Keep the line about sampling out of stderr, so that tests see only the other lines."""
    tell = output.tell_sampling
    monkeypatch.setattr(output, "tell_sampling", lambda *_: None)
    return tell


def test_the_sampling_in_use_is_printed_once(capsys, monkeypatch, untold_sampling):
    monkeypatch.setattr(output, "tell_sampling", untold_sampling)
    assert run_line(["generate", "def", "--max-tokens", "1", "--temperature", "0"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "sampling: " in line]
    text = "greedy (temperature 0), repetition_penalty 1.2 (defaults: generation_config.json)"
    assert told == [f"sampling: {text}"]


def test_one_prompt_is_echoed_and_streamed(capsys):
    assert run_line(["generate", "def f(", "--max-tokens", "3", *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("def f(")
    assert out.endswith("\n")
    assert err == ""
    assert (
        run_line(["generate", "def f(", "--max-tokens", "3", *GREEDY, "--no-stream", "--no-echo"])
        == 0
    )
    assert f"def f({capsys.readouterr().out}" == out


def test_json_has_one_line_per_prompt(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("two\n\nthree\n")
    arguments = ["one", "--prompt-file", str(file), "--json", "--n", "2", "--max-tokens", "4"]
    assert run_line(["generate", *arguments, "--ignore-eos", "--stats"]) == 0
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in records] == ["one", "two", "three"]
    for record in records:
        assert record["num_tokens"] == 8
        assert record["num_prompt_tokens"] >= 1
        assert 0 < record["first_token_s"] <= record["total_s"]
        for completion in record["outputs"]:
            assert len(completion["token_ids"]) == 4
            assert (completion["finish_reason"], completion["stop_reason"]) == ("length", None)
    assert re.fullmatch(r"24 tokens from \d+ in .* tok/s\); first text after .*\n", err)


def test_stdin_is_one_prompt(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a = 1\nb = 2\n"))
    assert run_line(["generate", "--max-tokens", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "a = 1\nb = 2"


def test_prompts_from_stdin_are_lines(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a = 1\nb = 2\n"))
    assert run_line(["generate", "--prompt-file", "-", "--max-tokens", "1"]) == 0
    first, second = capsys.readouterr().out.split("\n\nb = 2")
    assert first.startswith("a = 1")
    assert second.endswith("\n")


def test_too_long_prompt_ends_no_other(capsys):
    texts = ["x", "y " * 100, "z"]
    limits = ["--max-model-len", "16", "--max-tokens", "1", "--json"]
    assert run_line(["generate", *texts, *limits]) == 2
    out, err = capsys.readouterr()
    first, count = err.splitlines()
    assert first.startswith("trouper: prompt 2: ")
    assert "16" in first
    assert count == "trouper: 1 of 3 prompts failed"
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in records] == texts
    assert ["error" in record for record in records] == [False, True, False]


CSV = 'id,text\n1,"one\ntwo"\n2,"bad"x\n3,\n4,{long}\n5,last\n'
POOLING = ["--runner", "pooling", "--max-model-len", "64"]


@pytest.fixture
def texts(tmp_path):
    """Write a file of five texts; the second, third and fourth are unusable."""
    path = tmp_path / "texts.csv"
    path.write_text(CSV.format(long="long " * 200))
    return path


@pytest.mark.parametrize(
    ("command", "arguments", "names"),
    [
        ("embed", POOLING, ("text", "embed")),
        ("score", ["query", *POOLING], ("document", "score")),
        (
            "generate",
            ["--json", "--max-tokens", "2", "--max-model-len", "64"],
            ("prompt", "outputs"),
        ),
    ],
)
def test_each_text_of_file_has_result_or_error(capsys, texts, command, arguments, names):
    assert run_line([command, *arguments, "--prompt-file", str(texts)]) == 2
    out, err = capsys.readouterr()
    text, result = names
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["line"] for record in records] == [2, 4, 5, 6, 7]
    assert [result in record for record in records] == [True, False, False, False, True]
    assert [record[text] for record in records[::4]] == ["one\ntwo", "last"]
    told = [line.removeprefix("trouper: ") for line in err.splitlines()]
    starts = ["line 4: not valid CSV", "line 5: the prompt is empty", "line 6: ", ""]
    assert all(map(str.startswith, told, starts))
    assert "64" in told[2]
    assert "/s)" in told[3]
    assert told[4].startswith("3 of 5 ")
    assert [record["error"] for record in records[1:4]] == [line[8:] for line in told[:3]]


def test_results_go_to_a_file(capsys, tmp_path, texts):
    sink = tmp_path / "vectors.npy"
    assert run_line(["embed", *POOLING, "--prompt-file", str(texts), "-o", str(sink)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "3 of 5 texts failed" in err
    assert np.isnan(np.load(sink)).all(axis=1).tolist() == [False, True, True, True, False]


def test_text_too_long_names_option_that_cuts_it(capsys):
    assert run_line(["embed", "y " * 100, *POOLING]) == 2
    assert "--truncate-prompt-tokens -1" in capsys.readouterr().err


def test_path_or_hub_name_as_text_is_warning(capsys):
    texts = ["README.md", "org/name"]
    assert run_line(["generate", *texts, "--max-tokens", "1"]) == 0
    err = capsys.readouterr().err
    assert all(f"trouper generate -m {text}" in err for text in texts)
    assert run_line(["generate", "plain text", "1/2 cup", "--max-tokens", "1"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["jsonl", "npy", "parquet"])
def test_a_run_without_results_leaves_no_file(capsys, tmp_path, suffix):
    sink = tmp_path / f"x.{suffix}"
    line = ["embed", "x", *POOLING, "--dimensions", "7", "-o", str(sink)]
    assert run_line(line) == 2
    assert ".part" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_error_about_an_option_ends_the_run(capsys, tmp_path, texts):
    sink = tmp_path / "vectors.jsonl"
    line = ["embed", *POOLING, "--prompt-file", str(texts), "-o", str(sink), "--dimensions", "7"]
    assert run_line(line) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "dimensions" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [texts.name]


def test_chat_keeps_the_conversation(capsys, monkeypatch, tmp_path):
    saved = tmp_path / "talk.json"
    lines = f"hi\n\n/nonsense\nagain\n/save {saved}\n/reset\n/usr/bin/x \\\nfails\n/save {saved}2\n/exit\nno\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    arguments = ["--system-prompt", "Be brief.", "--max-tokens", "3", "--ignore-eos"]
    assert run_line(["chat", *arguments, "--min-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    first, second = (
        json.loads((tmp_path / name).read_text())["messages"]
        for name in ("talk.json", "talk.json2")
    )
    turn = ["user", "assistant"]
    assert [message["role"] for message in first] == ["system", *turn, *turn]
    assert [message["role"] for message in second] == ["system", *turn]
    assert second[1]["content"] == "/usr/bin/x \nfails"
    assert out.endswith("\n")
    told = err.splitlines()
    assert told[0] == told[2] == CUT
    assert told[1].startswith("no such command: /nonsense")


def test_quick_chat_answers_once(capsys):
    assert run_line(["chat", "-q", "hi", "--max-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert err == f"{CUT}\n"


def test_full_conversation_is_reported_and_continues(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'long ' * 200}\n/reset\n"))
    assert run_line(["chat", "--max-tokens", "2", "--max-model-len", "64"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("trouper: ")
    assert "--max-model-len" in err


def test_oldest_turns_give_way_and_system_message_stays(capsys, monkeypatch, tmp_path):
    saved = tmp_path / "talk.json"
    lines = [f"number {number} of these questions" for number in range(6)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, f"/save {saved}"])))
    arguments = ["--system-prompt", "Be brief.", "--max-tokens", "3", "--ignore-eos"]
    assert run_line(["chat", *arguments, "--max-model-len", "96"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "is full" in line]
    assert all("/reset" in line and "--max-model-len" in line for line in told)
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[-2]["content"] == lines[-1]
    assert (len(messages) - 1) // 2 < len(lines)
    assert told


@pytest.mark.parametrize(
    ("quick", "piped", "message"),
    [
        ("summarise:", "a\nb\n", "summarise:\n\na\nb"),
        ("-", "a\nb\n", "a\nb"),
        ("hi", "", "hi"),
        ("hi", "\n", "hi"),
        ("", "a", "a"),
    ],
)
def test_stdin_joins_a_quick_message(monkeypatch, quick, piped, message):
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    assert quick_message(quick) == message


def test_a_wait_for_stdin_is_explained(monkeypatch):
    reading, writing = os.pipe()
    told = []

    def tell(text):
        told.append(text)
        os.write(writing, b"late")
        os.close(writing)

    monkeypatch.setattr(terminal, "SLOW_S", 0)
    monkeypatch.setattr(terminal.output, "note", tell)
    with open(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert quick_message("hi") == "hi\n\nlate"
    assert "/dev/null" in told[0]


def test_an_empty_quick_message_is_a_mistake(capsys):
    for command in ("chat", "complete"):
        for quick in ("-", " "):
            assert run_line([command, "-q", quick]) == 2
            assert "the message is empty" in capsys.readouterr().err


def test_stdin_that_is_no_text_is_a_mistake(capsys, monkeypatch):
    for arguments in (["-q", "-"], ["-q", "x"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), "utf-8"))
        assert run_line(["chat", *arguments]) == 2
        assert "stdin is not text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_the_command_in_order(number, code):
    arguments = ["generate", "def f(", "--max-tokens", "2000", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-m", "trouper", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(8).startswith(b"def f(")
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == code
    assert err.endswith(b"trouper: interrupted\n" if code == 130 else b"trouper: terminated\n")


IN_THE_IMPORTS = """
import sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "trouper.frontends.cli.output":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from trouper.__main__ import start
start()
"""


def test_early_signal_prints_one_line():
    ended = subprocess.run([sys.executable, "-c", IN_THE_IMPORTS], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"trouper: interrupted\n")


FROZEN = """
import sys
from trouper.__main__ import start

class Freeze:
    def find_spec(self, name, path, target=None):
        if name == "trouper.frontends.cli.output":
            import gc, triton
            gc.freeze()

sys.meta_path.insert(0, Freeze())
sys.argv = ["trouper", "generate", "--no-such-option"]
start()
"""


@pytest.mark.slow
def test_objects_of_triton_are_not_listed_as_leaks():
    pytest.importorskip("triton")
    ended = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.decode().splitlines()
    assert line.startswith("trouper: ")


PRINTING = """
import atexit, gc, sys, types
from trouper.__main__ import start

if {has_own}:
    atexit.register(print, "own")
main = types.ModuleType("trouper.frontends.cli.main")

def run():
    atexit.register(print, "bye")
    sys.exit(3)

main.main = run
gc.freeze()
sys.modules |= {{"triton": types.ModuleType("triton"), main.__name__: main}}
start()
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_own", [False, True])
def test_exit_functions_print_before_the_end_at_once(has_own):
    environment = {key: os.environ[key] for key in os.environ if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PRINTING.format(has_own=has_own)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False, env=environment)
    assert (ended.returncode, ended.stdout) == (3, b"bye\n" + b"own\n" * has_own)


def test_nobody_reading_on_is_no_error():
    arguments = ["generate", "def f(", "--max-tokens", "500", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-m", "trouper", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.read(8)
        process.stdout.close()
        (line,) = process.stderr.read().splitlines()
        assert line.startswith(b"sampling: ")
    assert process.returncode == output.EXIT_BROKEN_PIPE


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (("--regex", "[0-9]{4}"), "[0-9]{4}"),
        (("--choice", "red", "--choice", "blue"), "red|blue"),
        (("--json-schema", "SCHEMA"), "true|false"),
        (("--json-schema", ' {"type": "boolean"}'), "true|false"),
    ],
)
def test_generate_makes_texts_that_match(capsys, tmp_path, options, pattern):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "boolean"}')
    given = [str(schema) if option == "SCHEMA" else option for option in options]
    assert run_line(["generate", "x", "--json", *given]) == 0
    texts = [c["text"] for c in json.loads(capsys.readouterr().out)["outputs"]]
    assert all(re.fullmatch(pattern, text) for text in texts)


@pytest.mark.parametrize(("options", "is_noted"), [(("--regex", "[0-9]{9}"), True), ((), False)])
def test_a_structure_that_is_cut_is_noted(capsys, options, is_noted):
    assert run_line(["generate", "x", "--max-tokens", "2", *options]) == 0
    assert ("[cut at 2 tokens" in capsys.readouterr().err) == is_noted


def test_schema_that_cannot_be_read_is_wrong_option(capsys):
    assert run_line(["generate", "x", "--json-schema", "/nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
