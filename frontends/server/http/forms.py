"""Decode bodies of type multipart/form-data, as forms and OpenAI's clients send files.  Pure.

A form becomes the same kind of request as a JSON body: each field is checked by the request's type, an unknown field is named,
and a field that would change the answer is refused.  Values of a form are texts, so numbers and booleans are read from them.
"""

from functools import partial
from typing import Any, ClassVar, TypeVar, cast, get_args

import msgspec

from trouper.frontends.server.http.decoding import Decoded, bad_schema
from trouper.frontends.server.shared.errors import HTTPError, clean
from trouper.frontends.server.shared.fields import NONE, Others, check_others

T = TypeVar("T", bound=msgspec.Struct)
# Parts of a form, and bytes of one that is no file.
MAX_PARTS, MAX_TEXT = 64, 64 * 2**10
MAX_NAME = 200


class FormBody:
    """The parts of a form by name: texts, and the bytes of files.

    A name that ends in `[]` has a list, which every part of that name extends.

    Args:
        content_type: the header, which contains the boundary.

    Raises:
        HTTPError: 400 `invalid_form` or `invalid_content_type`.
    """

    # Bytes, whether or not the client names its file.
    files: ClassVar[tuple[str, ...]] = ("file",)

    def __init__(self, body: bytes | memoryview, content_type: bytes) -> None:
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            rule = "the content type must be multipart/form-data with a boundary"
            raise HTTPError(400, "invalid_content_type", rule)
        self.values: dict[str, Any] = {}
        self._options = parse_options_header
        self._num_parts, self._is_whole = 0, False
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()
        try:
            parser = MultipartParser(boundary, cast("Any", self._callbacks()))
            parser.write(bytes(body))
            parser.finalize()
        except HTTPError:
            raise
        except Exception:  # the library's texts are not for clients
            raise _invalid("is not a form as its content type says") from None
        if not self._is_whole:
            raise _invalid("ends before its last boundary")

    def model_key(self) -> bytes:
        """Return the name of the model as a JSON body, by which a server of several models chooses one."""
        model = self.values.get("model")
        return msgspec.json.encode({"model": model} if isinstance(model, str) else {})

    def decoded(self, kind: type[T]) -> Decoded:
        """Return the request of a type.

        Raises:
            HTTPError: a field has a wrong value, is missing, or is refused.
        """
        table: Others = getattr(kind, "OTHERS", NONE)
        known = kind.__struct_encode_fields__
        lists = {name for name in known if _is_list(kind, name)}
        own: dict[str, Any] = {
            name: [value] if name in lists and not isinstance(value, list) else value
            for name, value in self.values.items()
            if name in known
        }
        try:
            request = msgspec.convert(own, kind, strict=False)
        except msgspec.ValidationError as error:
            raise bad_schema(error, b"{}", kind) from None
        others = {name: value for name, value in self.values.items() if name not in known}
        return Decoded(request, check_others(others, table))

    def _callbacks(self) -> dict[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._add,
            "on_part_end": self._end,
            "on_header_field": partial(_extend, self._header),
            "on_header_value": partial(_extend, self._value),
            "on_header_end": self._end_header,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _invalid(f"has more than {MAX_PARTS} parts")
        self._headers, self._data = {}, bytearray()

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _add(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def _end(self) -> None:
        kind, options = self._options(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name or len(name) > MAX_NAME:
            raise _invalid("has a part without a name")
        is_file = name in self.files or b"filename" in options
        value = bytes(self._data) if is_file else self._text(name)
        if name.endswith("[]"):
            self.values.setdefault(name.removesuffix("[]"), []).append(value)
        elif name in self.values:
            raise _invalid(f"has the field {clean(name, MAX_NAME)!r} twice")
        else:
            self.values[name] = value

    def _text(self, name: str) -> str:
        if len(self._data) > MAX_TEXT:
            raise _invalid(f"has more than {MAX_TEXT} bytes in {clean(name, MAX_NAME)!r}")
        try:
            return self._data.decode()
        except UnicodeDecodeError:
            raise _invalid(f"has no UTF-8 text in {clean(name, MAX_NAME)!r}") from None

    def _finish(self) -> None:
        self._is_whole = True


def _is_list(kind: type[msgspec.Struct], name: str) -> bool:
    found = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
    kinds = (found, *get_args(found))
    return any(getattr(each, "__origin__", each) is list for each in kinds)


def _invalid(rule: str) -> HTTPError:
    return HTTPError(400, "invalid_form", f"the body {rule}")


def _extend(target: bytearray, data: bytes, start: int, end: int) -> None:
    target.extend(data[start:end])
