"""Convert conversations to plain JSON data, and render their chat templates in processes of their own, on a budget.

The sandbox of `template.py` bounds what a template may touch; this bounds what it may take.  A rendering may cost no
more than its `Budget` of computing time, address space and text, nor `WALL_S` of time on the clock; what goes
beyond is killed, and the request refused.

Templates of the model folder and of the caller share warm processes: to start one takes longer than most
renderings.  A template that came with a request over the network has a process that renders nothing else.

An order to such a process is a frame of JSON: [number, arguments of a ChatTemplate or null, messages, options].  A template is sent once
and referred to by its number afterwards.  The answer is a frame with {"pieces": ...} or an error.  Clients send the arguments of earlier
tool calls back as text, sometimes truncated, while chat templates expect a JSON object, so the plain data has them repaired.
"""

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

from trouper.actors.rendering.confined_process import ConfinedProcess, HelperKilledError
from trouper.errors import (
    GenerationError,
    TemplateBudgetError,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
)

# Surrounds the number of a part other than text; a code point of no character, dropped from other text.
MARK = "\U0010fffe"
# Replaces an image or a recording in the text of a template that shows texts only.
IMAGE_MARK = f"{MARK}image{MARK}"


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether plain data is a JSON object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Return whether plain data is a JSON array."""
    return isinstance(value, list)


def plain_data(value: Any) -> Any:
    """Copy a value using JSON's types only.

    A template could otherwise call methods of the caller's objects.  Subclasses of strings and numbers become plain
    ones.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):  # subclasses may carry methods
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {plain_data(key): plain_data(item) for key, item in items}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in cast("list[Any]", value)]
    dump: Callable[[], Any] | None = getattr(value, "model_dump", None)
    if callable(dump):
        return plain_data(dump())
    return f"<{type(value).__name__}>"


MAX_TRIES = 64  # places at which a cut text may be closed


def past_arguments(given: Any, place: str) -> dict[str, Any]:
    """Return the arguments of a past call as an object.

    None and an empty text are an object without members.  A text cut short, like an answer by `max_tokens`, ends behind
    its last whole value; one that holds a text of JSON is read twice.

    Raises:
        TrouperValidationError: they are anything else, naming the place.
    """
    found = given
    for _ in range(2):
        if isinstance(found, str):
            found = _read(found)
    if found is None:
        return {}
    if not is_object(found):
        raise invalid(place, "must be a JSON object, or its text")
    return found


def _read(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON even after closing its brackets."""
    text = text.strip()
    if not text:
        return None
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    return _closed(text) if text.startswith("{") else text


def _closed(text: str) -> Any:
    """Read a truncated text: close open brackets, and drop keys without a value."""
    for end, closing in _ends(text):
        if not closing:  # it was complete, and something else follows
            return text
        try:
            return json.loads(text[:end] + closing, strict=False)
        except (ValueError, RecursionError):
            continue
    return text


def _ends(text: str) -> list[tuple[int, str]]:
    """Return the positions at which the text may end, last first, with the brackets open there."""
    ends: list[tuple[int, str]] = []
    open_brackets: list[str] = []
    in_string = is_escaped = False
    for i, char in enumerate(text):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            open_brackets.append("}" if char == "{" else "]")
            ends.append((i + 1, "".join(reversed(open_brackets))))
        elif char in "}]" and open_brackets:
            open_brackets.pop()
            ends.append((i + 1, "".join(reversed(open_brackets))))
        elif char == ",":
            ends.append((i, "".join(reversed(open_brackets))))
        ends = ends[-MAX_TRIES:]
    quote = '"' if in_string and not is_escaped else ""
    ends.append((len(text), quote + "".join(reversed(open_brackets))))
    return ends[::-1]


WORKER = "trouper.actors.rendering.template_worker"
WALL_S = 10.0  # on a busy machine
MAX_TEMPLATES = 16  # that one process keeps compiled; then the next one begins


class Budget(NamedTuple):
    """Limits of one rendering: seconds of CPU time, bytes of memory and characters of text.

    The memory is that of the whole child process.  The process is ended at the first limit.
    """

    cpu_s: int
    memory: int  # bytes of address space: the interpreter and jinja take 26 MiB of it
    chars: int  # of the rendered text


FOREIGN = Budget(cpu_s=2, memory=96 * 2**20, chars=2**22)
# A conversation as long as a model of a million tokens reads is copied a dozen times on its way.
OWN = Budget(cpu_s=2, memory=512 * 2**20, chars=2**23)


class TemplateSource(NamedTuple):
    """The arguments from which the child process creates a `ChatTemplate`.

    It is hashable, so a process compiles each template only once.
    """

    source: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


class ConfinedTemplates:
    """Warm processes for templates of one engine: as many as there are threads that render at once.

    The processes end with this object, or at `close`.
    """

    def __init__(self, budget: Budget = OWN) -> None:
        self._budget = budget
        self._idle: list[TemplateProcess] = []
        self.close = weakref.finalize(self, _close_all, self._idle)

    def render(
        self, template: TemplateSource, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[str]:
        """Render as `ChatTemplate.render` does; threads may call it at the same time.

        Raises:
            TemplateBudgetError: it takes too much.
            GenerationError: there is no process to render in.
        """
        return _twice(lambda: self._render(template, messages, options))

    def _render(
        self, template: TemplateSource, messages: Sequence[Mapping[str, Any]], options: Any
    ) -> list[str]:
        process = self._take(template)
        try:
            return process.render(template, messages, **options)
        finally:
            if process.is_usable and self.close.alive:
                self._idle.append(process)
            else:
                process.close()

    def _take(self, template: TemplateSource) -> "TemplateProcess":
        while self._idle:
            process = self._idle.pop()
            if process.is_usable and process.has_room_for(template):
                return process
            process.close()
        return TemplateProcess(self._budget)


def render_once(
    template: TemplateSource,
    messages: Sequence[Mapping[str, Any]],
    *,
    budget: Budget = FOREIGN,
    **options: Any,
) -> list[str]:
    """Render a client's template in a process used only for this rendering.

    A template cannot leave anything behind for the next client.  Raises the errors of `ConfinedTemplates.render`.
    """

    def render() -> list[str]:
        process = TemplateProcess(budget)
        try:
            return process.render(template, messages, **options)
        finally:
            process.close()

    return _twice(render)


def _twice(render: Callable[[], list[str]]) -> list[str]:
    """Render, and once more if the process was killed from outside; only the second time is it the template's doing.

    Raises:
        TemplateBudgetError: it was killed again.
    """
    try:
        return render()
    except HelperKilledError:
        pass
    try:
        return render()
    except HelperKilledError:
        raise _over_budget() from None


class TemplateProcess:
    """A child process that renders one conversation at a time, and keeps its compiled templates.

    It is ended after a failure.

    Raises:

        GenerationError: it cannot be started.
    """

    def __init__(self, budget: Budget) -> None:
        self._numbers: dict[TemplateSource, int] = {}  # of the templates that it knows
        try:
            self._process = ConfinedProcess(WORKER, *budget)
        except OSError as error:
            raise GenerationError(f"no process to render a template in: {error}") from error

    @property
    def is_usable(self) -> bool:
        """Return whether the child is alive and was started by this process, not by the process from which it was forked."""
        return self._process.is_usable

    def has_room_for(self, template: TemplateSource) -> bool:
        return template in self._numbers or len(self._numbers) < MAX_TEMPLATES

    def render(
        self, template: TemplateSource, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[str]:
        """Render as `ConfinedTemplates.render` does; the process is closed unless it has answered.

        Raises:
            HelperKilledError: it was killed from outside.
        """
        number = self._numbers.get(template, len(self._numbers))
        arguments = None if template in self._numbers else template
        order = _encoded([number, arguments, messages, options])
        self._numbers[template] = number
        match json.loads(self._answer(order)):
            case {"pieces": pieces}:
                return pieces
            case {"unsupported": message, "parameter": parameter}:
                raise UnsupportedFeatureError(message, parameter=parameter)
            case {"message": message, "parameter": parameter}:
                raise TrouperValidationError(message, parameter=parameter)
            case other:
                raise AssertionError(other)

    def _answer(self, order: bytes) -> bytes:
        try:
            return self._process.ask(order, WALL_S)
        except TimeoutError:
            raise _over_budget() from None
        except HelperKilledError:
            raise
        except ChildProcessError as error:
            raise GenerationError(f"rendering the template failed: {error}") from None

    def close(self) -> None:
        """End the process, whatever it is doing.

        In a forked child, the copy of this object does nothing, because the process belongs to the parent.
        """
        self._process.close()


def _encoded(order: list[Any]) -> bytes:
    try:
        return json.dumps(plain_data(order)).encode()
    except RecursionError:
        raise TrouperValidationError("nested too deep", parameter="messages") from None


def _close_all(processes: list[TemplateProcess]) -> None:
    while processes:
        processes.pop().close()


def _over_budget() -> TemplateBudgetError:
    return TemplateBudgetError("this template takes too much to render", parameter="chat_template")
