"""Rearrange a conversation so that all of it appears in what a chat template renders.  Pure.

A template may drop a message silently or refuse its position.  To find out what a template does with a conversation, the
`Arranger` renders a `skeleton`: a conversation with the same roles and a made-up word for each text.  A missing word
means that the template would drop the text.  The other functions map roles, merge or move messages, and write tools as
text; the first arrangement that shows all words is used, in an order from no change to the largest change.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, cast

from trouper.actors.rendering.conversations import is_array, is_object
from trouper.errors import TrouperValidationError, invalid

Message = dict[str, Any]
Messages = list[Message]
SYSTEM_ROLES = ("system", "developer")
GAP = "\n\n"  # between texts that become one
TOOLS_HEAD = "You can call tools. Here is each of them, with its purpose and the JSON schema of its arguments:"
TOOLS_RULES = """\
To call a tool, answer with nothing but one JSON object: {"name": "the name of the tool", "arguments": {…}}
To call several, write one object behind the other, with a semicolon between them.
Where no tool helps, answer in plain text."""


class Chat(NamedTuple):
    """A conversation, and the tools that it may use.

    Arrangements change copies of it, so the caller's own messages stay as they were.
    """

    messages: Messages
    tools: list[Any] | None = None


Step = Callable[[Chat], Chat]


class Arrangement(NamedTuple):
    """Changes of a conversation, one after the other.

    It is a tuple of functions, so that a template's arrangement can be stored and sent to another process.
    """

    steps: tuple[Step, ...] = ()

    def __call__(self, chat: Chat) -> Chat:
        for step in self.steps:
            chat = step(chat)
        return chat


def arrangements(takes_tools: bool) -> Iterator[Arrangement]:
    """Yield the arrangements to try, the one that changes least first.

    Args:
        takes_tools: the template shows tools, calls and their results.
    """
    tool_steps: list[tuple[Step, ...]] = [(), (split_calls,), (tools_as_text,)]
    for tools in tool_steps if takes_tools else tool_steps[2:]:
        for system, merged in product(_SYSTEM_STEPS, ((), (merge_neighbours,))):
            yield Arrangement((*tools, *system, *merged))


def shape_of(messages: Sequence[Any]) -> tuple[Any, ...]:
    """Describe what decides over the places of messages: their roles, and the kinds of their contents.

    Two conversations of one shape need the same arrangement, so the search runs once for each shape.
    """
    return tuple(
        (str(m.get("role")), _kind(m.get("content")), len(_calls(m)))
        if is_object(m)
        else type(m).__name__
        for m in messages
    )


class Skeleton(NamedTuple):
    """A conversation with made-up words as its texts.

    Attributes:
        words: for each message, words of which the text must contain one; empty for an empty message.
        tool_words: one for each tool.
    """

    chat: Chat
    words: list[list[str]]
    tool_words: list[str]

    def first_missing(self, text: str) -> int | None:
        """Return the number of the first message that a rendered text does not show.

        Returns -1 if a tool is missing, and None if everything is shown.
        """
        if not all(word in text for word in self.tool_words):
            return -1
        for i, words in enumerate(self.words):
            if words and not any(word in text for word in words):
                return i
        return None


def skeleton(messages: Sequence[Message], tools: Sequence[Any] | None) -> Skeleton:
    """Make the skeleton of a conversation: the same messages with unique words in place of their texts.

    If a word is missing in the rendered text, the template has dropped that message.
    """
    made: list[Message] = []
    words: list[Any] = []
    for i, message in enumerate(messages):
        bare, found = _bare(message, f"zq{i}")
        made.append(bare)
        words.append(found)
    tool_words = [f"zqt{i}x" for i in range(len(tools or ()))]
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}}
    made_tools = [
        {"type": "function", "function": {"name": word, "description": "a", "parameters": schema}}
        for word in tool_words
    ]
    return Skeleton(Chat(made, made_tools or None), words, tool_words)


def _bare(message: Message, stem: str) -> tuple[Message, list[str]]:
    kept = {key: message[key] for key in ("role", "name", "tool_call_id") if key in message}
    words: list[str] = []
    if (kind := _kind(message.get("content"))) != "none":
        word = f"{stem}c" if kind != "blank" else ""
        words += [word] if word else []
        kept["content"] = [{"type": "text", "text": word}] if kind == "parts" else word
    if calls := _calls(message):
        made: list[Message] = []
        for j, call in enumerate(calls):
            word = f"{stem}n{j}x"
            words.append(word)
            function = {"name": word, "arguments": {"a": "b"}}
            given = {"id": call["id"]} if is_object(call) and "id" in call else {}
            made.append({**given, "type": "function", "function": function})
        kept["tool_calls"] = made
    return kept, words


def _kind(content: Any) -> str:
    if content is None:
        return "none"
    if isinstance(content, str):
        return "text" if content.strip() else "blank"
    texts = [part.get("text") if is_object(part) else part for part in content or ()]
    return "parts" if any(not isinstance(t, str) or t.strip() for t in texts) else "blank"


def _calls(message: Any) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if is_array(calls) else []


# Steps


def developer_as_system(chat: Chat) -> Chat:
    """Change messages of the role `developer` to the role `system`, which most templates support.

    OpenAI renamed the role, but models were trained with the older name.
    """
    return chat._replace(
        messages=[
            {**m, "role": "system"} if m.get("role") == "developer" else m for m in chat.messages
        ]
    )


def merge_first_systems(chat: Chat) -> Chat:
    """Merge the system messages at the beginning of a conversation into one.

    Many templates accept exactly one system message, and only in front.
    """
    num = next((i for i, m in enumerate(chat.messages) if not _is_system(m)), len(chat.messages))
    return chat._replace(messages=_one_system(chat.messages[:num]) + chat.messages[num:])


def later_systems_as_user(chat: Chat) -> Chat:
    """Change the role of later system messages to `user`, without moving them.

    Agents append such messages while they work.  In front they would change the prompt from its beginning, and nothing of it
    would be in the prefix cache any more.
    """
    num = next((i for i, m in enumerate(chat.messages) if not _is_system(m)), len(chat.messages))
    later = [{**m, "role": "user"} if _is_system(m) else m for m in chat.messages[num:]]
    return chat._replace(messages=chat.messages[:num] + later)


def system_in_front(chat: Chat) -> Chat:
    """Merge all system messages into one in front of the others.

    Used if a template refuses system messages in the middle of a conversation.
    """
    others = [m for m in chat.messages if not _is_system(m)]
    return chat._replace(messages=_one_system([m for m in chat.messages if _is_system(m)]) + others)


def system_in_user(chat: Chat) -> Chat:
    """Put the system's text in front of the first text of the user.

    Used for templates without a system role, such as Gemma's. The conversation keeps its order otherwise.
    """
    systems = _one_system([m for m in chat.messages if _is_system(m)])
    others = [m for m in chat.messages if not _is_system(m)]
    if not systems:
        return chat
    if not others or others[0].get("role") != "user":
        return chat._replace(messages=[{**systems[0], "role": "user"}, *others])
    first, *rest = others
    merged = {**first, "content": _joined([systems[0].get("content"), first.get("content")])}
    return chat._replace(messages=[merged, *rest])


def merge_neighbours(chat: Chat) -> Chat:
    """Merge adjacent messages of one role.

    Some templates require user and assistant to alternate.  Results of tools are never merged, since each has its own
    call.
    """
    merged: Messages = []
    for message in chat.messages:
        last = merged[-1] if merged else {}
        is_alike = message.get("role") == last.get("role") and message.get("role") != "tool"
        if not is_alike:
            merged.append(message)
            continue
        both = {
            **last,
            **message,
            "content": _joined([last.get("content"), message.get("content")]),
        }
        if calls := _calls(last) + _calls(message):
            both["tool_calls"] = calls
        merged[-1] = both
    return chat._replace(messages=merged)


def split_calls(chat: Chat) -> Chat:
    """Give each tool call a message of its own, followed by its result.

    Used for templates that accept only one call in a message.
    """
    made: Messages = []
    rest = list(chat.messages)
    while rest:
        message = rest.pop(0)
        calls = _calls(message)
        if len(calls) < 2:
            made.append(message)
            continue
        num = next((i for i, m in enumerate(rest) if m.get("role") != "tool"), len(rest))
        results, rest = rest[:num], rest[num:]
        for i, call in enumerate(calls):
            bare = {key: value for key, value in message.items() if key != "content" or i == 0}
            made.append({**bare, "tool_calls": [call]})
            own = [m for m in results if m.get("tool_call_id") == call.get("id")]
            made += own
            results = [m for m in results if m not in own]
        made += results
    return chat._replace(messages=made)


def tools_as_text(chat: Chat) -> Chat:
    """Describe tools, calls and results in plain text.

    Calls have the form of the dialect `json`, so calls in the answer can still be parsed.  Used for templates without
    tools.
    """
    messages: Messages = []
    names: dict[Any, Any] = {}
    for message in chat.messages:
        if calls := _calls(message):
            names |= {call.get("id"): _function(call).get("name") for call in calls}
            text = "; ".join(_call_text(call) for call in calls)
            content = message.get("content")
            bare = {key: value for key, value in message.items() if key != "tool_calls"}
            messages.append({**bare, "content": _joined([content, text])})
        elif message.get("role") == "tool":
            name = names.get(message.get("tool_call_id"), message.get("name"))
            head = f"Result of the tool {name}:" if name else "Result of a tool:"
            content = _joined([head, message.get("content") or ""], "\n")
            messages.append({"role": "user", "content": content})
        else:
            messages.append(message)
    if not chat.tools:
        return Chat(messages)
    text = "\n".join([TOOLS_HEAD, *map(_tool_text, chat.tools)]) + GAP + TOOLS_RULES
    place = next((i for i, m in enumerate(messages[:1]) if _is_system(m)), None)
    if place is None:
        return Chat([{"role": "system", "content": text}, *messages])
    first = messages[0]
    return Chat([{**first, "content": _joined([first.get("content"), text])}, *messages[1:]])


_SYSTEM_STEPS: tuple[tuple[Step, ...], ...] = (
    (),
    (developer_as_system,),
    (merge_first_systems,),
    (merge_first_systems, later_systems_as_user),
    (system_in_front,),
    (later_systems_as_user, system_in_user),
    (system_in_user,),
)


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _one_system(messages: Iterable[Message]) -> Messages:
    contents = [m.get("content") for m in messages]
    return [{"role": "system", "content": _joined(contents)}] if contents else []


def _joined(contents: Iterable[Any], gap: str = GAP) -> Any:
    """Join contents: into text, or into a list of parts if one of them is a list."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return gap.join(given)
    parts: list[Any] = []
    for content in given:
        parts += [{"type": "text", "text": gap}] if parts else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if is_object(call) else None
    return cast("Mapping[str, Any]", function) if is_object(function) else {}


def _call_text(call: Any) -> str:
    function = _function(call)
    arguments: Any = function.get("arguments") or {}
    return json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)


def _tool_text(tool: Any) -> str:
    return json.dumps(_function(tool) or tool, ensure_ascii=False)


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
