"""A tokenizer's rules as the compiler of grammars is to see them: no text spells an added token.  Pure.

The compiler spells fixed text by the tokenizer's own rules.  With them a constant such as `<|im_end|>` would become the token that
ends the answer, and `<think>` one that no text may hold.  Here added tokens have names that no text has, and keep their ids.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, cast

NAME = "<\U0010ffff{}>"  # with a code point of no character
_LARK = re.compile(
    r"""(?P<kept>"(?:[^"\\]|\\.)*"|/(?![/*])(?:[^/\\\n]|\\.)+/|//[^\n]*)|<(?P<name>[^<>\s\["]+)>"""
)


def compiler_rules(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` whose added tokens no text spells.

    Those that are no special tokens and in the model's own vocabulary, such as runs of blanks, are text and stay so.
    """
    rules: dict[str, Any] = json.loads(tokenizer_json)
    vocabulary: Any = rules.get("model", {}).get("vocab", {})
    known: set[str]
    if isinstance(vocabulary, dict):
        known = set(cast("dict[str, int]", vocabulary))
    else:
        known = {piece for piece, *_ in vocabulary}
    names: dict[str, str] = {}
    kept: list[Any] = []
    for token in rules.get("added_tokens", ()):
        if token["special"] or token["content"] not in known:
            names[token["content"]] = NAME.format(token["id"])
            kept.append({**token, "content": names[token["content"]], "special": True})
    rules["added_tokens"] = kept
    if isinstance(vocabulary, dict):
        plain = cast("dict[str, int]", vocabulary)
        rules["model"]["vocab"] = {names.get(text, text): index for text, index in plain.items()}
    elif "model" in rules:
        rules["model"]["vocab"] = [[names.get(text, text), *rest] for text, *rest in vocabulary]
    if rules.get("model", {}).get("unk_token") in names:
        rules["model"]["unk_token"] = names[rules["model"]["unk_token"]]
    rules["post_processor"] = None  # it names tokens, and concerns whole prompts only
    return json.dumps(rules)


def with_token_ids(lark: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar in Lark with the ids of tokens, `<[2]>`, in place of their names, `<|im_end|>`."""

    def replaced(found: re.Match[str]) -> str:
        if found["kept"] is not None:
            return found[0]
        token = token_ids.get(found[0])
        return found[0] if token is None else f"<[{token}]>"

    return _LARK.sub(replaced, lark)
