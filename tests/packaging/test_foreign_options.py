"""Options of vLLM, llama.cpp and Ollama are accepted if they change nothing; otherwise an error names what to use."""

import json
import re
from pathlib import Path

import msgspec
import pytest
import typer.main

from trouper import EngineArgs
from trouper.bench.cli.app import bench
from trouper.config.args import EQUIVALENT, NOT_IMPLEMENTED
from trouper.errors import UnsupportedFeatureError
from trouper.frontends.cli import output, serve
from trouper.frontends.cli.main import app, run_line
from trouper.frontends.cli.other_programs import (
    COMMANDS,
    FOR_ENGINE,
    OTHERS,
    SWITCHES,
    VLLM_SERVER,
    VLLM_SHORT,
    settle,
)

# Every option of vLLM 0.32's `serve`, with its default; null where that is none or no plain value.
VLLM = json.loads((Path(__file__).parent / "vllm_serve_options.json").read_text())
GROUP = typer.main.get_command(app)
BENCH = typer.main.get_command(bench).commands.values()
OWN = {
    name
    for command in [*GROUP.commands.values(), *BENCH]
    for p in command.params
    for name in (*p.opts, *p.secondary_opts)
}


@pytest.fixture
def served(monkeypatch):
    """Return the resolved options of `serve`."""
    seen = []
    monkeypatch.setattr(serve, "_run", lambda *options: seen.extend(options))
    monkeypatch.setattr(serve, "resolve", lambda args, **_: args)
    return seen


def words_at_default(name, default):
    """Return the arguments that set an option to its default, or only its name if it has no plain default."""
    match default:
        case ["switch", is_on]:
            return [name if is_on or not name.startswith("--") else f"--no-{name[2:]}"]
        case None:
            return [f"{name}=None"]
        case str() as text:
            return [name, text]
        case value:
            return [name, json.dumps(value)]


def refusal(words):
    """Return the reason why `serve` refuses these arguments, or None if it accepts them."""
    try:
        with GROUP.commands["serve"].make_context("serve", list(words), obj={}) as ctx:
            EngineArgs(**ctx.meta[FOR_ENGINE])
    except Exception as error:
        return output.explain(error)[1]


def test_every_vllm_option_is_accepted_at_default():
    refused = {name: refusal(words_at_default(name, VLLM[name])) for name in VLLM}
    assert [name for name, text in refused.items() if text and "no such option" in text] == []
    # An option without a plain default cannot be given it; a switch's short name turns it on.
    found = {
        n for n, text in refused.items() if text and VLLM[n] is not None and n.startswith("--")
    }
    assert found == set()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("serve --kv-cache-dtype auto --cpu-offload-gb 0 --no-enable-log-requests", {}),
        ("serve --max_model_len 512 --served_model_name=x", {"max_model_len": "512", "served_model_name": ["x"]}),
        ("serve -q int8 -n 1 -r 0", {"quantization": "int8", "nnodes": 1, "node_rank": 0}),
        ("serve --device-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("serve --enable-prompt-tokens-details --no-enable-prompt-tokens-details", {"enable_prompt_tokens_details": False}),
        ("serve --no-enable-prompt-tokens-details --enable-prompt-tokens-details", {"enable_prompt_tokens_details": True}),
        ("serve --disable-fastapi-docs --no-enable-log-deltas --max-log-len 9 --disable-log-requests", {}),
        ("serve x --served-model-name a b --max-model-len 9", {"model": "x", "served_model_name": ["a", "b"]}),
        ("serve --served-model-name a x", {"model": "x", "served_model_name": ["a"]}),
        ("serve -m x --served_model_name a b -n 1", {"model": "x", "served_model_name": ["a", "b"]}),
        ("serve x --cudagraph-capture-sizes 1 2 4", {"cudagraph_capture_sizes": [1, 2, 4]}),
        ("serve x --api-key a b --port 1", {"api_keys": ("a", "b")}),
        ("serve x y", None),
        ("serve x --port 1 y", None),
        ("serve --stop-me-not", None),
        ("serve --max-model 512 --served-model x", {"max_model_len": "512", "served_model_name": ["x"]}),
        ("serve --enable-server-load --max-num-batched=64", {"max_num_batched_tokens": 64}),
        ("serve --lora-modul a=b", {"enable_lora": True}),
        ("serve --max-num 3", None),
    ],
)  # fmt: skip
def test_vllm_command_lines_are_read_like_vllm(served, line, wanted):
    code = run_line(line.split())
    if wanted is None:
        assert code == 2
        return
    assert code == 0
    found = {**msgspec.structs.asdict(served[0]), **vars(served[1])}
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("words", ["--attention-backend FLASH_ATTN", "-O3", "--compilation-config.mode 3", "--moe-backend=triton", "--enable-flashinfer-autotune", "--show-hidden-metrics-for-version 0.1"])  # fmt: skip
def test_choice_among_equals_is_one_line_of_log(served, caplog, words):
    assert run_line(["serve", *words.split()]) == 0
    (record,) = caplog.records
    assert "has no effect" in record.getMessage()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--swap-space 4", "--swap-space has no effect here"),
        ("--disable-log-requests", "--disable-log-requests has no effect here"),
        ("--max-num-seq 4", "--max-num-seq is read as --max-num-seqs"),
    ],
)
def test_ineffective_and_abbreviated_options_are_logged_once(served, caplog, words, line):
    assert run_line(["serve", *words.split()]) == 0
    assert [record.getMessage() for record in caplog.records] == [line]


def test_it_is_so_in_python_too(caplog):
    EngineArgs(attention_backend="FLASHINFER", compilation_config={"mode": 3})
    assert len(caplog.records) == 2
    assert NOT_IMPLEMENTED.keys() >= EQUIVALENT


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --kv-cache-dtype fp8", "kv_cache_dtype='fp8' is not supported yet; leave it at 'auto'"),
        ("generate x --enable-expert-parallel", "enable_expert_parallel=True is not supported yet"),
        ("serve -dcp 2", "decode_context_parallel_size=2 is not supported yet"),
        ("serve --api-server-count 4", "--api-server-count 4 is not supported: one process serves"),
        ("serve --middleware my.module", "create_app"),
        ("serve --kv-cache-dtype", "needs a value"),
        ("serve m.gguf --n-gpu-layers 99", "--n-gpu-layers is an option of llama.cpp: "),
        ("serve m.gguf -ngl 99", "-ngl is an option of llama.cpp: "),
        ("serve -mg 0", "-mg is an option of llama.cpp: "),
        ("serve -hf ggml-org/gemma-3-1b-it-GGUF", "ORG/NAME:Q4_K_M"),
        ("chat -c 4096", "-c is an option of llama.cpp: use --max-model-len"),
        ("generate -p hello", "argument of `trouper generate`"),
        ("generate x --temp 0.7", "--temp is an option of llama.cpp: use --temperature"),
        ("chat --keepalive 5m", "--keepalive is an option of Ollama"),
        ("run llama3.2", "run is a command of Ollama: use `trouper chat MODEL`"),
        ("stop llama3.2", "stop is a command of Ollama: use `trouper unload NAME`"),
        ("generate x --frobnicate", "no such option: --frobnicate"),
        ("generate x --temprature 1", "no such option: --temprature; did you mean --temperature?"),
    ],
)  # fmt: skip
def test_impossible_option_names_what_to_use(served, capsys, line, message):
    assert run_line(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_distant_names_are_not_suggested(capsys):
    assert run_line(["serve", "--gpu-slices", "3"]) == 2
    assert capsys.readouterr().err == "trouper: no such option: --gpu-slices\n"


def test_values_and_words_after_dashes_are_kept(monkeypatch, capsys):
    assert run_line(["generate", "--max-tokens", "2", "--stop", "-ngl", "--", "-ngl"]) == 0
    assert capsys.readouterr().out.startswith("-ngl")


def test_word_may_be_name_of_argument():
    assert settle(GROUP.commands["score"].params, ["query", "a"]) == (["query", "a"], {})


def test_tables_name_options_that_and_shadow_none():
    for name, (_, hint) in {**OTHERS, **VLLM_SERVER}.items():
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", hint):
            assert option in OWN, f"{name}: {option}"
    assert not VLLM_SERVER.keys() & NOT_IMPLEMENTED.keys()
    assert VLLM_SERVER.keys() | NOT_IMPLEMENTED.keys() >= SWITCHES
    assert not COMMANDS.keys() & GROUP.commands.keys()
    serve_options = {o for p in GROUP.commands["serve"].params for o in p.opts}
    known = serve_options | {f"--{n.replace('_', '-')}" for n in (*NOT_IMPLEMENTED, *VLLM_SERVER)}
    assert {f"--{n.replace('_', '-')}" for n in VLLM_SHORT.values()} <= known


YAML = """
# as vLLM reads it
model: folder
port: 9000
api-key: [a, b]
max_model_len: 8k
max-num-seqs: 3
enable-prefix-caching: false
tokenizer:
kv-cache-dtype: auto
attention-backend: FLASH_ATTN
disable-log-requests: true
default-chat-template-kwargs:
  enable_thinking: false
"""


@pytest.mark.parametrize("name", ["vllm.yaml", "vllm.yml"])
def test_a_file_may_be_yaml(served, tmp_path, name):
    (tmp_path / name).write_text(YAML)
    assert run_line(["serve", "--config", str(tmp_path / name), "--port", "1"]) == 0
    options, args = served[:2]
    assert (options.port, options.api_keys) == (1, ("a", "b"))
    assert options.default_chat_template_kwargs == {"enable_thinking": False}
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("folder", "8k", 3)
    assert (args.enable_prefix_caching, args.tokenizer) == (False, None)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "port: [1", "line 1"),
        ("a.yaml", "just words", "must have lines such as `max-num-seqs: 8`"),
        ("a.yaml", "- port", "must have lines such as"),
        ("a.yaml", "1: 2", "must have lines such as"),
        ("a.yaml", "prot: 1", "has unknown options: prot"),
        ("a.yaml", "kv-cache-dtype: fp8", "kv_cache_dtype='fp8' is not supported yet"),
        ("a.yaml", "api-server-count: 4", "is not supported: one process serves"),
        (
            "a.yaml",
            "x: !!python/object/apply:os.system ['true']",
            "could not determine a constructor",
        ),
        ("a.toml", "port: 1", "files are read as TOML, or as YAML if the name ends in .yaml"),
        ("a.yaml", None, "No such file"),
    ],
)
def test_file_that_cannot_be_read_is_one_line(served, capsys, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert run_line(["serve", "--config", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_command_line_overrides_file_for_vllm_options(served, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("kv-cache-dtype: fp8\n")
    line = ["serve", "--config", str(tmp_path / "a.yaml"), "--kv-cache-dtype", "auto"]
    assert (run_line(line), capsys.readouterr().err) == (0, "")


def test_an_empty_file_changes_nothing(served, tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert run_line(["serve", "--config", str(tmp_path / "a.yaml")]) == 0


def test_value_of_vllms_feature_is_refused_in_python():
    with pytest.raises(UnsupportedFeatureError, match="kv_cache_dtype"):
        EngineArgs(kv_cache_dtype="fp8")
