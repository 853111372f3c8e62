"""The table of dialects: how models mark reasoning and tool calls.

A new format needs a row here and a golden file.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

# Detects the dialect from the model's chat template.
AUTO = "auto"

Span = tuple[str, str]  # opening and closing mark
Body = Literal["object", "array", "named", "tagged", "python", "literals", "channels"]
# The form of call ids: any; nine letters and digits; or `functions.name:0`, numbered through the conversation.
IdForm = Literal["random", "letters", "numbered"]


class Tags(msgspec.Struct, frozen=True):
    """The marks of a call with arguments in tags, one for each key.

    For example `<parameter=key>value</parameter>`: `key` is the mark before a key, `key_end` the one behind it, and
    so on.
    """

    # Before the name of the function; "" if the call's own mark precedes it.
    name: str
    name_end: tuple[str, ...]
    key: str
    key_end: str
    value_end: tuple[str, ...]
    # Behind the last argument; "" if the call's own mark ends it.
    end: str
    # Before the value, unless the end of the key precedes it.
    value: str = ""
    # Whether the key declares if the value is a string.
    has_kind: bool = False


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table.

    The marks of a call may be "": then the whole answer is the call, or the call has no closing mark.
    """

    name: str
    aliases: tuple[str, ...] = ()  # vLLM's names
    reasoning_aliases: tuple[str, ...] = ()
    reasoning: Span | None = ("<think>", "</think>")
    section: Span = ("", "")  # around all calls
    call: Span = ("", "")  # around one
    body: Body = "object"
    name_end: tuple[str, ...] = ()  # between name and JSON
    # Introduces an id behind the name, which is skipped.
    call_id: str = ""
    name_prefix: str = ""  # removed from names
    literal_quote: str = ""  # around strings
    tags: Tags | None = None
    separators: tuple[str, ...] = ()  # between calls
    # The key of the arguments that the dialect writes; the parser accepts `parameters` as well.
    arguments_key: str = "arguments"
    # The form that the chat template expects in conversations.
    id_form: IdForm = "random"

    @property
    def marks(self) -> tuple[str, ...]:
        """The strings that begin the calls of an answer.

        A chat template that contains the first one has this dialect.
        """
        return tuple(mark for mark in (self.section[0] or self.call[0],) if mark)

    def with_mark(self, mark: str) -> "Dialect":
        """Return the dialect with another mark before all calls."""
        return msgspec.structs.replace(self, section=(mark, ""))


_FUNCTION = Tags(
    name="<function=",
    name_end=(">",),
    key="<parameter=",
    key_end=">",
    value_end=("\n</parameter>", "</parameter>"),
    end="</function>",
)


def _invoke(prefix: str) -> Tags:
    return Tags(
        name=f'<{prefix}invoke name="',
        name_end=('">',),
        key=f'<{prefix}parameter name="',
        key_end=">",
        value_end=(f"</{prefix}parameter>",),
        end=f"</{prefix}invoke>",
        has_kind=bool(prefix),
    )


# In the order in which a chat template is searched: rows with longer or rarer marks come first.
DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        name="openai",
        aliases=("openai",),
        reasoning_aliases=("openai_gptoss",),
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        call=("<|channel|>", ""),
        body="channels",
    ),
    Dialect(
        name="deepseek_v32",
        aliases=("deepseek_v32",),
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        body="tagged",
        tags=_invoke("｜DSML｜"),
    ),
    Dialect(
        name="deepseek_v31",
        aliases=("deepseek_v31",),
        reasoning_aliases=("deepseek_v3",),
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        body="named",
        name_end=("<｜tool▁sep｜>",),
    ),
    Dialect(
        name="kimi_k2",
        aliases=("kimi_k2",),
        reasoning_aliases=("kimi_k2",),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        body="named",
        name_end=("<|tool_call_argument_begin|>",),
        name_prefix="functions.",
        id_form="numbered",
    ),
    Dialect(
        name="minimax_m2",
        aliases=("minimax_m2",),
        reasoning_aliases=("minimax_m2",),
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        body="tagged",
        tags=_invoke(""),
    ),
    Dialect(
        name="seed_oss",
        aliases=("seed_oss",),
        reasoning_aliases=("seed_oss",),
        reasoning=("<seed:think>", "</seed:think>"),
        section=("<seed:tool_call>", "</seed:tool_call>"),
        body="tagged",
        tags=_FUNCTION,
    ),
    Dialect(
        name="glm45",
        aliases=("glm45", "glm47"),
        reasoning_aliases=("glm45",),
        call=("<tool_call>", "</tool_call>"),
        body="tagged",
        tags=Tags(
            name="",
            name_end=("\n", "<arg_key>", "</tool_call>"),
            key="<arg_key>",
            key_end="</arg_key>",
            value="<arg_value>",
            value_end=("</arg_value>",),
            end="",
        ),
    ),
    Dialect(
        name="qwen3_coder",
        aliases=("qwen3_coder", "qwen3_xml"),
        section=("<tool_call>", "</tool_call>"),
        body="tagged",
        tags=_FUNCTION,
    ),
    Dialect(
        name="granite",
        aliases=("granite", "granite-20b-fc"),
        reasoning_aliases=("granite",),
        section=("<|tool_call|>", ""),
        body="array",
    ),
    Dialect(
        name="gemma4",
        aliases=("gemma4",),
        reasoning_aliases=("gemma4",),
        reasoning=("<|channel>thought\n", "<channel|>"),
        call=("<|tool_call>", "<tool_call|>"),
        body="literals",
        literal_quote='<|"|>',
    ),
    Dialect(
        name="functiongemma",
        aliases=("functiongemma",),
        call=("<start_function_call>", "<end_function_call>"),
        body="literals",
        literal_quote="<escape>",
    ),
    Dialect(
        name="mistral",
        aliases=("mistral",),
        reasoning_aliases=("mistral",),
        reasoning=("[THINK]", "[/THINK]"),
        call=("[TOOL_CALLS]", ""),
        body="named",
        name_end=("[ARGS]",),
        call_id="[CALL_ID]",
        id_form="letters",
    ),
    Dialect(
        name="lfm2",
        aliases=("lfm2",),
        section=("<|tool_call_start|>", "<|tool_call_end|>"),
        body="python",
    ),
    Dialect(
        name="llama4_pythonic",
        aliases=("llama4_pythonic",),
        section=("<|python_start|>", "<|python_end|>"),
        body="python",
    ),
    Dialect(
        name="olmo3",
        aliases=("olmo3",),
        reasoning_aliases=("olmo3",),
        section=("<function_calls>", "</function_calls>"),
        body="python",
    ),
    Dialect(
        name="phi4_mini_json",
        aliases=("phi4_mini_json",),
        section=("functools", ""),
        body="array",
    ),
    Dialect(
        name="llama3_json",
        aliases=("llama3_json", "llama4_json"),
        call=("<|python_tag|>", ""),
        separators=(";",),
        arguments_key="parameters",
    ),
    Dialect(
        name="hermes",
        aliases=("hermes", "qwen2.5", "qwen3", "longcat"),
        reasoning_aliases=("deepseek_r1", "qwen3", "step3"),
        call=("<tool_call>", "</tool_call>"),
    ),
    Dialect(name="pythonic", aliases=("pythonic",), body="python"),
    Dialect(name="json", aliases=("json",), separators=(";",)),
)


def by_name(dialects: Iterable[Dialect]) -> dict[str, Dialect]:
    """Return the dialects by their own names and vLLM's.

    Options such as `--tool-call-parser` accept both, so that command lines for vLLM work unchanged.
    """
    return {name: each for each in dialects for name in (each.name, *each.aliases)}


def by_reasoning_name(dialects: Iterable[Dialect]) -> dict[str, Dialect]:
    """Return the dialects by vLLM's names of reasoning parsers.

    `--reasoning-parser` accepts them.  A dialect without reasoning marks of its own is included, under its own name.
    """
    return {name: each for each in dialects for name in (each.name, *each.reasoning_aliases)}


BY_NAME: Mapping[str, Dialect] = by_name(DIALECTS)


def detect(chat_template: str, dialects: Iterable[Dialect] = DIALECTS) -> Dialect:
    """Detect the dialect of a chat template: the first row with all its distinctive marks in the template, or else `json`."""
    for dialect in dialects:
        marks = [*dialect.marks]
        if dialect.tags is not None:
            marks.append(dialect.tags.key)
        if marks and all(mark in chat_template for mark in marks):
            return dialect
    return BY_NAME["json"]
