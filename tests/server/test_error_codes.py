"""Check that codes and statuses of errors are decided by their classes and fields, never by their sentences."""

import ast
from pathlib import Path

import pytest

from trouper import errors
from trouper.frontends.server.shared.errors import describe
from trouper.outputs import RequestError

ROOT = Path(__file__).parents[2]
SEARCHES = {
    "endswith", "find", "index", "match", "partition", "removeprefix","rpartition",
    "rsplit", "search", "split", "startswith",
}  # fmt: skip
# Files that search the sentences of another library, which gives no code, or that only shape a line to be shown.
FOREIGN = {
    "actors/rendering/token_stream.py",  # tokenizers
    "frontends/cli/output.py",  # a cause is not shown twice
    "frontends/server/apis/ollama/requests.py",  # msgspec's place of a wrong value
    "trouper/config/checkpoint/files.py",  # the same
}


def is_text(node):
    """Return whether an expression is the text of an exception: `str(error)`, `error.message` or `error.args[0]`."""
    match node:
        case ast.Call(func=ast.Name("str"), args=[ast.Name("error" | "raised" | "exc")]):
            return True
        case ast.Attribute(ast.Name("error" | "raised" | "exc"), "message" | "args"):
            return True
        case ast.Subscript(value):
            return is_text(value)
        case ast.Call(func=ast.Attribute(value, "strip" | "lower")):
            return is_text(value)
    return False


def searched(tree):
    """Find the expressions that compare, split or search the text of an exception."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left, _, others) if any(map(is_text, (left, *others))):
                yield node
            case ast.Call(ast.Attribute(value, name), arguments) if name in SEARCHES:
                is_first_line = ast.unparse(node).endswith(("partition('\\n')", "split()"))
                if not is_first_line and any(map(is_text, (value, *arguments))):
                    yield node


def test_no_code_reads_the_text_of_an_error():
    links = {path for path in (ROOT / "trouper").iterdir() if path.is_symlink()}
    found = {}
    for folder in ("actors", "kernels", "frontends", "trouper", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            if not links.intersection(path.parents):
                lines = [ast.unparse(node) for node in searched(ast.parse(path.read_text()))]
                found |= {str(path.relative_to(ROOT)): lines} if lines else {}
    assert {path: lines for path, lines in found.items() if path not in FOREIGN} == {}
    assert found.keys() >= FOREIGN


def test_the_search_finds_what_it_looks_for():
    for text in (
        "'(max_model_len)' in str(error)",
        "str(error).partition(':')",
        "error.args[0].startswith('a')",
        "error.message == 'a'",
        "re.search('a', str(error))",
    ):
        assert list(searched(ast.parse(text))), text


MAKERS = {
    "value": lambda text: errors.TrouperValidationError(text, parameter="n"),
    "context": lambda text: errors.ContextLengthError(text, parameter="prompt"),
    "grammar": lambda text: errors.GrammarError(text, parameter="x", code="invalid_schema"),
    "template": lambda text: errors.TemplateBudgetError(text, parameter="chat_template"),
    "not found": errors.TrouperNotFoundError,
    "feature": lambda text: errors.UnsupportedFeatureError(text, parameter="tools"),
    "paused": lambda text: errors.RetryableRequestError(text, "engine_paused"),
    "draining": lambda text: errors.RetryableRequestError(text, "draining"),
    "restarting": lambda text: errors.RetryableRequestError(text, "device_restarting"),
    "adapters": lambda text: errors.AdaptersInUseError(text, "adapters_in_use"),
    "dead": errors.EngineDeadError,
    **{
        code: lambda text, code=code: RequestError(code, text).to_exception("id")
        for code in (
            "aborted", "device_failed", "execution_error", "grammar_error", "kv_cache_exhausted",
            "no_valid_token", "numerical_error", "poisoned_request", "validation_error",
        )
    },
}  # fmt: skip
TEXTS = ("", "a better sentence", "draining: (max_model_len)", "engine_paused: prompt", "prompt: x")


@pytest.mark.parametrize("name", MAKERS)
def test_a_better_sentence_changes_no_code(name):
    described = [describe(MAKERS[name](text)) for text in TEXTS]
    assert len({(each.status, each.code, each.param) for each in described}) == 1


def test_codes_reach_the_body():
    codes = {name: describe(MAKERS[name]("x")).code for name in MAKERS}
    assert codes["context"] == "context_length_exceeded"
    assert codes["grammar"] == "invalid_schema"
    assert codes["template"] == "template_budget_exceeded"
    assert codes["restarting"] == "device_restarting"
    assert codes["numerical_error"] == "numerical_error"
