"""A tokenizer's rules as the compiler of grammars is to see them: no text spells an added token.  Pure.

The compiler spells fixed text by the tokenizer's own rules.  With them a constant such as `<|im_end|>` would become the token that
ends the answer, and `<think>` one that no text may hold.  Here added tokens have names that no text has, and keep their ids.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

from msgspec import Raw
from msgspec.json import decode, encode

NAME = "<\U0010ffff{}>"  # with a code point of no character
_LARK = re.compile(
    r"""(?P<kept>"(?:[^"\\]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*)|<(?P<name>[^<>\s\["]+)>"""
)


def compiler_rules(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` whose added tokens no text spells.

    Those that are no special tokens and in the model's own vocabulary, such as runs of blanks, are text and stay so.
    """
    # Only what changes is parsed: the merges are the greater part, and each call of the parser holds the interpreter.
    rules = decode(tokenizer_json, type=dict[str, Raw])
    model = decode(rules.get("model", b"{}"), type=dict[str, Raw])
    vocabulary: Any = decode(model.get("vocab", b"{}"))
    known = (
        set(cast("dict[str, int]", vocabulary))
        if isinstance(vocabulary, dict)
        else {piece for piece, *_ in vocabulary}
    )
    names: dict[str, str] = {}
    kept: list[Any] = []
    for token in decode(rules.get("added_tokens", b"[]")):
        if token["special"] or token["content"] not in known:
            names[token["content"]] = NAME.format(token["id"])
            kept.append({**token, "content": names[token["content"]], "special": True})
    changed: dict[str, Any] = {}
    if isinstance(vocabulary, dict):
        plain = cast("dict[str, int]", vocabulary)
        changed["vocab"] = {names.get(text, text): index for text, index in plain.items()}
    else:
        changed["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
    if "unk_token" in model and (unknown := decode(model["unk_token"])) in names:
        changed["unk_token"] = names[unknown]
    own = {"model": {**model, **changed}} if "model" in rules else {}
    # The post-processor names tokens, and concerns whole prompts only.
    return encode({**rules, **own, "added_tokens": kept, "post_processor": None}).decode()


def with_token_ids(lark: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar in Lark with the ids of tokens, `<[2]>`, in place of their names, `<|im_end|>`."""

    def replaced(found: re.Match[str]) -> str:
        if found["kept"] is not None:
            return found[0]
        token = token_ids.get(found[0])
        return found[0] if token is None else f"<[{token}]>"

    return _LARK.sub(replaced, lark)
