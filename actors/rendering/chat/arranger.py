"""Find out what a chat template does with a conversation, and choose an arrangement in which all of it appears."""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from trouper.actors.rendering.chat.arrangements import (
    Arrangement,
    Chat,
    Message,
    arrangements,
    shape_of,
    skeleton,
)
from trouper.errors import TrouperValidationError, invalid

MAX_KNOWN = 64  # shapes of conversations, of some 40 KiB at most
Render = Callable[[Chat, Mapping[str, Any]], str]
CALL = {"id": "abcdefghi", "type": "function"}  # some templates take only such ids
KEY, VALUE, RESULT, NAME = "zqkey", "zqvalue", "zqresult", "zqname"
USER: Message = {"role": "user", "content": "a"}


class Arranger:
    """Arranges the conversations of one template; what it has found out about it is kept.

    Args:
        render: gives the text of a conversation; raises TrouperValidationError if the template refuses it.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: OrderedDict[tuple[Any, ...], Arrangement | int] = OrderedDict()
        self._calls: dict[bool, tuple[bool, bool]] = {}  # with tools and without

    def arrange(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> Chat:
        """Return the conversation so that the template shows all of it; one that the template refuses stays as it is.

        Raises:
            TrouperValidationError: there is no such arrangement.
        """
        chat = Chat(list(messages), list(tools) if tools else None)
        if not self._shows_messages:
            return chat
        key = shape_of(messages), len(tools or ()), json.dumps(variables, sort_keys=True)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._find(chat, variables)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        if isinstance(found, Arrangement):
            return self._with_text_arguments(found(chat))
        if found < 0:
            raise invalid("tools", "the chat template has no place for them")
        role = str(messages[found].get("role"))[:64]
        rule = f"the chat template has no place for it: a message of the role {role!r} would not be in the prompt"
        raise invalid(f"messages[{found}]", rule)

    def _find(self, chat: Chat, variables: Mapping[str, Any]) -> Arrangement | int:
        """Return the first arrangement that shows everything, or the number of a dropped message."""
        bare = skeleton(*chat)
        tried: list[Chat] = []
        faults: list[int | None] = []  # what is dropped, or None if the template refuses
        for arrangement in arrangements(self._takes_tools(chat, variables)):
            arranged = self._with_text_arguments(arrangement(bare.chat))
            if arranged in tried:
                continue
            tried.append(arranged)
            try:
                missing = bare.first_missing(self._render(arranged, variables))
            except TrouperValidationError:
                faults.append(None)
                continue
            if missing is None:
                return arrangement
            faults.append(missing)
        # what the best of them drops: of the others it may be a message that only has to be moved
        return Arrangement() if faults[0] is None else max(f for f in faults if f is not None)

    @cached_property
    def _shows_messages(self) -> bool:
        """Whether a conversation is in its prompts at all: some templates are a text, or count the messages."""
        return VALUE in self._text(Chat([{**USER, "content": VALUE}]), {})

    def _takes_tools(self, chat: Chat, variables: Mapping[str, Any]) -> bool:
        """Return whether the template shows the tools, calls and results of the conversation."""
        if chat.tools and not self._shows_tools(variables):
            return False
        has_calls = any(m.get("tool_calls") or m.get("role") == "tool" for m in chat.messages)
        return not has_calls or any(self._calls_shown(has_tools=bool(chat.tools)))

    def _shows_tools(self, variables: Mapping[str, Any]) -> bool:
        tools = skeleton([], [{}])
        word, given = tools.tool_words[0], tools.chat.tools
        begins: list[list[Message]] = [[USER], [{"role": "system", "content": "a"}, USER]]
        return any(word in self._text(Chat(begin, given), variables) for begin in begins)

    def _calls_shown(self, *, has_tools: bool) -> tuple[bool, bool]:
        """Return whether calls and results appear with arguments as an object, and with arguments as text."""
        if has_tools not in self._calls:
            self._calls[has_tools] = self._look_for_calls(
                skeleton([], [{}]).chat.tools if has_tools else None
            )
        return self._calls[has_tools]

    def _look_for_calls(self, tools: list[Any] | None) -> tuple[bool, bool]:
        forms = ({KEY: VALUE}, f'{{"{KEY}": "{VALUE}"}}')
        texts = [self._text(_with_call(form, tools), {}) for form in forms]
        shown = [all(word in text for word in (NAME, VALUE, RESULT)) for text in texts]
        # as Python writes it, which no model has seen
        is_spelled = f"'{KEY}': '{VALUE}'" in texts[0]
        return shown[0] and not (is_spelled and shown[1]), shown[1]

    def _with_text_arguments(self, chat: Chat) -> Chat:
        """Write arguments as text if the template inserts them into the prompt unchanged."""
        if not any(m.get("tool_calls") for m in chat.messages):
            return chat
        as_object, as_text = self._calls_shown(has_tools=bool(chat.tools))
        if as_object or not as_text:
            return chat
        return chat._replace(messages=[_with_texts(m) for m in chat.messages])

    def _text(self, chat: Chat, variables: Mapping[str, Any]) -> str:
        try:
            return self._render(chat, variables)
        except TrouperValidationError:
            return ""


def _with_call(arguments: Any, tools: list[Any] | None) -> Chat:
    call = {**CALL, "function": {"name": NAME, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": NAME, "tool_call_id": CALL["id"], "content": RESULT}
    return Chat([USER, answer, result], tools)


def _with_texts(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls: list[Any] = []
    for call in message["tool_calls"]:
        function = {**call["function"]}
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
