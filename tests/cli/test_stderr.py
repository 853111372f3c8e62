"""Standard error that cannot take what is written: closed, full, without a reader, with one that has stopped."""

import fcntl
import os
import subprocess
import sys

import pytest

from trouper.frontends.cli import output
from trouper.frontends.cli.output import PIECE_BYTES, DroppingStream


@pytest.fixture
def pipe():
    """The two ends of a pipe of 4,096 bytes."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            pass


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(output, "PATIENCE_MS", 0)


def test_what_is_written_arrives(pipe):
    reader, writer = pipe
    stream = DroppingStream(writer)
    assert stream.write(b"one\n") == 4
    assert os.read(reader, 100) == b"one\n"


def test_lines_lost_to_full_pipe_are_reported(pipe):
    reader, writer = pipe
    stream = DroppingStream(writer)
    stream.write(b"x" * PIECE_BYTES)
    for _ in range(3):
        stream.write(b"lost\n")
    assert os.read(reader, PIECE_BYTES) == b"x" * PIECE_BYTES
    stream.write(b"again\n")
    assert os.read(reader, 1000) == b"trouper: 3 lines could not be written here\nagain\n"
    stream.write(b"more\n")
    assert os.read(reader, 1000) == b"more\n"


def test_long_text_is_written_in_parts_or_cut(pipe):
    reader, writer = pipe
    assert DroppingStream(writer).write(b"y" * 10_000) == 10_000
    assert os.read(reader, 20_000) == b"y" * PIECE_BYTES


def test_no_reader_no_space_and_no_descriptor_are_no_errors(pipe):
    reader, writer = pipe
    os.close(reader)
    with open("/dev/full", "wb", buffering=0) as full:
        for file in (writer, full.fileno(), 987_654):
            stream = DroppingStream(file)
            for _ in range(3):
                assert stream.write(b"lost\n") == 5
            assert "3 lines" in repr(stream)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2> >(exec true)", "<&- 2>&-"])
def test_command_ends_as_it_would_whatever_becomes_of_its_messages(redirection):
    for arguments, code in (("--version", 0), ("generate --no-such-option x", 2)):
        line = f"sleep 0.05; exec {sys.executable} -m trouper {arguments} {redirection}"
        found = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, check=False)
        assert found.returncode == code, (arguments, redirection)


def test_results_that_cannot_be_written_are_an_error():
    line = f"exec {sys.executable} -m trouper collect-env 1>&-"
    found = subprocess.run(["bash", "-c", line], capture_output=True, check=False)
    assert found.returncode == 1
    assert b"Bad file descriptor" in found.stderr


def test_a_stderr_of_the_callers_own_stays(capsys):
    output.drop_what_stderr_does_not_take()
    print("here", file=sys.stderr)
    assert capsys.readouterr().err == "here\n"
