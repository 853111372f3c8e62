"""Render conversations with the model's chat template; the text equals that of transformers' `apply_chat_template`.

Templates come with models and sometimes with requests, so they are foreign code.  Their jinja environment is a sandbox: they
see plain JSON data and the few helpers below, nothing else.  Only the processes of `template_worker.py` import this.

Laws.  Rendering is pure: templates, messages and tools of the caller stay unchanged.  Text of the caller never becomes
a control token, whether it is in messages, tools or variables: if it spells one, `BOUNDARY` is inserted after the first
character, and `Tokenizer.encode_pieces` finds no token across a boundary.
"""

import json
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trouper.actors.rendering.arrangements import Arranger, Chat
from trouper.actors.rendering.conversations import (
    IMAGE_MARK,
    MARK,
    is_array,
    is_object,
    past_arguments,
    plain_data,
)
from trouper.actors.rendering.token_stream import BOUNDARY, with_boundaries
from trouper.config.media import AUDIO, IMAGE
from trouper.errors import TrouperValidationError, UnsupportedFeatureError, invalid


class _Generation(Extension):
    """The tag `{% generation %}`, which marks a model's text for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PublicNamespace(Namespace):
    """A namespace without underscored attributes, which lead to the interpreter's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=…)` is legal
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Dict:
    """The function `dict(...)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Create a sandbox with transformers' settings, filters and functions.

    Templates cannot reach attributes with underscores, change objects or read files, and they render as in
    transformers.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    untyped = cast("Any", environment)
    filters: dict[str, Any] = untyped.filters
    names: dict[str, Any] = untyped.globals
    filters["tojson"] = _tojson
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    names["dict"] = _Dict()
    names["namespace"] = _PublicNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} is not allowed on a namespace")


RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is the templates' own
END = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of the message to be continued
TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip


class ChatTemplate:
    """A compiled template.  `special` and `added` are the tokenizer's special and all its added tokens.

    Raises:
        TrouperValidationError: the source is no valid template.
    """

    def __init__(
        self, source: str, special: Collection[str] = (), added: Collection[str] = ()
    ) -> None:
        environment = make_environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise TrouperValidationError(
                f"the chat template cannot be compiled: {error}", parameter="chat_template"
            ) from error
        self.variables = frozenset(meta.find_undeclared_variables(tree)) - RESERVED
        self.takes_parts = _iterates_content(tree)
        tests = list(tree.find_all(nodes.Test))
        self._tests_for_strings = any(t.name == "string" for t in tests)
        # DeepSeek's, for one, write the calls of a message only if its content is none
        self._tests_for_none = any(t.name == "none" and _is_content(t.node) for t in tests)
        self._source = source
        # Tokens such as `<think>` are not flagged special, but a template that writes them means them.
        control = {t for t in added if t in source and not t.isspace()} | set(special)
        self._special = frozenset(t for t in special if len(t) > 1)  # one character has no inside
        self._control = frozenset(t for t in control if len(t) > 1)
        self._special_tokens: Mapping[str, str] = {}
        self._arranger = Arranger(self._text_of)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        needed: Collection[str] = (),
        arranges: bool = False,
    ) -> list[str]:
        """The text of the conversation in pieces; no token may be found across two of them.

        Args:
            variables: the caller's.
            special_tokens: the tokenizer's (`bos_token`, …).
            needed: names of variables that the template must read, unless they ask for nothing.
            arranges: the messages are mapped, merged or moved if the template would drop or refuse some.

        Raises:
            TrouperValidationError: messages of a wrong form, or that the template refuses.
            UnsupportedFeatureError: a part of a message is not text.
        """
        if continue_final_message and add_generation_prompt:
            raise TrouperValidationError(
                "continue_final_message and add_generation_prompt exclude each other",
                parameter="continue_final_message",
            )
        self._check_read(variables or {}, needed)
        self._special_tokens = special_tokens or {}
        with _typed_faults():
            given = [_plain_message(i, message) for i, message in enumerate(messages)]
            if not given:
                raise invalid("messages", "a conversation must not be empty")
            chat = [self._message(i, message) for i, message in enumerate(given)]
            tools, used = plain_data(tools), self._used(variables)
            if arranges:
                options = {**used, "add_generation_prompt": add_generation_prompt}
                arranged = self._arranger.arrange(given, tools, options)
                if arranged.messages != given:
                    chat = [self._message(i, m) for i, m in enumerate(arranged.messages)]
                tools = arranged.tools
            _check_order(chat)
            final = self._mark_end(chat) if continue_final_message else None
            text = self._text(
                messages=chat,
                tools=_with_boundaries(tools, self._control),
                add_generation_prompt=add_generation_prompt,
                variables=_with_boundaries(used, self._control),
            )
        return (text if final is None else _cut_end(text, final)).split(BOUNDARY)

    def _text(self, *, variables: Mapping[str, Any], **fields: Any) -> str:
        special = self._used(self._special_tokens)
        with _typed_faults():
            return self._template.render(**fields, **{"documents": None, **special, **variables})

    def _text_of(self, chat: Chat, options: Mapping[str, Any]) -> str:
        """Render a conversation to see whether the template shows all of it."""
        messages = [self._message(i, message) for i, message in enumerate(chat.messages)]
        adds = options.get("add_generation_prompt", True)
        variables = {k: v for k, v in options.items() if k != "add_generation_prompt"}
        return self._text(
            messages=messages, tools=chat.tools, add_generation_prompt=adds, variables=variables
        )

    def _check_read(self, variables: Mapping[str, Any], needed: Collection[str]) -> None:
        """Refuse variables that the template does not read: they would be dropped without a word."""
        for name in needed:
            if name == "documents" and variables.get(name) and name not in self.variables:
                raise invalid(
                    name, "the chat template has no place for them; put them into a message"
                )
            if name in RESERVED:
                raise invalid("chat_template_kwargs", f"{name} is a field of its own")
            if variables.get(name) and name not in self.variables:
                read = ", ".join(sorted(self.variables))[:400] or "none"
                rule = f"the chat template does not read {name[:64]!r}; it reads {read}"
                raise invalid("chat_template_kwargs", rule)

    def _used(self, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """Copy the variables that the template names, and drop the others."""
        return {k: plain_data(v) for k, v in (variables or {}).items() if k in self.variables}

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy in the form that templates expect."""
        where, role = f"messages[{index}]", message["role"]
        # The model itself writes `<think>` and the like, so an earlier answer may hold them as tokens.
        unwelcome = self._special if role == "assistant" else self._control
        given = {key: value for key, value in message.items() if value is not None}
        clean = _with_boundaries(given, unwelcome)
        if role.isidentifier():  # what templates compare
            clean["role"] = role
        if "content" in clean:
            clean["content"] = self._content(clean["content"], f"{where}.content")
        elif clean.get("tool_calls"):
            clean["content"] = self._no_content()
        reasoning = next((clean[name] for name in REASONING if name in clean), None)
        if reasoning is not None:
            clean = {"thinking": reasoning, **clean, "reasoning_content": reasoning}
        return clean

    def _content(self, content: Any, where: str) -> Any:
        """Return the content as text or as parts, whichever of the two the template was written for."""
        if isinstance(content, str):
            if self.takes_parts and not self._tests_for_strings:
                return [{"type": "text", "text": content}]
            return content
        if not is_array(content):
            raise TrouperValidationError("content must be text or a list of parts", parameter=where)
        parts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
        return parts if self.takes_parts else "\n".join(map(_text_of_part, parts))

    def _no_content(self) -> Any:
        """Return the content of a message that only calls tools, in the form that the template was written for."""
        if self._tests_for_none:
            return None
        return [] if self.takes_parts and not self._tests_for_strings else ""

    def _mark_end(self, chat: list[dict[str, Any]]) -> str:
        """Put END behind the last message's text; return that text."""
        content = chat[-1].get("content")
        if "content" not in self._source or not content:
            raise TrouperValidationError(
                "continue_final_message needs a final message with content", parameter="messages"
            )
        if isinstance(content, str):
            chat[-1]["content"] = content + END
            return content
        text = content[-1]["text"]
        content[-1]["text"] = text + END
        return text


@contextmanager
def _typed_faults() -> Generator[None]:
    """Turn what a template or its data raise into the error of the request."""
    try:
        yield
    except TrouperValidationError:
        raise
    except TEMPLATE_FAULTS as error:
        reason = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
        raise TrouperValidationError(
            f"the chat template refuses this conversation: {reason[:1000]}", parameter="messages"
        ) from error


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    """Return a checked copy of a message with nothing but JSON types in it."""
    message = plain_data(message)
    where = f"messages[{index}]"
    if not is_object(message):
        raise TrouperValidationError("a message must be a dict", parameter=where, value=message)
    if not isinstance(message.get("role"), str):
        raise TrouperValidationError("the role must be a string", parameter=f"{where}.role")
    if message["role"] == "assistant":
        _split_thinking(message, f"{where}.content")
    calls = message.get("tool_calls")
    for i, call in enumerate(calls if is_array(calls) else ()):
        if is_object(call) and call.get("type") == "custom":
            place = f"{where}.tool_calls[{i}].type"
            rule = f"{place}: only calls of functions, not of custom tools"
            raise UnsupportedFeatureError(rule, parameter=place)
        function = call.get("function") if is_object(call) else None
        if is_object(function):
            place = f"{where}.tool_calls[{i}].function.arguments"
            function["arguments"] = past_arguments(function.get("arguments"), place)
    return message


def _split_thinking(message: dict[str, Any], where: str) -> None:
    """Move parts of type `thinking`, which Mistral's clients send, from the content to the reasoning."""
    content = message.get("content")
    parts = content if is_array(content) else []
    thoughts: list[str] = []
    others: list[Any] = []
    for i, part in enumerate(parts):
        if not is_object(part) or part.get("type") != "thinking":
            # Checked here, because behind a removed part its place would be another.
            others.append(_part(part, f"{where}[{i}]"))
            continue
        thought = part.get("thinking")
        texts = (
            [_part(each, f"{where}[{i}].thinking") for each in thought]
            if is_array(thought)
            else None
        )
        text = thought if texts is None else "".join(map(_text_of_part, texts))
        if not isinstance(text, str):
            raise TrouperValidationError(
                "a part must hold text", parameter=f"{where}[{i}].thinking"
            )
        thoughts.append(text)
    if thoughts:
        message["content"] = others
        if not any(message.get(name) for name in REASONING):
            message["reasoning_content"] = "\n".join(thoughts)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not is_object(part):
        raise TrouperValidationError("a part must be a dict", parameter=where)
    kind = part.get("type", "text")
    # The place of embeddings in the prompt, see `prompts/placeholders.py`.
    if kind == "prompt_embeds" and isinstance(part.get("index"), int):
        return {"type": "text", "text": f"{MARK}{part['index']}{MARK}"}
    if kind in (IMAGE, AUDIO) and isinstance(part.get("index"), int):
        return {"type": kind, "index": part["index"]}
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise UnsupportedFeatureError(f"{where}: only text parts, not {kind!r}", parameter=where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise TrouperValidationError("a part must hold text", parameter=f"{where}.text")
    return {"type": "text", "text": text}


def _text_of_part(part: dict[str, Any]) -> str:
    """Return the text of a part for a template without parts: a mark in place of an image or a recording."""
    return IMAGE_MARK if part["type"] in (IMAGE, AUDIO) else part["text"]


def _check_order(chat: Sequence[Mapping[str, Any]]) -> None:
    """Check that no image or recording has moved before another one, since places are assigned to images in order."""
    contents = [m.get("content") for m in chat]
    parts = [part for content in contents if is_array(content) for part in content]
    order = [part["index"] for part in parts if is_object(part) and "index" in part]
    if order != sorted(order):
        rule = "the chat template needs these messages in another order, in which their images or recordings would be mixed up"
        raise invalid("messages", f"{rule}; put these into messages of the user")


def _cut_end(text: str, final: str) -> str:
    """The text up to the end of the message to continue."""
    end = text.rfind(END.strip())
    if end < 0 or final.strip() not in text:
        raise TrouperValidationError(
            "continue_final_message: the template drops the final message's text",
            parameter="messages",
        )
    is_whole = text.startswith(END, end)
    return text[:end] if is_whole else text[:end].rstrip()  # trimmed, so the message's end was too


def _with_boundaries(value: Any, tokens: Collection[str]) -> Any:
    """Put a boundary into each of `tokens` that the strings in `value` spell."""
    if isinstance(value, str):
        return with_boundaries(value.replace(BOUNDARY, "").replace(MARK, ""), tokens)
    if is_object(value):
        # what a template may name is no token, however it is spelled: `m.content`
        return {
            key if str(key).isidentifier() else _with_boundaries(key, tokens): _with_boundaries(
                item, tokens
            )
            for key, item in value.items()
        }
    if is_array(value):
        return [_with_boundaries(item, tokens) for item in value]
    return value


def _iterates_content(tree: nodes.Template) -> bool:
    """Return whether the template loops over a message's content, or over a variable set from it."""
    names: set[str] = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node):
            names.add(assign.target.name)
    loops = tree.find_all(nodes.For)
    return any(_is_content(x) or _name(x) in names for loop in loops for x in _sources(loop.iter))


def _sources(node: nodes.Node) -> Iterator[nodes.Node]:
    """The expression that a loop runs over, with filters and slices taken off."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    yield node


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
    )


def _name(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None
