"""Rewrite JSON schemas of popular libraries into schemas that the compiler accepts.  Pure.

The rewriting never admits JSON that the original schema forbids.  It drops keywords without effect, replaces unknown
keywords by equivalent ones, and narrows bounds beyond the compiler's numbers.  The compiler refuses the rest by name.

`work_of` estimates the work that the compiler does not limit itself.  Measured on one core: 2,000 properties of one
object take 0.2 s and 4,000 take 0.8 s, so the time is quadratic.  A `multipleOf` takes steps in its value, 0.14 s for
100,003 but 0.3 ms for any power of ten.  Merged schemas (`allOf`) take their least common multiple: 3.4 s for 997 and 991.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, cast

Schema = dict[str, Any]
# Whether a pattern matches none but these names.
IsEmpty = Callable[[str, list[str]], bool]
# Keywords under which names of the caller's own stand, and those under which data stands.
NAMED, DATA = (
    frozenset({"properties", "patternProperties", "$defs", "definitions"}),
    frozenset({"const", "enum", "default", "examples"}),
)
FORMATS = frozenset(  # that the compiler knows; by the standard another one says nothing
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
HEX = "[0-9a-fA-F]"
NAME_PATTERNS = {  # formats of keys, which only a pattern can say
    "uuid": f"^{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}$",
    "date": r"^\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))$",
}
LARGEST_INTEGER = 2**62  # the compiler reads bounds as floats, and fails at the edge of 64 bits
LARGEST_FLOAT = 1e15  # beyond, the compiler's numbers have no digit behind the point
FINITE = 1.7e308  # every number that a float64 holds is within
MAX_DIGITS = 40  # of a decimal, before and behind its point
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Patterns with look-ahead that libraries write, in other words; pydantic's of decimals first.
_DECIMAL = r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
_PLAIN = re.compile(
    _DECIMAL + r"(?P<whole>\\d\*)\\\.\?(?P<part>\\d(?:\*|\{0,\d+\}))(?P<zeros>(?:0\*)?)\$"
)
_COUNTED = re.compile(
    _DECIMAL + r"\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<most>\d+)\}0\*\$\)"
    r"\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,(?P<part>\d+)\})0\*\$\)"
)
_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
OTHER_WORDS = {  # zod's
    _EMAIL: r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}
_LOOK_AHEAD = re.compile(r"\^\(\?=((?:[^()\\]|\\.|\[(?:[^\]\\]|\\.)*\])*)\)(.*)", re.DOTALL)


def rewritten(schema: Schema, is_empty: IsEmpty | None = None) -> Schema:
    """Return an equivalent schema that the compiler accepts, if there is one.

    Args:
        is_empty: returns whether a pattern matches nothing except these names.
    """
    return _Rewriter(schema, is_empty).schema(schema)


class _Rewriter:
    def __init__(self, root: Schema, is_empty: IsEmpty | None) -> None:
        self._root = root
        self._is_empty = is_empty

    def schema(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self.schema(item) for item in cast("list[Any]", given)]
        if not isinstance(given, dict):
            return given
        found: Schema = {
            name: value
            if name in DATA
            else {key: self.schema(inner) for key, inner in cast("Schema", value).items()}
            if name in NAMED and isinstance(value, dict)
            else self.schema(value)
            for name, value in cast("Schema", given).items()
        }
        for change in (_format, _bounds, _idle_keywords, self._property_names, _pattern):
            found = change(found)
        return self._pattern_properties(found)

    def _property_names(self, given: Schema) -> Schema:
        """Say what keys may be by `properties` or `patternProperties`."""
        names = given.get("propertyNames")
        if names is None:
            return given
        names = _resolved(names, self._root)
        rest = {name: value for name, value in given.items() if name != "propertyNames"}
        if names is True or (isinstance(names, dict) and not names.keys() - _SAYS_NOTHING):
            return rest
        if not isinstance(names, dict) or "patternProperties" in given:
            return given
        value = given.get("additionalProperties", True)
        own = cast("Schema", given.get("properties") or {})
        named = cast("Schema", names)
        choices: Any = [named["const"]] if "const" in named else named.get("enum")
        if value is False:
            return rest
        if isinstance(choices, list):
            keys = [key for key in cast("list[Any]", choices) if isinstance(key, str)]
            properties = {**dict.fromkeys(keys, value), **own}
            return {**rest, "properties": properties, "additionalProperties": False}
        pattern = _names_pattern(cast("Schema", names))
        if pattern is None:
            return given
        return {**rest, "patternProperties": {pattern: value}, "additionalProperties": False}

    def _pattern_properties(self, given: Schema) -> Schema:
        """Drop the patterns that only declared properties match: no other key could follow."""
        patterns, declared = given.get("patternProperties"), given.get("properties")
        if (
            not isinstance(patterns, dict)
            or not isinstance(declared, dict)
            or self._is_empty is None
        ):
            return given
        names = list(cast("Schema", declared))
        kept = {p: s for p, s in cast("Schema", patterns).items() if not self._is_empty(p, names)}
        found = {name: value for name, value in given.items() if name != "patternProperties"}
        properties = dict(cast("Schema", declared))
        for pattern, schema in cast("Schema", patterns).items():
            if pattern not in kept:  # what it says of the declared ones still holds
                for name in names:
                    if _matches(pattern, name):
                        properties[name] = {"allOf": [properties[name], schema]}
        return {**found, "properties": properties, **({"patternProperties": kept} if kept else {})}


_SAYS_NOTHING = {"type", "title", "description", "$comment", "examples", "default"}


def _names_pattern(names: Schema) -> str | None:
    """Return the pattern of keys, where one says all; or None if there is none."""
    given = names.keys() - _SAYS_NOTHING
    if given <= {"pattern", "format"} and isinstance(names.get("pattern"), str):
        return names["pattern"]
    if given == {"format"}:
        return NAME_PATTERNS.get(str(names["format"]))
    if given <= {"minLength", "maxLength"}:
        return f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _format(given: Schema) -> Schema:
    kind = given.get("format")
    if not isinstance(kind, str) or kind in FORMATS:
        return given
    rest = {name: value for name, value in given.items() if name != "format"}
    if kind == "ipvanyaddress" and "anyOf" not in rest:
        return {**rest, "anyOf": [{"type": "string", "format": f} for f in ("ipv4", "ipv6")]}
    return rest


def _bounds(given: Schema) -> Schema:
    """Drop bounds that every number is within, and narrow those that the compiler's numbers do not reach."""
    found = dict(given)
    most = LARGEST_INTEGER if given.get("type") == "integer" else LARGEST_FLOAT
    for name in BOUNDS:
        bound = given.get(name)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) <= most:
            continue
        is_below = name.endswith("inimum")
        if abs(bound) >= FINITE and (bound < 0) == is_below:
            del found[name]
        elif (bound < 0) == is_below:
            found[name] = -most if is_below else most
    return found


def _idle_keywords(given: Schema) -> Schema:
    """Drop keywords that allow everything."""
    found = dict(given)
    if found.get("uniqueItems") is False or found.get("maxItems") in (0, 1):
        found.pop("uniqueItems", None)
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if found.get(name) == {}:
            del found[name]
    combined = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else")
    if found.get("unevaluatedProperties") is True:
        del found["unevaluatedProperties"]
    if "unevaluatedProperties" in found and not any(name in found for name in combined):
        found.setdefault("additionalProperties", found.pop("unevaluatedProperties"))
    return found


def _pattern(given: Schema) -> Schema:
    """Write a pattern without look-ahead if possible."""
    pattern = given.get("pattern")
    if not isinstance(pattern, str):
        return given
    if (flat := flattened(pattern)) != pattern:
        return _pattern({**given, "pattern": flat})
    if pattern in OTHER_WORDS:
        return {**given, "pattern": OTHER_WORDS[pattern]}
    if (decimal := _decimal(pattern)) is not None:
        return {**given, "pattern": decimal}
    more: list[Schema] = []
    while found := _LOOK_AHEAD.fullmatch(pattern):
        more.append({"type": "string", "pattern": f"^(?:{found[1]})"})
        pattern = "^" + found[2]
    if not more:
        return given
    parts = [*cast("list[Any]", given.get("allOf") or []), *more]
    return {**given, "pattern": pattern, "allOf": parts}


def _decimal(pattern: str) -> str | None:
    r"""Write a pattern of pydantic's decimals so that a digit must be somewhere; None: it is another pattern."""
    if found := _PLAIN.fullmatch(pattern):
        part, zeros = found["part"], found["zeros"]
        at_least_one = part.replace("*", "+").replace("{0,", "{1,")
        ways = [rf"\d+\.?{part}{zeros}", rf"\.?{at_least_one}{zeros}", r"\.?0+" if zeros else ""]
        return _signed(ways)
    if not (found := _COUNTED.fullmatch(pattern)):
        return None
    whole, most = int(found["whole"]), min(int(found["most"]) - 1, MAX_DIGITS)
    places = (
        [(whole, min(int(found["part"]), most))]
        if found["part"]
        else [(n, most - n) for n in range(most + 1)]
    )
    ways = [r"0+", *_digits(whole)]
    for before, behind in places:
        ends = rf"\.\d{{0,{behind}}}0*"
        ways += ["0+" + rf"\d{{0,{before}}}{ends}", *(w + ends for w in _digits(before))]
        ways += [rf"\.{w}0*" for w in _digits(behind)]
    return _signed([*ways, rf"0+\d{{0,{whole}}}", r"\.0+"])


def _digits(most: int) -> list[str]:
    return [rf"\d{{1,{most}}}"] if most else []


def _signed(ways: list[str]) -> str:
    return f"^[+-]?(?:{'|'.join(dict.fromkeys(filter(None, ways)))})$"


def _resolved(given: Any, root: Schema) -> Any:
    """Follow a reference into the same schema; what leads nowhere stays."""
    for _ in range(8):
        reference: Any = cast("Schema", given).get("$ref") if isinstance(given, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for name in reference[2:].split("/"):
            key = name.replace("~1", "/").replace("~0", "~")
            target = (
                cast("Mapping[str, Any]", target).get(key) if isinstance(target, dict) else None
            )
        given = target
    return cast("Any", given)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


_ATOM = r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|[^\\()\[\]{}|*+?^$]"
_COUNT = r"\{{(?P<{0}>\d+)(?P<comma_{0}>,(?P<most_{0}>\d*))?\}}"
_NESTED = re.compile(
    rf"\((?:\?:)?(?P<atom>{_ATOM}){_COUNT.format('inner')}\){_COUNT.format('outer')}(?![*+?{{])"
)


def flattened(pattern: str) -> str:
    r"""Merge nested repetitions of a pattern, for example `(x{1,50}){1,50}` into `x{1,2500}`.

    The compiler needs exponentially many states for the nested form. The result matches the same texts.
    """
    before = ""
    while before != pattern:
        before, pattern = pattern, _NESTED.sub(_one_count, pattern)
    return pattern


def _one_count(found: re.Match[str]) -> str:
    inner, outer = (_range(found, name) for name in ("inner", "outer"))
    least, most = inner[0] * outer[0], None
    if inner[1] is not None and outer[1] is not None:
        most = inner[1] * outer[1]
    # lengths of n and of n + 1 repetitions must leave no gap between them, from the least n on
    reach = inner[1]
    has_gap = reach is not None and inner[0] * (outer[0] + 1) > reach * outer[0] + 1
    if has_gap and outer[0] != outer[1]:
        return found[0]
    return f"{found['atom']}{{{least},{'' if most is None else most}}}"


def _range(found: re.Match[str], name: str) -> tuple[int, int | None]:
    least = int(found[name])
    if found[f"comma_{name}"] is None:
        return least, least
    most = found[f"most_{name}"]
    return least, int(most) if most else None


STEPS_OF_MULTIPLE = 40  # so that 100,000 of it are as dear as 2,000 properties
MAX_WORK = 4e6  # 0.2 s
LARGEST = 10**9  # of a multiple; a larger one is as dear


def work_of(schema: Any) -> float:
    """Estimate the steps of a schema that the compiler does not count.

    Whatever stands under the name of a keyword counts, also in a structural tag, or where it is data.
    """
    squares, multiples, common = 0, 0, 1
    for node in _mappings(schema):
        properties = node.get("properties")
        if isinstance(properties, Mapping):
            squares += len(cast("Mapping[str, Any]", properties)) ** 2
        multiple = _multiple(node.get("multipleOf"))
        multiples += multiple - 1
        common = min(math.lcm(common, multiple), LARGEST)
    return squares + STEPS_OF_MULTIPLE * float(max(multiples, common - 1))


def _multiple(value: Any) -> int:
    """Return the steps of a `multipleOf`: its digits as a number, and 1 for a power of ten or what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1
    digits = "".join(map(str, Decimal(repr(value)).as_tuple().digits))
    return 1 if digits.strip("0") in ("", "1") else min(int(digits), LARGEST)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all objects in a JSON value, whatever its depth."""
    level: list[Any] = [value]
    while level:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                found = cast("Mapping[str, Any]", item)
                yield found
                inner += found.values()
            elif isinstance(item, list | tuple):
                inner += cast("list[Any]", item)
        level = inner
