"""Define `StructuredOutputsParams`, which constrains an output to a schema, a regular expression, a choice or a grammar."""

from typing import Any, Self, cast

import msgspec

from trouper.errors import TrouperValidationError, invalid

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Maximum number of characters of a constraint of any kind.
MAX_SOURCE = 2**18


class StructuredOutputsParams(msgspec.Struct, frozen=True):
    """Constrain the output of a request to a schema, a regular expression, a choice or a grammar.

    Exactly one kind is set.  Names and defaults are vLLM's.

    Attributes:

        json: A JSON schema, as an object or as text.
        regex: A regular expression that matches the whole output.
        choice: Texts; the output is one of them.
        grammar: A grammar in Lark's syntax with the root `start`, or in llama.cpp's GBNF with the root `root`.
        json_object: True allows any JSON object.
        structural_tag: Tags after which the text must match a schema: `{"structures": …, "triggers": …}`.
        disable_any_whitespace: Forbid white space between the tokens of JSON.
        disable_additional_properties: Forbid properties that are not in an object's schema.
        whitespace_pattern: A regular expression for the white space between the tokens of JSON; by default at most a
            newline and sixteen blanks.

    Raises:

        TrouperValidationError: no or several constraints are set, or one has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            rule = f"exactly one of {', '.join(KINDS)} must be set"
            raise invalid("structured_outputs", rule, kinds or None)
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise _wrong(name, "text")
        if not isinstance(cast("Any", self.json), str | dict | None):
            raise _wrong("json", "a schema, as a dict or as text")
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise _wrong(name, "True or False")
        self._check_choice()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same object, which is frozen. Copying a large schema would block the event loop."""
        return self

    @property
    def kind(self) -> str:
        """The name of the field that is set, such as `json` or `regex`.  The constructor ensures that there is exactly one."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        given = cast("Any", self.choice)
        if not isinstance(given, list) or not given:
            raise _wrong("choice", "a list of at least one text")
        if not all(isinstance(text, str) for text in cast("list[Any]", given)):
            raise _wrong("choice", "a list of texts")


def _wrong(name: str, rule: str) -> TrouperValidationError:
    return TrouperValidationError(
        f"structured_outputs.{name} must be {rule}", parameter="structured_outputs"
    )
