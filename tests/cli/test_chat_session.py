"""The decisions of a session at the terminal: messages, commands, the turns that give way, files."""

import io
import json
import re
import stat
from pathlib import Path

import pytest

from trouper.errors import TrouperValidationError
from trouper.frontends.cli.chat.commands import Session
from trouper.frontends.cli.chat.conversation import (
    AnswerEnd,
    AnswerUsage,
    Conversation,
    load,
    next_dropped,
    num_dropped,
)
from trouper.frontends.cli.chat.line_editor import (
    MAX_ENTRIES,
    MessageHistory,
    entries_of,
    history_path,
)
from trouper.frontends.cli.chat.subjects import CHAT_COMMANDS, COMMON_COMMANDS, CUT, ChatSubject
from trouper.frontends.cli.chat.terminal import (
    Command,
    PipeReader,
    Unknown,
    continued,
    help_lines,
    parameter_kinds,
    parse,
    unquoted,
    with_format,
    with_parameter,
    with_values,
)
from trouper.frontends.cli.options import SamplingOptions
from trouper.frontends.cli.running import Interrupts


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("hi", None),
        ("", None),
        ("hi \\", "hi \n"),
        ("C:\\\\", None),  # an escaped backslash ends no line
        ('"""', '"""\n'),
        ('"""a\nb', '"""a\nb\n'),
        ('"""a\nb"""', None),
        ('"""a"""', None),
        ('""""""', None),
        ('"""a\\', '"""a\\\n'),
        ('/system """a', '/system """a\n'),
        ('/set system """a\nb""" ', None),
        ('say """', None),
        ("a \\\nb", None),  # a paste is taken as it is
    ],
)
def test_a_message_is_continued_or_complete(text, more):
    assert continued(text) == more


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ('"""\na\nb\n"""', "a\nb"),
        ('"""a', "a"),
        ("a", "a"),
        (' """ a """', " a "),
        ('a """', 'a """'),
    ],
)
def test_quotes_are_taken_off(text, inner):
    assert unquoted(text) == inner


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("hi", "hi"),
        ("/usr/bin/python fails", "/usr/bin/python fails"),
        ("/etc/", "/etc/"),
        ("/dev/null?", "/dev/null?"),
        ("// a comment", "// a comment"),
        ("/", "/"),
        ("/3 is a third", "/3 is a third"),
        ("/system: what is it?", "/system: what is it?"),
        (" /tmp is full", " /tmp is full"),
        ("/reset", Command("reset", "")),
        ("/clear", Command("reset", "")),
        ("/?", Command("help", "")),
        ("/exit now", Command("bye", "now")),
        ("/system  Be brief. ", Command("system", "Be brief.")),
        ('/system """\na\nb\n"""', Command("system", "a\nb")),
        ("/set\tparameter x 1", Command("set", "parameter x 1")),
    ],
)
def test_a_text_is_a_message_or_a_command(text, found):
    assert parse(text, CHAT_COMMANDS) == found


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("/resett", "no such command: /resett; did you mean /reset? /help"),
        ("/tmp is full", "no such command: /tmp; /help"),
        ("/HELP", "no such command: /HELP; "),
    ],
)
def test_an_unknown_command_has_a_hint(text, hint):
    found = parse(text, CHAT_COMMANDS)
    assert isinstance(found, Unknown)
    assert found.hint.startswith(hint)
    assert found.hint.endswith("begin a message with a space to send it unchanged")


def test_help_has_every_command():
    for known in (CHAT_COMMANDS, COMMON_COMMANDS):
        text = "\n".join(help_lines(known))
        assert all(f"/{name}" in text for name in known)
    assert "/reset" not in text


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("top-k", "4", 4),
        ("num_predict", "7", 7),
        ("repeat_penalty", "1.1", 1.1),
        ("stop", "a 'b c' \\n", ["a", "b c", "n"]),
        ("stop", "'\\n'", ["\n"]),
        ("ignore_eos", "true", True),
        ("seed", "3", 3),
    ],
)
def test_a_parameter_is_set(name, text, value):
    own = {"top-k": "top_k", "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
    assert with_parameter(SamplingOptions(), name, text).given() == {own.get(name, name): value}


def test_the_format_of_answers_is_json_or_any():
    options = with_format(SamplingOptions(), "json")
    assert options.given() == {"structured_outputs": {"json_object": True}}
    assert with_format(options, "").given() == {}
    with pytest.raises(TrouperValidationError, match="exactly one"):
        with_format(SamplingOptions(regex="a"), "json")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temperature", "hot", "must be a number"),
        ("temperature", "-1", "temperature"),
        ("top_k", "1.5", "must be an integer"),
        ("num_ctx", "8192", "--max-model-len"),
        ("mirostat", "1", "no such parameter; supported: max_tokens"),
        ("ignore_eos", "perhaps", "must be true or false"),
        ("json_schema", "x.json", "no such parameter"),
    ],
)
def test_a_wrong_parameter_is_named(name, text, message):
    with pytest.raises(TrouperValidationError, match=message):
        with_parameter(SamplingOptions(), name, text)


def session(*, limit=None, **sampling):
    subject = ChatSubject(
        Conversation(), SamplingOptions(**sampling), shows_stats=False, ask=None, facts={}, limit=limit
    )  # fmt: skip
    return subject, Session(subject, Interrupts())


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("", "/set parameter temperature 0.2"),
        ("temperature 0.2", "/set parameter temperature 0.2"),
        ("num_predict 7", "/set parameter num_predict 7"),
        ("top-k", "/set parameter top-k"),
    ],
)
def test_set_without_the_word_parameter_has_a_hint(argument, meant):
    with pytest.raises(TrouperValidationError, match=re.escape(f"did you mean {meant}?")):
        session()[1]._set(argument)


def test_set_parameter_shows_all_parameters(capsys):
    session(top_k=7)[1]._set("parameter")
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().err.splitlines())
    assert shown.keys() == parameter_kinds().keys()
    assert (shown["top_k"], shown["seed"]) == ("7", "the model's default")


@pytest.mark.parametrize(
    ("limit", "max_tokens", "usage", "line"),
    [
        (64, None, AnswerUsage(60, 4), "[cut: context full; start with a larger --max-model-len"),
        (64, None, AnswerUsage(50, 4), CUT),
        (64, None, None, "[cut: context full, or the server limits answers; "),
        (64, 4, AnswerUsage(60, 4), CUT),
        (None, None, None, CUT),
    ],
)
def test_a_cut_answer_names_what_cut_it(limit, max_tokens, usage, line):
    subject, _ = session(limit=limit, max_tokens=max_tokens)
    assert subject._cut(AnswerEnd(usage, "length")).startswith(line)


@pytest.mark.parametrize(
    ("sizes", "fixed", "num"),
    [
        ([], 10, 0),
        ([30, 30], 10, 0),
        ([30, 30], 16, 1),  # 76 is too much, and 46 is under half
        ([30, 30, 30], 0, 2),
        ([90], 90, 1),
        ([10] * 8, 0, 3),
    ],
)
def test_oldest_turns_give_way_until_half_is_free(sizes, fixed, num):
    assert num_dropped(sizes, fixed, most=75, wanted=50) == num


@pytest.mark.parametrize(("num", "num_turns", "then"), [(0, 8, 4), (4, 8, 6), (7, 8, 8), (0, 1, 1)])
def test_a_refusal_drops_half_of_the_rest(num, num_turns, then):
    assert next_dropped(num, num_turns) == then


def talked():
    conversation = Conversation("Be brief.")
    conversation.append("hi", "ho", 20)
    conversation.append("and", "so", 34)
    return conversation


def test_a_conversation_knows_the_size_of_its_turns():
    conversation = talked()
    assert [turn.num_tokens for turn in conversation.turns] == [20, 14]
    assert conversation.num_too_old("x", 100, None) == 0
    assert conversation.num_too_old("x", 48, None) == 1
    assert conversation.num_too_old("x", 48, 4) == 0
    assert conversation.num_too_old("x", None, None) == 0
    assert [m["content"] for m in conversation.messages("x", num_dropped=1)] == [
        "Be brief.", "and", "so", "x",
    ]  # fmt: skip


def test_a_saved_conversation_is_loaded_again():
    conversation = talked()
    again, parameters = load(conversation.dumped({"temperature": 0.5, "stop": ["a"]}))
    assert again.messages() == conversation.messages()
    assert parameters == {"temperature": 0.5, "stop": ["a"]}
    plain, _ = load(json.dumps(conversation.messages()).encode())
    assert plain.messages() == conversation.messages()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"nonsense", b"\xff", b"5", b'{"messages": 5}', b'[{"role": "user", "content": "a"}]',
        b'[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]',
        b'[{"role": "user", "content": 5}, {"role": "assistant", "content": "a"}]', b"[" * 100000,
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(data):
    with pytest.raises(TrouperValidationError, match="is not a saved conversation"):
        load(data)


def test_history_is_private_and_bounded(tmp_path):
    path = tmp_path / "state" / "chat_history"
    history = MessageHistory(path)
    assert list(history.load_history_strings()) == []
    history.store_string("one\ntwo")
    path.chmod(0o644)
    history.store_string("three")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(MessageHistory(path).load_history_strings()) == ["three", "one\ntwo"]
    history.is_kept = False
    history.store_string("secret")
    history.is_kept = True
    history.store_string("x" * 10**6)
    assert len(path.read_text().splitlines()) == 2
    path.write_text("".join(f'"{i}"\n' for i in range(MAX_ENTRIES + 5)))
    assert len(list(MessageHistory(path).load_history_strings())) == MAX_ENTRIES
    assert path.read_text().splitlines()[0] == '"5"'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["chat_history"]


def test_history_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    history = MessageHistory(tmp_path / "file" / "chat_history")
    history.store_string("x")
    assert list(history.load_history_strings()) == []


def homeless():
    raise RuntimeError("no home")


def test_a_user_without_a_home_has_no_history(monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert history_path("chat") is None
    history = MessageHistory(None)
    history.store_string("x")
    assert list(history.load_history_strings()) == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": "hot"},
        {"stop": 5},
        {"nonsense": 1},
        {"top_k": None, "seed": []},
        {"model": "x"},
    ],
)
def test_parameters_of_a_file_are_checked(parameters):
    with pytest.raises(TrouperValidationError):
        with_values(SamplingOptions(), parameters)


@pytest.mark.anyio
async def test_line_that_is_no_text_is_passed_over(monkeypatch):
    lines = b'one\r\n\xff\nthree \\\nfour\n"""five'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
    reader = PipeReader(joins_lines=True)
    assert await reader.read() == "one"
    with pytest.raises(TrouperValidationError, match="not text in UTF-8"):
        await reader.read()
    assert [await reader.read() for _ in range(3)] == ["three \nfour", '"""five\n', None]


def test_half_a_line_of_history_is_left_out():
    assert entries_of(b'"a"\n"b\n5\n"\\u00e9"\n') == ["a", "é"]


def test_history_is_where_xdg_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path("chat") == tmp_path / "trouper" / "chat_history"
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert history_path("chat") == tmp_path / ".local/state/trouper/chat_history"
