"""A server process on a free port of the loopback."""

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

ARGUMENTS = ["--max-model-len", "512", "--max-num-seqs", "16", "--num-gpu-blocks-override", "64"]
ARGUMENTS += ["--dtype", "float32"]
LIMIT_S = 50  # for what a test waits for


class Process:
    """`with started(…) as server`: its lines, its port, and its end."""

    def __init__(self, *arguments, flags=(), program="trouper", **environment):
        command = [sys.executable, *flags, "-m", program, "serve", *ARGUMENTS, *arguments]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.lines = []
        self.port = None  # of the public listener
        self.ports = []  # of all listeners
        self.headers = []  # with every request
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, text):
        """The line that holds it; the port is known from the first one."""
        with self._news:
            found = self._news.wait_for(
                lambda: self._find(text) or self._process.poll() is not None, timeout=LIMIT_S
            )
        assert found, self.lines
        line = self._find(text)
        assert line, self.lines
        return line

    def signal(self, number):
        os.kill(self._process.pid, number)

    def wait(self):
        """Its exit code."""
        code = self._process.wait(timeout=30)
        self._reader.join()
        return code

    def close(self):
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stderr.close()

    @property
    def pid(self):
        return self._process.pid

    def request(self, method, path, body=b"", headers=(), *, has_key=True):
        """(status, headers, body)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path)
            for name, value in [*headers, *(self.headers if has_key else ())]:
                connection.putheader(name, value)
            if body:
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            connection.close()

    def _find(self, text):
        return next((line for line in self.lines if text in line), None)

    def _read(self):
        for line in self._process.stderr:
            with self._news:
                self.lines.append(line)
                found = re.search(r"listening at https?://[^:]+:(\d+)", line)
                if found is not None:
                    self.ports.append(int(found.group(1)))
                    self.port = self.ports[0]
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


@contextmanager
def started(*arguments, **options):
    process = Process("--port", "0", *arguments, **options)
    try:
        process.wait_for("serving")
        yield process
    finally:
        process.close()


def wait_until(holds):
    """Ask until it holds, for what no line tells of; each time it asks the server."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s, f"it did not happen in {LIMIT_S} s"
        time.sleep(0.01)


def stop(process):
    process.signal(signal.SIGTERM)
    return process.wait()
