"""The constraints of an output, `StructuredOutputsParams`: a schema, a regular expression, a choice or a grammar."""

from typing import Any, Self, cast

import msgspec

from trouper.errors import TrouperValidationError, invalid

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_SOURCE = 2**18  # characters of a grammar in whatever form


class StructuredOutputsParams(msgspec.Struct, frozen=True):
    """Constrain the output of a request to a schema, an expression, a choice or a grammar.

    Exactly one kind is set.  Names and defaults are vLLM's.

    Attributes:

        json: A JSON schema, as an object or as text.
        regex: An expression that matches the whole output.
        choice: Texts; the output is one of them.
        grammar: A grammar in the language of Lark, or in llama.cpp's EBNF, with the root `start` or `root`.
        json_object: True allows any JSON object.
        structural_tag: Text in which tags are followed by a schema: `{"structures": …, "triggers": …}`.
        disable_any_whitespace: Write JSON without white space between its tokens.
        disable_additional_properties: Objects have only the properties in their schema.
        whitespace_pattern: An expression for the white space between the tokens of JSON; by default at most a
            newline and sixteen blanks.

    Raises:

        TrouperValidationError: none or several kinds are set, or one has a wrong type.
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
        """Return the same object, because it is frozen: a schema is large to copy, and copies are made on an event loop."""
        return self

    @property
    def kind(self) -> str:
        """The name of the one field that constrains the output.

        The constructor ensures that exactly one constraint is set, such as `json`, `regex`,
        `choice` or `grammar`.
        """
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
