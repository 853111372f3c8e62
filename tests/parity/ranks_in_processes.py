"""Ranks on emulated GPUs, each in a process of its own: every plan goes to all of them, and the first one answers."""

import os
import subprocess
import sys
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0  # for an answer: the kernels are interpreted


class RankProcesses:
    """Processes that wait for a model: importing torch and Triton takes longer than a tiny model does."""

    def __init__(self, num_ranks):
        self.connections, self.processes = [], []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(num_ranks):
            ours, theirs = Pipe()
            command = [
                sys.executable,
                "-m",
                "tests.parity.cuda_rank",
                str(theirs.fileno()),
                str(rank),
            ]
            with theirs:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
            self.connections.append(ours)
            self.processes.append(process)

    def on_each(self, *message):
        """Ask all, then wait for all; the first error is raised."""
        for connection in self.connections:
            connection.send(message)
        answers = [self._answer(connection) for connection in self.connections]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _answer(self, connection):
        if not connection.poll(PATIENCE_S):
            raise TimeoutError("a rank does not answer")
        return connection.recv()

    def close(self):
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.wait()


class RankedModel:
    """A runner, as `Driver` takes one, of a model that the processes share out."""

    def __init__(self, processes, config, path):
        self._processes = processes
        config = msgspec.structs.replace(
            config, device="cuda", tensor_parallel_size=len(processes.connections)
        )
        path.write_bytes(b"")
        processes.on_each("open", config, str(path))

    def load(self):
        return self.on_each("load")[0]

    def execute(self, plan):
        answer, *others = self.on_each("execute", plan)
        assert others == [None] * len(others)
        return answer

    def load_adapter(self, slot, files):
        self.on_each("load_adapter", slot, files)

    def on_each(self, *message):
        return self._processes.on_each(*message)


@contextmanager
def ranked(processes, config, path):
    model = RankedModel(processes, config, path)
    try:
        yield model
    finally:
        processes.on_each("close")
