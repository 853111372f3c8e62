"""A chat template that came with a request, rendered in a process of its own, on a budget.

The sandbox of `jinja.py` bounds what a template may touch; this bounds what it may take.  It may not cost
more than `CPU_S` of computing (starting counts), `MEMORY` of address space and `MAX_CHARS` of text; what
goes beyond is killed, and the request refused.  The process inherits no environment.

Source: spec robustness chapter 2, row B25.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trouper.actors.rendering.chat import ChatTemplate
from trouper.actors.rendering.jinja import plain_data
from trouper.errors import (
    GenerationError,
    TemplateBudgetError,
    TrouperValidationError,
    UnsupportedFeatureError,
)

CPU_S = 2
WALL_S = 10.0  # on a machine that has other things to do
MEMORY = 96 * 2**20  # the interpreter and jinja take 26 of it
MAX_CHARS = 2**22
OVER_BUDGET = 3  # exit code
# For its time, or its memory where nobody caught it.
KILLED = tuple(-getattr(signal, name, 0) for name in ("SIGXCPU", "SIGKILL", "SIGSEGV", "SIGABRT"))


class ConfinedTemplate:
    """Stands where a `ChatTemplate` of the same arguments would."""

    def __init__(self, source: str, special: Collection[str], added: Collection[str]) -> None:
        self._arguments = [source, sorted(special), sorted(added)]

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[str]:
        """As `ChatTemplate.render`.

        Raises:
            TemplateBudgetError: it takes too much.
            GenerationError: there is no process to render in.
        """
        try:
            order = json.dumps(plain_data([self._arguments, messages, options]))
        except RecursionError:
            raise TrouperValidationError("nested too deep", parameter="messages") from None
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", __name__],
                input=order.encode(),
                capture_output=True,
                timeout=WALL_S,
                env={"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                check=False,
                start_new_session=True,  # Ctrl-C is for the server
            )
        except subprocess.TimeoutExpired:
            raise _over_budget() from None
        if done.returncode in KILLED or done.returncode == OVER_BUDGET:
            raise _over_budget()
        if done.returncode:
            raise GenerationError(f"rendering the template failed: {done.stderr[-500:]!r}")
        match json.loads(done.stdout):
            case {"pieces": pieces}:
                return pieces
            case {"unsupported": message, "parameter": parameter}:
                raise UnsupportedFeatureError(message, parameter=parameter)
            case {"message": message, "parameter": parameter}:
                raise TrouperValidationError(message, parameter=parameter)
            case other:
                raise AssertionError(other)


def _over_budget() -> TemplateBudgetError:
    return TemplateBudgetError("this template takes too much to render", parameter="chat_template")


def _main() -> None:
    """In the process: limits first, then whatever comes from outside."""
    import resource

    for kind, limit in (
        (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CORE, 0)
    ):  # fmt: skip
        resource.setrlimit(kind, (limit, limit))
    try:
        sys.stdout.write(json.dumps(_answer(sys.stdin.read())))
    except MemoryError:
        os._exit(OVER_BUDGET)


def _answer(order: str) -> dict[str, Any]:
    try:
        arguments, messages, options = json.loads(order)
        pieces = ChatTemplate(*arguments).render(messages, **options)
    except UnsupportedFeatureError as error:
        return {"unsupported": str(error), "parameter": error.parameter}
    except TrouperValidationError as error:
        return {"message": error.message, "parameter": error.parameter}
    except RecursionError:
        return {"message": "nested too deep", "parameter": "chat_template"}
    if sum(map(len, pieces)) > MAX_CHARS:
        raise MemoryError
    return {"pieces": pieces}


if __name__ == "__main__":
    _main()
