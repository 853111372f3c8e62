"""Run a worker without a model; it ends on request or with its engine."""

import os
import socket
import sys

from trouper.actors.executor.workers.worker import end_with_the_engine

arguments = sys.argv[1:]
if arguments[0] == "--machine":
    arguments = arguments[2:]
control = socket.socket(fileno=int(arguments[0]))
end_with_the_engine(control, int(arguments[1]))
sys.stderr.write(f"idle, {len(arguments) - 2} links\n")
control.recv(1)
os._exit(3)
