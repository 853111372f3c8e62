"""`trouper chat` and `complete` at a real pseudo-terminal, whose server is a small fake."""

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

from .fake import chunk, error, events, response, serving

ANSWER = events(chunk("Hello!"), chunk(None, "stop"), "[DONE]")
ENDLESS = events(chunk("On and on"), is_whole=False)[:-2]  # the last chunk has no end
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00\x08]")
PROMPT = "\x1b[?2004h"  # the editor asks for bracketed pastes whenever it waits for a message
PASTE = "\x1b[200~{}\x1b[201~"
LIMIT_S = 50
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, fd, process):
        self.fd = fd
        self.process = process
        self._unread = ""
        self.screen = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, text):
        """Read until `text` has come; returns what came before it, without escape sequences."""
        end_s = time.monotonic() + LIMIT_S
        while text not in self._unread:
            assert time.monotonic() < end_s, (text, self.screen)
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    piece = os.read(self.fd, 4096).decode()
                except OSError:
                    piece = ""
                assert piece, (text, self.screen)
                self.screen += piece
                self._unread += piece
        before, _, self._unread = self._unread.partition(text)
        return ESCAPES.sub("", before)

    def say(self, text):
        """Type a message; returns what comes until the next prompt."""
        self.type(text)
        return self.wait_for(PROMPT)

    def read_all(self):
        """Read until the command has ended."""
        try:
            while piece := os.read(self.fd, 4096):
                self.screen += piece.decode()
        except OSError:
            pass  # Linux's end of a pseudo-terminal
        return ESCAPES.sub("", self.screen)


# The first terminal that the leader of a session opens controls it: Ctrl-C is then a signal.
OPEN_TERMINAL = 'exec "$0" "$@" <>"$TTY" >&0 2>&0'


@contextmanager
def terminal(tmp_path, command, url, *arguments, code=0, term="xterm", prompt=PROMPT):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    line = [sys.executable, "-m", "trouper", command, "--url", url, *arguments]
    own = {"XDG_STATE_HOME": str(tmp_path), "TERM": term, "TTY": os.ttyname(theirs)}
    with subprocess.Popen(
        ["sh", "-c", OPEN_TERMINAL, *line], start_new_session=True, env={**os.environ, **own}
    ) as process:
        try:
            shell = Terminal(ours, process)
            shell.wait_for(prompt)
            os.close(theirs)
            yield shell
            assert process.wait() == code
        finally:
            process.kill()
            os.close(ours)


def asked(fake):
    """The last messages of each request to a fake server."""
    bodies = [json.loads(body) for (method, _), _, body in fake.asked if method == "POST"]
    return [body["messages"][-1]["content"] for body in bodies]


def test_messages_are_what_a_user_means(tmp_path):
    with serving(ANSWER) as fake, terminal(tmp_path, "chat", fake.url) as shell:
        assert "/help lists the commands" in shell.screen
        assert "Hello!" in shell.say("hi\r")
        shell.type(PASTE.format("one\ntwo\nthree\nfour"))
        shell.wait_for("four")
        shell.say("\r")
        shell.say('"""a\rb"""\r')
        shell.say("x \\\ry\r")
        shell.say("/usr/bin/python fails\r")
        shell.type("half a question")
        shell.wait_for("question")
        assert "leave" not in shell.say(CTRL_C)
        assert "press Ctrl-D or type /bye" in shell.say(CTRL_C)
        shell.say("whole\r")
        assert "no such command: /nonsense" in shell.say("/nonsense\r")
        shell.say("/reset\r")
        up = "\x1b[A"
        shell.say(f"{up}{up}{up}\r")  # over the two commands
        shell.type("/bye\r")
        shell.read_all()
    messages = ["hi", "one\ntwo\nthree\nfour", "a\nb", "x \ny", "/usr/bin/python fails", "whole"]
    assert asked(fake) == [*messages, "whole"]
    history = tmp_path / "trouper" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert json.loads(history.read_text().splitlines()[1]) == "one\ntwo\nthree\nfour"


def test_ctrl_c_stops_answer_and_keeps_session(tmp_path):
    with serving(ENDLESS) as fake, terminal(tmp_path, "chat", fake.url) as shell:
        fake.hold = True
        shell.type("hi\r")
        shell.wait_for("On and on")
        shell.type(CTRL_C + CTRL_C)  # the second hits nothing
        shell.wait_for(PROMPT)
        assert "in 1 turn\r" in shell.say("/show\r")
        shell.type(CTRL_D)
        shell.read_all()


def test_signal_ends_session_and_restores_terminal(tmp_path):
    with serving(ANSWER) as fake, terminal(tmp_path, "chat", fake.url, code=143) as shell:
        mode = termios.tcgetattr(shell.fd)
        shell.type("half a question")
        shell.wait_for("question")
        shell.process.send_signal(signal.SIGTERM)
        assert shell.read_all().endswith("trouper: terminated\r\n")
        assert (
            termios.tcgetattr(shell.fd)[3]
            == mode[3] | termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN
        )


def test_a_dumb_terminal_is_not_drawn_on(tmp_path):
    with (
        serving(ANSWER) as fake,
        terminal(tmp_path, "chat", fake.url, term="dumb", prompt="> ") as shell,
    ):
        shell.type("hi\r")
        shell.wait_for("Hello!")
        # Nothing shows when the prompt reads keys, and a line that comes early is read all the same.
        shell.type("/bye\r")
        shell.read_all()
        assert "\x1b[J" not in shell.screen
    assert asked(fake) == ["hi"]


def test_settings_and_files_of_a_conversation(tmp_path):
    file = tmp_path / "talk.json"
    with serving(ANSWER) as fake, terminal(tmp_path, "chat", fake.url) as shell:
        shell.say("/set parameter temperature 0.5\r")
        assert "must be in [0, 2]" in shell.say("/set parameter temperature 7\r")
        assert "/set takes parameter NAME VALUE" in shell.say("/set colour red\r")
        shell.say('/set system """Be\rbrief."""\r')
        shell.say("hi\r")
        assert "temperature          0.5" in shell.say("/show parameters\r")
        assert "saved 1 turn in" in shell.say(f"/save {file}\r")
        shell.say("/reset\r")
        shell.say("/system Be long.\r")
        assert "loaded 1 turn from" in shell.say(f"/load {file}\r")
        (tmp_path / "other.json").touch()
        assert "exists; choose another name" in shell.say(f"/save {tmp_path}/other.json\r")
        assert "saved 1 turn in" in shell.say(f"/save {file}\r")
        assert "cannot be read: No such file" in shell.say("/load /no/such/file\r")
        assert "must be json" in shell.say("/set format xml\r")
        shell.say("/set format json\r")
        shell.say("/set nothink\r")
        shell.say("again\r")
        shell.type(CTRL_D)
        shell.read_all()
    first, second = [json.loads(body) for (method, _), _, body in fake.asked if method == "POST"]
    assert first["temperature"] == 0.5
    assert first.keys().isdisjoint({"structured_outputs", "chat_template_kwargs"})
    assert second["structured_outputs"] == {"json_object": True}
    assert second["chat_template_kwargs"] == {"enable_thinking": False}
    assert [m["content"] for m in second["messages"]] == ["Be\nbrief.", "hi", "Hello!", "again"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_prompts_are_completed_with_the_same_editor(tmp_path):
    with serving(ANSWER) as fake, terminal(tmp_path, "complete", fake.url) as shell:
        shell.type(PASTE.format("def f(\n    x"))
        shell.wait_for("x")
        assert "Hello!" in shell.say("\r")
        assert "no such command: /reset" in shell.say("/reset\r")
        shell.type(CTRL_D)
        shell.read_all()
    assert json.loads(fake.asked[1][2])["prompt"] == "def f(\n    x"
    assert (tmp_path / "trouper" / "complete_history").exists()


FULL = error("400 Bad Request", "the prompt has 90 tokens, but the limit is 64 (max_model_len)")


def test_oldest_turns_give_way_at_server_that_says_its_length(tmp_path):
    models = response(b'{"data": [{"id": "fake", "max_model_len": 64}]}')
    with serving(ANSWER, models) as fake, terminal(tmp_path, "chat", fake.url) as shell:
        for number in range(4):
            out = shell.say(f"{number} {'long ' * 6}\r")
        assert "the context of 64 tokens is full" in out
        assert "/reset starts a new conversation, start with" in out
        fake.answer = FULL
        out = shell.say("too long\r")
        assert "the message is too long" in out
        fake.answer = ANSWER
        assert "Hello!" in shell.say("short\r")
        shell.type(CTRL_D)
        shell.read_all()
    assert len(json.loads(fake.asked[4][2])["messages"]) < 7
    assert len(json.loads(fake.asked[-1][2])["messages"]) > 1
