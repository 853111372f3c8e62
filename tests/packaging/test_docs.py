"""The pages agree with the code."""

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import anyio
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "docs" / "examples"
ENGINE = (ROOT / "actors" / "engine" / "wiring.py").read_text()


def code_blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("name", ["embed.py", "offline.py"])
def test_the_readme_shows_the_examples_as_they_are(name):
    assert (EXAMPLES / name).read_text() in code_blocks(README, "python")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_embedding_example_runs(capsys, backend):
    main = runpy.run_path(str(EXAMPLES / "embed.py"))["main"]
    anyio.run(main, backend=backend)
    lines = capsys.readouterr().out
    assert lines.strip()


def test_the_offline_example_runs(capsys):
    prompts = runpy.run_path(str(EXAMPLES / "offline.py"), run_name="__main__")["prompts"]
    out = capsys.readouterr().out
    positions = [out.index(prompt) for prompt in prompts]
    assert positions == sorted(positions)


@pytest.mark.parametrize("name", ["images.py", "image_embeddings.py", "pages.py"])
def test_page_of_images_shows_the_example(name):
    page = (ROOT / "docs" / "images.md").read_text()
    assert (EXAMPLES / name).read_text() in code_blocks(page, "python")


@pytest.mark.slow
def test_example_of_images_runs(tmp_path):
    make = runpy.run_path(str(EXAMPLES / "tiny_vision_model.py"))["make"]
    make(tmp_path)
    line = [sys.executable, str(EXAMPLES / "images.py"), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "55 tokens with the image" in done.stdout
    line = [sys.executable, str(EXAMPLES / "image_embeddings.py"), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("64 numbers\nsimilarity ")
    image = tmp_path / "red.png"
    Image.new("RGB", (64, 48), "red").save(image)
    line = [sys.executable, "-m", "trouper", "chat", str(tmp_path), "--image", str(image)]
    done = subprocess.run(
        [*line, "-q", "Which colour is this?", "--max-tokens", "4", "--stats"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "55 prompt tokens, 4 tokens" in done.stderr


@pytest.mark.slow
def test_example_of_audio_runs(tmp_path):
    make = runpy.run_path(str(EXAMPLES / "tiny_audio_model.py"))["make"]
    make(tmp_path)
    command = re.search(r'^python -c "(.*)"$', (ROOT / "docs/audio.md").read_text(), re.MULTILINE)
    subprocess.run([sys.executable, "-c", command[1]], cwd=tmp_path, check=True)
    line = [sys.executable, "-m", "trouper", "chat", str(tmp_path), "--audio", "tone.wav"]
    done = subprocess.run(
        [*line, "-q", "What do you hear?", "--max-tokens", "4", "--stats"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "50 prompt tokens, 4 tokens" in done.stderr


def test_readme_installs_and_answers_in_two_lines():
    first = code_blocks(README, "sh")[0].splitlines()
    assert first[0].endswith(".venv/bin/pip install -q '.[server]'")
    assert first[1].startswith(".venv/bin/trouper generate ")
    beside = README[README.index("```\n") : README.index("## ")]
    for words in (
        "2.8 GB",
        "Without an NVIDIA GPU",
        "--extra-index-url https://download.pytorch.org/whl/cpu",
    ):
        assert words in beside


# The file and the workload of each row of the README's table, and what is shown of it; its columns are trouper, llama.cpp and vLLM.
FIGURES = {
    "ready to generate, s": ("cpu-offline", None, "ready_s"),
    "1 × (32 in, 64 out), output tokens/s": ("cpu-offline", (1, 32, 64), "output_tok_s"),
    "1 × (1024 in), prompt tokens/s": ("cpu-offline", (1, 1024, 1), "prompt_tok_s"),
    "16 × (128 in, 64 out), output tokens/s": ("cpu-offline", (16, 128, 64), "output_tok_s"),
    "16 × (1024 in, 32 out), all tokens/s": ("cpu-long-prompts", (16, 1024, 32), "total_tok_s"),
    "64 × (128 in, 128 out), output tokens/s": ("cpu-many-rows", (64, 128, 128), "output_tok_s"),
    "int4, 1 × (32 in, 64 out), another day; llama.cpp with q4_0": (
        "cpu-int4", (1, 32, 64), "output_tok_s"
    ),
    "int4, 16 × (128 in, 64 out), another day; llama.cpp with q4_0": (
        "cpu-int4", (16, 128, 64), "output_tok_s"
    ),
    "SmolLM2-135M as GGUF (Q4_1), 1 × (32 in, 64 out), another day": (
        "cpu-gguf", (1, 32, 64), "output_tok_s"
    ),
}  # fmt: skip


def measured(file, workload, shown):
    """Return an unrounded figure of each engine in a file of results."""
    report = json.loads((ROOT / "bench" / "results" / f"{file}.json").read_text())
    if workload is None:
        return report[shown]
    found = {}
    for row in report["results"]:
        num, prompt, output = size = row["requests"], row["input_len"], row["output_len"]
        if size == workload:
            tokens = {
                "output_tok_s": output,
                "prompt_tok_s": prompt,
                "total_tok_s": prompt + output,
            }
            found[row["engine"]] = num * tokens[shown] / row["median_s"]
    return found


def test_figures_of_readme_are_those_measured():
    table = README[README.index("## How fast") : README.index("## What it does")]
    lines = re.findall(r"^\|(.*)\|$", table, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert {row[0] for row in rows[2:]} == set(FIGURES)
    for name, *shown in rows[2:]:
        figures = measured(*FIGURES[name])
        for engine, text in zip(("trouper", "llama.cpp", "vllm"), shown, strict=True):
            assert bool(text) == (engine in figures), (name, engine)
            if text:
                assert f"{figures[engine]:.{1 if '.' in text else 0}f}" == text, (name, engine)


def test_readme_runs_tests_after_one_command():
    (command,) = (block.strip() for block in code_blocks(README, "sh") if "pytest" in block)
    assert command.startswith("scripts/dev && .venv/bin/pytest ")
    tests = command.split("pytest", 1)[1].replace("-q ", "")
    assert f".venv/bin/pytest{tests} " in (ROOT / "scripts" / "test").read_text()
    assert "--editable '.[dev]'" in (ROOT / "scripts" / "dev").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    folders = "actors|bench|docs|frontends|kernels|scripts|tests|trouper"
    for path in re.findall(rf"`((?:{folders})/[\w./]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_modules_on_pages_exist():
    folders = ("actors", "bench", "docs", "frontends", "kernels", "scripts", "tests", "trouper")
    modules = {
        f"/{path.relative_to(ROOT).as_posix()}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    }
    # A page may leave out folders that its sentence has already named.
    named = {
        f"{page.name}: {name}": any(module.endswith(f"/{name}") for module in modules)
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for name in re.findall(r"`([\w./-]+\.py)`", page.read_text())
    }
    assert len(named) > 100
    assert [name for name, exists in named.items() if not exists] == []


def test_files_in_commands_of_contributors_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    folders = "actors|bench|docs|frontends|kernels|scripts|tests|trouper"
    paths = re.findall(rf"(?<![\w./-])((?:{folders})/[\w/.-]*\w)(?!\S*[<…])", page)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_structure_page_names_every_folder_once():
    page = (ROOT / "docs" / "structure.md").read_text()
    named = re.findall(r"^\* `([\w/]+)/`: .*\w.*\.$", page, re.MULTILINE)
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("actors", "bench", "frontends", "kernels", "trouper")
        # The links in trouper/ are not followed.
        for path in (ROOT / folder).rglob("*.py")
    }
    outside = {"bench/results", "docs", "scripts", "tests", "trouper/demo"}
    assert sorted(named) == sorted(folders | outside)
    assert len(page.split()) < 600


def test_contributors_guide_is_short():
    assert 1200 <= len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 2000


def channels():
    """Yield name, inbox type and capacity of each channel in the wiring."""
    for node in ast.walk(ast.parse(ENGINE)):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=name), ast.Name()])],
                value=ast.Call(
                    func=ast.Subscript(
                        value=ast.Attribute(attr="create_memory_object_stream"), slice=inbox
                    ),
                    args=[capacity],
                ),
            ):
                yield name, ast.unparse(inbox), ast.unparse(capacity)


def test_the_diagram_shows_every_channel_with_its_capacity():
    page = (ROOT / "docs" / "architecture.md").read_text()
    (diagram,) = (block for block in code_blocks(page, "") if "Scheduler" in block)
    rows = re.findall(r"\| `(to_\w+)` \| `(\w+)` \| `([^`]+)` \|", page)
    assert sorted(rows) == sorted(channels())
    assert set(re.findall(r"to_\w+", diagram)) == {name for name, *_ in rows}
    backpressure = (ROOT / "docs" / "backpressure.md").read_text()
    assert re.findall(r"\| `(to_\w+)` \|", backpressure) == [name for name, *_ in rows]


def test_the_diagram_shows_every_actor():
    page = (ROOT / "docs" / "architecture.md").read_text()
    started = {name.capitalize() for name in re.findall(r"tasks\.start\(\s*(\w+)\.run", ENGINE)}
    described = re.findall(r"^\| `([A-Z]\w+)` \| `(actors/\S+)` \|", page, re.MULTILINE)
    assert {name for name, _ in described} == started
    for name, path in described:
        assert re.search(rf"^class {name}\b", (ROOT / path).read_text(), re.MULTILINE)
        assert name in page[: page.index("| channel |")]


def test_results_are_page_and_not_book():
    assert len((ROOT / "docs" / "performance.md").read_text().split()) <= 1200


def sources():
    """Yield every source file and page."""
    for folder in ("actors", "bench", "docs", "frontends", "kernels", "scripts", "tests"):
        yield from (p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".md"})
    yield from (p for p in (ROOT / "trouper").rglob("*.py") if "__pycache__" not in p.parts)
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))


def test_nothing_installs_a_package_without_index():
    by_name = re.compile(r"\bpip3? install\b[^\n]*\btrouper(\[|[\s`'\"]*$)", re.MULTILINE)
    found = [str(p) for p in sources() if p != Path(__file__) and by_name.search(p.read_text())]
    assert found == []


def test_every_extra_that_is_named_exists():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {
        name
        for p in sources()
        for hint, group in re.findall(r"install_hint\(['\"](\w+)|'\.\[([\w,]+)\]'", p.read_text())
        for name in (hint or group).split(",")
    }
    assert named - {"gram"} <= declared.keys()
    assert {"bench", "cuda", "grammar", "server", "tracing", "transformers"} <= named
