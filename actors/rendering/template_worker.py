"""The process in which chat templates are rendered: limits first, then one order after another from a socket.

python -P -m trouper.actors.rendering.template_worker CPU_S MEMORY MAX_CHARS    (standard input is the socket)

The end of the socket ends the process.
"""

import json
import math
import os
import socket
import sys
import time
from typing import Any

from trouper.actors.rendering.confined_process import LENGTH_BYTES, OVER_BUDGET, framed
from trouper.actors.rendering.template import ChatTemplate
from trouper.errors import TrouperValidationError, UnsupportedFeatureError


def main() -> None:
    cpu_s, memory, max_chars = map(int, sys.argv[1:])
    try:
        _limit_memory(memory)
        _serve(socket.socket(fileno=sys.stdin.fileno()), cpu_s, max_chars)
    except MemoryError:
        os._exit(OVER_BUDGET)


def _serve(orders: socket.socket, cpu_s: int, max_chars: int) -> None:
    known: dict[int, list[Any]] = {}
    compiled: dict[int, ChatTemplate] = {}
    with orders, orders.makefile("rb") as stream:
        while head := stream.read(LENGTH_BYTES):
            _limit_time(cpu_s)
            text = stream.read(int.from_bytes(head))
            answer = json.dumps(_answer(text, known, compiled, max_chars)).encode()
            orders.sendall(framed(answer))


def _limit_memory(memory: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "darwin":  # which maps more than any useful limit before a program begins
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _limit_time(cpu_s: int) -> None:
    """Let the next order take `cpu_s` seconds of computing; the system ends the process when they are over."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + cpu_s, hard))


def _answer(
    text: bytes, known: dict[int, list[Any]], compiled: dict[int, ChatTemplate], max_chars: int
) -> dict[str, Any]:
    try:
        number, arguments, messages, options = json.loads(text)
        if arguments is not None:
            known[number] = arguments
        if number not in compiled:
            compiled[number] = ChatTemplate(*known[number])
        pieces = compiled[number].render(messages, **options)
    except UnsupportedFeatureError as error:
        return {"unsupported": str(error), "parameter": error.parameter}
    except TrouperValidationError as error:
        return {"message": error.message, "parameter": error.parameter}
    except RecursionError:
        return {"message": "nested too deep", "parameter": "chat_template"}
    if sum(map(len, pieces)) > max_chars:
        raise MemoryError
    return {"pieces": pieces}


if __name__ == "__main__":
    main()
