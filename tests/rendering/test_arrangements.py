"""What a template would drop or refuse is mapped, merged or moved, and never lost without a word."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.rendering.template import ChatTemplate
from trouper.errors import TrouperValidationError

LOOP = "{% for m in messages %}"
KNOWN = LOOP + (
    "{% if m.role == 'system' %}S:{{ m.content }};{% elif m.role == 'user' %}U:{{ m.content }};"
    "{% elif m.role == 'assistant' %}A:{{ m.content }};{% endif %}{% endfor %}"
)
FIRST = (  # a system message is read in front only, and dropped elsewhere
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }};{% endif %}"
    + LOOP
    + "{% if m.role == 'user' %}U:{{ m.content }};{% elif m.role == 'assistant' %}A:{{ m.content }};{% endif %}{% endfor %}"
)
STRICT = (  # a system message in front, then user and assistant in turns
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }};{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role[0] | upper }}:{{ m.content }};{% endfor %}"
)
NO_SYSTEM = (
    LOOP + "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.role[0] | upper }}:{{ m.content | trim }};{% endfor %}"
)
LAST_USER = (  # the system's text is put before the last words of the user
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{{ m.role[0] | upper }}:{% if loop.last %}{{ s }}/{% endif %}{{ m.content }};{% endfor %}"
)
TOOLED = (
    "{% if tools %}T:{{ tools | tojson }};{% endif %}" + LOOP + "{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};{% endfor %}"
)
ONE_CALL = TOOLED.replace(
    "{% for c in",
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}{% for c in",
)
TEXT_ARGUMENTS = TOOLED.replace(
    "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
)
PRINTED_ARGUMENTS = TOOLED.replace(
    "{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}"
)

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


def of(role, content, **fields):
    return {"role": role, "content": content, **fields}


def calling(*calls, content=None):
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
        for id, name, text in calls
    ]
    return of("assistant", content, tool_calls=made)


def shown(source, messages, tools=None, **options):
    options = {"add_generation_prompt": False, **options}
    return "".join(ChatTemplate(source).render(messages, tools=tools, arranges=True, **options))


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (KNOWN, [of("developer", "d"), of("user", "u")], "S:d;U:u;"),
        (KNOWN, [of("system", "s"), of("user", "u"), of("developer", "d")], "S:s;U:u;S:d;"),
        (FIRST, [of("system", "s"), of("developer", "d"), of("user", "u")], "S:s\n\nd;U:u;"),
        (FIRST, [of("system", "s"), of("user", "u"), of("system", "t"), of("user", "v")], "S:s;U:u;U:t;U:v;"),
        (FIRST, [of("user", "u"), of("system", "t")], "U:u;U:t;"),
        (STRICT, [of("system", "s"), of("user", "u"), of("system", "t"), of("assistant", "a")], "S:s;U:u\n\nt;A:a;"),
        (NO_SYSTEM, [of("system", "s"), of("user", "u"), of("assistant", "a"), of("system", "t")], "U:s\n\nu;A:a;U:t;"),
        (STRICT, [of("developer", "d"), of("user", "u")], "S:d;U:u;"),
        (STRICT, [of("system", "s"), of("system", "t"), of("user", "u")], "S:s\n\nt;U:u;"),
        (STRICT, [of("user", "u"), of("user", "v")], "U:u\n\nv;"),
        (STRICT, [of("user", "u"), of("assistant", "a"), of("assistant", "b"), of("user", "v")], "U:u;A:a\n\nb;U:v;"),
        (STRICT, [of("user", "u"), of("system", "t"), of("user", "v")], "U:u;S:t;U:v;"),
        (NO_SYSTEM, [of("system", "s"), of("user", "u"), of("assistant", "a")], "U:s\n\nu;A:a;"),
        (NO_SYSTEM, [of("developer", "d"), of("system", "s"), of("user", "u")], "U:d\n\ns\n\nu;"),
        (NO_SYSTEM, [of("system", "s"), of("assistant", "a")], "U:s;A:a;"),
        (LAST_USER, [of("system", "s"), of("user", "u"), of("assistant", "a"), of("user", "v")], "U:u;A:a;U:s/v;"),
        (KNOWN, [of("user", [{"type": "text", "text": "p"}]), of("developer", [{"type": "text", "text": "q"}])], "U:p;S:q;"),
        (KNOWN, [of("user", "u"), of("user", ""), of("assistant", None)], "U:u;U:;A:None;"),
    ],
)  # fmt: skip
def test_messages_are_arranged_as_the_template_takes_them(source, messages, text):
    if text.endswith("None;"):
        text = text.replace("A:None;", "A:;")
    assert shown(source, messages) == text


@pytest.mark.parametrize("source", [KNOWN, FIRST, STRICT, NO_SYSTEM, LAST_USER, TOOLED])
@settings(max_examples=40)
@given(data=st.data())
def test_every_text_is_in_prompt_or_error_names_it(source, data):
    roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "narrator"])
    messages = [
        of(role, f"text {i}.")
        for i, role in enumerate(data.draw(st.lists(roles, min_size=1, max_size=6)))
    ]
    try:
        text = shown(source, messages)
    except TrouperValidationError as error:
        text = None if str(error.parameter).startswith("messages") else ""
    assert text is None or all(message["content"] in text for message in messages)


def test_conversation_that_template_takes_is_not_touched():
    for source in (KNOWN, TOOLED):
        messages = [of("system", "s"), of("user", "u"), of("user", "v"), of("assistant", "a")]
        plain = "".join(ChatTemplate(source).render(messages, add_generation_prompt=False))
        assert shown(source, messages) == plain


def test_a_message_without_a_place_is_named():
    with pytest.raises(TrouperValidationError, match=r"messages\[1\]: .*role 'narrator'") as caught:
        shown(KNOWN, [of("user", "u"), of("narrator", "n")])
    assert caught.value.parameter == "messages[1]"


def test_what_template_refuses_for_another_reason_keeps_its_words():
    with pytest.raises(TrouperValidationError, match="roles must alternate"):
        shown(STRICT, [of("assistant", "a"), of("user", "u")])


def test_template_that_shows_no_conversation_is_let_alone():
    assert shown("{{ messages | length }}", [of("narrator", "n")]) == "1"


# Tools


@pytest.mark.parametrize("source", [KNOWN, FIRST, STRICT, NO_SYSTEM, LAST_USER])
def test_tools_without_place_are_described_in_prompt(source):
    messages = [
        of("system", "be brief"), of("user", "1 and 2?"),
        calling(("c1", "add", '{"a": 1}'), ("c2", "add", {"a": 2}), content="let me see"),
        of("tool", "three", tool_call_id="c1"), of("tool", "four", tool_call_id="c2"), of("user", "thanks"),
    ]  # fmt: skip
    text = shown(source, messages, [TOOL])
    assert '{"name": "add", "description": "adds", "parameters": {"type": "object"}}' in text
    assert "be brief" in text
    assert (
        'let me see\n\n{"name": "add", "arguments": {"a": 1}}; {"name": "add", "arguments": {"a": 2}}'
        in text
    )
    assert "Result of the tool add:\nthree" in text
    assert "Result of the tool add:\nfour" in text
    assert text.count("thanks") == 1
    without = shown(source, messages[:2])
    assert "add" not in without


def test_tools_that_template_shows_are_left_to_it():
    text = shown(
        TOOLED,
        [of("user", "u"), calling(("c", "add", "{}")), of("tool", "3", tool_call_id="c")],
        [TOOL],
    )
    assert text.startswith('T:[{"type": "function"')
    assert text.endswith("user:u;assistant:<add {}>;tool:3;")


def test_calls_and_results_without_place_are_text_also_without_tools():
    messages = [of("user", "u"), calling(("c", "add", "{}")), of("tool", "3", tool_call_id="c")]
    assert (
        shown(KNOWN, messages)
        == 'U:u;A:{"name": "add", "arguments": {}};U:Result of the tool add:\n3;'
    )


def test_calls_stand_one_by_one_where_template_takes_one():
    messages = [
        of("user", "u"), calling(("c", "add", "{}"), ("d", "sub", "{}"), content="so"),
        of("tool", "4", tool_call_id="d"), of("tool", "3", tool_call_id="c"),
    ]  # fmt: skip
    text = "user:u;assistant:so<add {}>;tool:3;assistant:<sub {}>;tool:4;"
    assert shown(ONE_CALL, messages) == text


@pytest.mark.parametrize("source", [TEXT_ARGUMENTS, PRINTED_ARGUMENTS])
@pytest.mark.parametrize(
    ("given", "text"),
    [('{"a": "é"}', '{"a": "é"}'), ({"a": 1}, '{"a": 1}'), ("", "{}"), (None, "{}")],
)
def test_arguments_are_text_where_template_writes_them_unchanged(source, given, text):
    messages = [of("user", "u"), calling(("c", "add", given)), of("tool", "3", tool_call_id="c")]
    assert shown(source, messages) == f"user:u;assistant:<add {text}>;tool:3;"


def test_control_tokens_in_text_moved_are_still_no_tokens():
    template = ChatTemplate(NO_SYSTEM, ["<eos>"])
    pieces = template.render([of("system", "a<eos>b"), of("user", "u")], arranges=True)
    assert pieces == ["U:a<", "eos>b\n\nu;"]


# Variables

READS = KNOWN + "{% if documents %}{{ documents | tojson }}{% endif %}{{ mood }}"


def test_variables_that_template_does_not_read_are_named():
    for name, value in (
        ("moods", "glad"),
        ("enable_thinking", True),
        ("tools", []),
        ("messages", None),
    ):
        with pytest.raises(TrouperValidationError, match=name) as caught:
            shown(READS, [of("user", "u")], variables={name: value}, needed=[name])
        assert caught.value.parameter == "chat_template_kwargs"
    with pytest.raises(TrouperValidationError, match="no place for them") as caught:
        shown(
            KNOWN, [of("user", "u")], variables={"documents": [{"text": "d"}]}, needed=["documents"]
        )
    assert caught.value.parameter == "documents"


def test_used_or_neutral_template_variables_are_accepted():
    variables = {"documents": [{"text": "d"}], "mood": "glad", "enable_thinking": False}
    text = shown(READS, [of("user", "u")], variables=variables, needed=list(variables))
    assert text == 'U:u;[{"text": "d"}]glad'
    assert shown(READS, [of("user", "u")], variables={"moods": "glad"}) == "U:u;"


@pytest.mark.parametrize("source", [KNOWN, FIRST, NO_SYSTEM])
def test_what_agents_append_leaves_beginning_of_prompt_unchanged(source):
    chat = [of("system", "s"), of("user", "u"), of("system", "t"), of("assistant", "a")]
    before = shown(source, chat)
    assert shown(source, [*chat, of("system", "remember"), of("user", "v")]).startswith(before)
