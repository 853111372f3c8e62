"""Grammars tried in processes of their own: what would end or hold up the compiler's process is refused."""

import gc
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from trouper import StructuredOutputsParams
from trouper.actors.rendering.confined_process import ConfinedProcess
from trouper.actors.rendering.grammar import trial_processes
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.grammar.trial_processes import (
    BUDGET,
    GrammarTrials,
    TrialBudget,
    TrialTokens,
    UntriedGrammarError,
)
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.model import DEMO_MODEL
from trouper.errors import GenerationError, GrammarError
from trouper.params import SamplingParams

TOKENS = TrialTokens(64, {7: "<mark>"})
LEAST = -(2**63)


def chain(num, link, **schema):
    """A schema whose definitions refer to each other, one after another."""
    links = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(num)}
    return {"$ref": "#/$defs/0", "$defs": links | {str(num): {"type": "null"}}} | schema


def record(inner):
    return {"type": "object", "required": ["a"], "properties": {"a": inner}}


def rules(num, start, is_):
    lines = "".join(f'x{i} {is_} "a" x{i + 1} | "b"\n' for i in range(num))
    return f'{start} {is_} x0\n{lines}x{num} {is_} "a"'


def terminals(num):
    return "start: X0\n" + "".join(f'X{i}: "a" X{i + 1}\n' for i in range(num)) + f'X{num}: "a"'


def tag(schema):
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    )


HOSTILE = {
    "the least integer": {"json": {"const": LEAST}},
    "the least but one": {"json": {"const": LEAST + 1}},
    "the least integer of several": {"json": {"enum": [1, LEAST]}},
    "the least integer in Lark": {"grammar": f'start: %json {{"const": {LEAST}}}'},
    "the least integer in a tag": {"structural_tag": tag({"const": LEAST})},
    "a chain of objects": {"json": chain(1_000, record)},
    "a chain of references": {"json": chain(5_000, lambda ref: ref)},
    "a chain of arrays": {"json": chain(1_000, lambda ref: {"type": "array", "minItems": 1, "items": ref})},
    "a chain of choices": {"json": chain(1_000, lambda ref: {"anyOf": [{"type": "integer"}, ref]})},
    "a chain of all": {"json": chain(1_000, lambda ref: {"allOf": [ref]})},
    "a chain in a tag": {"structural_tag": tag(chain(1_000, record))},
    "a chain of rules": {"grammar": rules(3_000, "start", ":")},
    "a chain of EBNF": {"grammar": rules(1_000, "root", "::=")},
    "a chain of terminals": {"grammar": terminals(8_000)},
}  # fmt: skip


@pytest.fixture(scope="module")
def grammars():
    return Grammars(Tokenizer.load(DEMO_MODEL), 4096, (0, 2))


@pytest.fixture
def trials():
    trials = GrammarTrials(lambda: TOKENS)
    yield trials
    trials.close()


@pytest.fixture
def started(monkeypatch):
    """The processes that have been started."""
    processes = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return processes


def expression(text):
    return StructuredOutputsParams(regex=text)


@pytest.mark.parametrize("name", HOSTILE)
def test_deep_grammar_is_refused_and_next_compiles(grammars, name):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**HOSTILE[name]))
    with pytest.raises(GrammarError, match="too complex") as caught:
        grammars.compile(params)
    assert (caught.value.parameter, caught.value.code) == (
        "structured_outputs", "schema_too_complex",
    )  # fmt: skip
    fine = SamplingParams(structured_outputs=expression(f"{name}|b"))
    assert grammars.compile(fine) is not None


def test_expensive_grammar_is_refused_and_remembered(trials, started):
    for _ in range(3):
        with pytest.raises(GrammarError, match="regex: too complex") as caught:
            trials.passed(expression("a?" * 40_000))
        assert caught.value.code == "schema_too_complex"
    assert trials.passed(expression("ok"))
    assert len(started) == 1


def test_what_takes_more_memory_than_trial_may_is_refused():
    trials = GrammarTrials(lambda: TOKENS, TrialBudget(memory=2**26))
    enough = StructuredOutputsParams(choice=["x"])
    assert trials.passed(enough)
    with pytest.raises(GrammarError, match="too complex"):
        trials.passed(
            StructuredOutputsParams(json={"enum": ["é" * 99 + str(i) for i in range(9**5)]})
        )
    assert trials.passed(enough)
    trials.close()


@pytest.mark.parametrize(
    "kinds",
    [
        {"json": chain(100, record)}, {"json": chain(200, lambda ref: ref)}, {"grammar": rules(150, "start", ":")},
        {"grammar": terminals(300)}, {"json": {"const": LEAST + 1_000}}, {"json": {"const": 2**63}},
    ],
    ids=lambda kinds: str(kinds)[:40],
)  # fmt: skip
def test_what_people_write_passes(grammars, kinds):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**kinds))
    assert grammars.compile(params) is not None


def test_empty_lines_are_looked_through_once(trials):
    with pytest.raises(GrammarError) as caught:
        trials.passed(StructuredOutputsParams(grammar="\n" * 2**18))
    assert caught.value.code == "invalid_grammar"


def test_tokens_are_known_by_name_and_by_number(trials):
    for named in ("<mark>", "<[7]>", "<[5]>"):
        assert trials.passed(StructuredOutputsParams(grammar=f'start: {named} "a"'))
    for unknown in ("<other>", "<[999]>"):
        with pytest.raises(GrammarError, match=r"unknown special token|Token range end"):
            trials.passed(StructuredOutputsParams(grammar=f'start: {unknown} "a"'))


def test_only_what_was_not_tried_must_be_tried_first(trials):
    good, bad = expression("a"), expression("(")
    for wanted in (good, bad):
        with pytest.raises(UntriedGrammarError):
            trials.check_tried(wanted)
    trials.passed(good)
    with pytest.raises(GrammarError):
        trials.passed(bad)
    for wanted in (good, bad):
        trials.check_tried(wanted)


def test_outcomes_asked_for_last_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(trial_processes, "MAX_REMEMBERED_BYTES", 1_500)
    trials = GrammarTrials(lambda: TOKENS)
    for text in ("a", "b", "a", "c"):
        trials.passed(expression(text))
    trials.check_tried(expression("a"))
    with pytest.raises(UntriedGrammarError):
        trials.check_tried(expression("b"))


def test_error_is_raised_as_another_object_each_time(trials):
    caught = []
    for _ in range(2):
        with pytest.raises(GrammarError) as error:
            trials.passed(expression("("))
        caught.append(error.value)
    assert str(caught[0]) == str(caught[1])
    assert caught[0] is not caught[1]


def test_an_idle_process_that_was_killed_is_replaced(trials, started):
    trials.passed(expression("a"))
    os.killpg(started[0].pid, signal.SIGKILL)
    started[0].wait()
    trials.passed(expression("b"))
    assert [process.poll() is None for process in started] == [False, True]


def test_waiting_fork_killed_answers_nothing_not_asked(trials, started):
    trials.passed(expression("a"))
    [process] = started
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:  # the fork that has answered may be there still
        with suppress(OSError, IndexError):
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
    trials.passed(expression("b"))
    assert len(started) == 2


def test_silent_trial_process_is_ended(trials, started, monkeypatch):
    trials.passed(expression("a"))
    with monkeypatch.context() as patch:
        patch.setattr(trial_processes, "WALL_S", 0.0001)
        with pytest.raises(GrammarError, match="too complex"):
            trials.passed(expression("a?" * 20_000))
    assert started[0].returncode == -signal.SIGKILL
    with pytest.raises(UntriedGrammarError):
        trials.check_tried(expression("a?" * 20_000))


def test_the_processes_end_with_their_owner(started):
    trials = GrammarTrials(lambda: TOKENS)
    trials.passed(expression("a"))
    del trials
    gc.collect()
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_process_that_cannot_start_or_fails_is_our_fault(monkeypatch):
    wrong = GrammarTrials(lambda: TrialTokens(1, {999: "beyond"}))
    with pytest.raises(GenerationError, match="IndexError"):
        wrong.passed(expression("a"))
    trials = GrammarTrials(lambda: TOKENS)
    monkeypatch.setattr(trial_processes, "WORKER", "no_such_module")
    with pytest.raises(GenerationError, match="No module named no_such_module"):
        trials.passed(expression("a"))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(GenerationError, match="no process"):
        trials.passed(expression("a"))


@pytest.mark.parametrize(
    ("kinds", "is_taken"),
    [
        ({"regex": "a" * 20_000}, True), ({"regex": "ab" * 40_000}, False),
        ({"json": {"const": "é" * 10_000}}, True), ({"json": {"const": "a" * 90_000}}, False),
        ({"choice": [f"{i:020}" for i in range(1_500)]}, True),
        ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}}, True),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_grammar_may_take_so_much_memory(trials, kinds, is_taken):
    wanted = StructuredOutputsParams(**kinds)
    if is_taken:
        assert 2**10 < trials.passed(wanted).num_bytes < BUDGET.kept
    else:
        with pytest.raises(GrammarError, match=r"takes \d+ MiB, at most 24 may be") as caught:
            trials.passed(wanted)
        assert caught.value.code == "schema_too_complex"


def test_memory_of_trial_is_that_of_its_grammar(trials):
    small, large = (
        trials.passed(StructuredOutputsParams(regex="ab" * n)).num_bytes for n in (500, 10_000)
    )
    assert large > 8 * small


def test_trial_whose_process_is_killed_is_made_again(trials, started, monkeypatch):
    trials.passed(expression("a"))
    ask = ConfinedProcess.ask

    def ask_and_die(process, order, wall_s):
        if len(started) == 1:
            os.killpg(started[0].pid, signal.SIGKILL)
        return ask(process, order, wall_s)

    monkeypatch.setattr(ConfinedProcess, "ask", ask_and_die)
    assert trials.passed(expression("b")).source
    assert len(started) == 2
