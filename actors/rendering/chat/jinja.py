"""The jinja environment of chat templates: sandboxed, and equal to transformers' in what it renders.

Templates come with models and sometimes with requests: they are foreign code.  They see plain json data
and the few helpers below, nothing else.  Only the processes of `template_worker.py` import this.
"""

import json
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


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
