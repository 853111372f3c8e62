"""Take the images and recordings out of the parts of messages, in every form that clients and Python callers write.  Pure.

The messages keep `{"type": "image"}` or `{"type": "audio"}` in the place of each, which is what chat templates read.  Text
never becomes an image: only parts count, and a text that spells a model's placeholder stays text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from trouper.actors.rendering.media.files import INVALID_IMAGE, RefusedFileError
from trouper.actors.rendering.media.urls import (
    UNAVAILABLE,
    decode_base64,
    is_local,
    read_local,
    read_url,
)
from trouper.config.media import AUDIO, IMAGE
from trouper.errors import (
    MediaError,
    TrouperUnprocessableEntityError,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
)

# The `detail` of OpenAI's parts has no effect: the model's own processor decides about sizes, as in vLLM.
DETAILS = ("auto", "low", "high", "original")
MAX_UUID_CHARS = 256
LATER = {"video_url": "video", "video": "video", "input_video": "video"}
IMAGES = ("image_url", "input_image", "image", "image_pil")
RECORDINGS = ("input_audio", "audio_url", "audio")
# The `format` of OpenAI's parts; it is checked, and the file itself shows what it is.
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "mpga", "mpeg")
EMBEDS = ("image_embeds", "audio_embeds")
FILES = ("file", "input_file", "document")


class Base64File(msgspec.Struct, frozen=True):
    """A file that a frontend took from a field of its API as base64.  It is decoded in the renderer's thread.

    Attributes:
        field: the field within the client's part, such as `.source.data`; empty if the part is the file.
    """

    text: str | memoryview
    field: str = ""

    def __repr__(self) -> str:
        return f"<a file in {len(self.text)} characters of base64>"


class FetchedFile(msgspec.Struct, frozen=True, weakref=True, eq=False):
    """The bytes of a file in the place of a URL: they were fetched from it, or are a part of a form."""

    data: bytes

    def __repr__(self) -> str:
        return f"<a file of {len(self.data)} bytes>"


class MediaPart(NamedTuple):
    """One image or recording of a conversation, in the form in which the caller gave it.

    Attributes:
        data: the bytes of a file, a PIL image, an array, or samples with their rate; None if only its `uuid` is given.
        uuid: the caller's name of it.
        where: its place, such as `messages[0].content[1]`.
        field: the field in that place with the file, such as `.image_url`.
    """

    data: Any
    uuid: str | None
    where: str
    modality: str = IMAGE
    field: str = ""


def take_media(messages: Sequence[Any], folder: str = "") -> tuple[list[Any], list[MediaPart]]:
    """Return the messages with a mark in the place of each image or recording, and these in order.

    Args:
        folder: `file:` URLs below it are read; empty for none.

    Raises:
        TrouperUnprocessableEntityError: a file of a `file:` URL cannot be read.
        MediaError, TrouperValidationError: a part has no file that can be used; the error names its place.
        UnsupportedFeatureError: a part is a video or a document.
    """
    found: list[MediaPart] = []
    rest: list[Any] = []
    for i, message in enumerate(messages):
        fields = cast("Mapping[str, Any]", message if isinstance(message, Mapping) else {})
        content = fields.get("content")
        if isinstance(content, list | tuple):
            parts = cast("Sequence[Any]", content)
            if any(kind_of(part) is not None for part in parts):
                role = fields.get("role")
                where = f"messages[{i}].content"
                taken = [
                    _taken(part, f"{where}[{j}]", role, found, folder)
                    for j, part in enumerate(parts)
                ]
                message = {**fields, "content": taken}
        rest.append(message)
    return rest, found


def kind_of(part: Any) -> str | None:
    """Return the kind of a part that holds media, or None for any other part."""
    if not isinstance(part, Mapping):
        return None
    fields = cast("Mapping[str, Any]", part)
    kind = fields.get("type")
    if kind is None:
        # OpenAI's clients may leave the type out; the field then names it.
        names = ("image_url", "input_audio", "audio_url", *LATER)
        kind = next((name for name in names if name in fields), None)
    if not isinstance(kind, str):
        return None
    return kind if kind in (*IMAGES, *RECORDINGS, *EMBEDS, *LATER, *FILES) else None


def is_media(part: Any) -> bool:
    """Return whether a part is an image, or a recording, in any form."""
    return kind_of(part) in (*IMAGES, *RECORDINGS)


def url_name(part: Any) -> str | None:
    """Return the name of the field in which a part has a URL, or None for a part without one."""
    kind = kind_of(part)
    if kind in ("image_url", "input_image"):
        return "image_url"
    return kind if kind == "audio_url" else None


def url_of(part: Any) -> Any:
    """Return what a part of an image or a recording has as its URL, or None for any other part."""
    name = url_name(part)
    if name is None:
        return None
    given = cast("Mapping[str, Any]", part).get(name)
    return cast("Mapping[str, Any]", given).get("url") if isinstance(given, Mapping) else given


def _taken(part: Any, where: str, role: Any, found: list[MediaPart], folder: str) -> Any:
    kind = kind_of(part)
    if kind is None:
        return part
    if kind in LATER:
        text = f"{where}: {LATER[kind]} is not supported; send text, images or audio"
        raise UnsupportedFeatureError(text, parameter=where)
    if kind in FILES:
        text = f"{where}: files and documents are not supported; send each page as an image"
        raise UnsupportedFeatureError(text, parameter=where)
    if kind in EMBEDS:
        text = f"{where}: {kind} is not supported; send the image itself as image_url"
        raise UnsupportedFeatureError(text, parameter=where)
    if role not in ("user", "system", "developer", "tool"):
        rule = "images and audio can be in messages of the user, the system and tools only"
        raise invalid(where, rule)
    fields = cast("Mapping[str, Any]", part)
    modality = AUDIO if kind in RECORDINGS else IMAGE
    data = _data(kind, fields, where, folder)
    field = _field(kind, fields)
    found.append(MediaPart(data, _uuid(fields, where), where, modality, field))
    return {"type": modality, "index": len(found) - 1}


def _field(kind: str, fields: Mapping[str, Any]) -> str:
    """Return the field of a part with its file, which errors about the file name."""
    if kind == "input_audio":
        return f".{kind}.data"
    given = fields.get(kind)
    return given.field if isinstance(given, Base64File) else f".{url_name(fields) or kind}"


def _data(kind: str, fields: Mapping[str, Any], where: str, folder: str) -> Any:
    """Return the bytes of a file, or the object of a Python caller."""
    if kind == "input_audio":
        return _recording(fields, f"{where}.{kind}")
    name = url_name(fields)
    if name is not None:
        url = _url(name, fields, where)
        if url is None and fields.get("uuid") is not None:
            return None
        return read_at(f"{where}.{name}", url, folder, AUDIO if kind in RECORDINGS else IMAGE)
    given = fields.get(kind)
    if given is None and fields.get("uuid") is not None:
        return None
    if isinstance(given, Base64File):
        return read_at(where + given.field, given)
    if kind == AUDIO:
        if given is None or isinstance(given, str | memoryview | int | float):
            rule = "must be an array, a pair (array, rate) or the bytes of a file; for a URL use a part of type audio_url"
            raise invalid(f"{where}.{kind}", rule)
        return given
    if given is None or isinstance(given, str | memoryview | Mapping | list | tuple | int | float):
        rule = "must be a PIL image, an array or the bytes of a file; for a URL use a part of type image_url"
        raise invalid(f"{where}.{kind}", rule)
    return given


def _recording(fields: Mapping[str, Any], where: str) -> bytes | None:
    """Return the file of OpenAI's `input_audio`: an object with `data` in base64 and `format`."""
    given: Any = fields.get("input_audio")
    if given is None and fields.get("uuid") is not None:
        return None
    if not isinstance(given, Mapping):
        raise invalid(where, "must be an object with data in base64 and format")
    inner = cast("Mapping[str, Any]", given)
    form: Any = inner.get("format")
    if form is not None and form not in AUDIO_FORMATS:
        raise invalid(f"{where}.format", f"must be one of {', '.join(AUDIO_FORMATS)}", form)
    data: Any = inner.get("data")
    if not isinstance(data, str | memoryview):
        raise invalid(f"{where}.data", "must be a file in base64")
    return read_at(f"{where}.data", Base64File(cast("str | memoryview", data)), "", AUDIO)


def read_at(where: str, given: Any, folder: str = "", modality: str = IMAGE) -> bytes:
    """Return the bytes of a URL or of base64, with errors that name the place.

    Raises:
        MediaError, TrouperValidationError: it is no file.
        TrouperUnprocessableEntityError: the file of a `file:` URL cannot be read.
    """
    if isinstance(given, FetchedFile):
        return given.data
    try:
        if folder and is_local(given):
            return read_local(given, folder)
        if isinstance(given, Base64File):
            return decode_base64(given.text)
        if isinstance(given, str | memoryview):
            return read_url(cast("str | memoryview", given))
    except RefusedFileError as error:
        raise refused(where, error, modality) from None
    example = "data:audio/wav;base64,…" if modality == AUDIO else "data:image/png;base64,…"
    raise invalid(where, f"must be a URL such as {example}")


def refused(
    where: str, error: RefusedFileError, modality: str = IMAGE
) -> TrouperValidationError | TrouperUnprocessableEntityError:
    """Return the error of a request with a refused file."""
    code, rule = error.refusal
    if code == UNAVAILABLE:
        return TrouperUnprocessableEntityError(f"{where}: {rule}", parameter=where)
    if code == TrouperValidationError.code:
        return invalid(where, rule)
    if code == INVALID_IMAGE:
        # What reads URLs and base64 does not know what the file is for.
        code = f"invalid_{modality}"
    return MediaError(f"{where}: {rule}", parameter=where, code=code)


def _url(name: str, fields: Mapping[str, Any], where: str) -> Any:
    """Return the URL of OpenAI's two forms: a text, or an object with `url` and `detail`."""
    if fields.get("file_id") is not None:
        raise invalid(f"{where}.file_id", f"files are not stored here; use {name} with a data: URL")
    given = fields.get(name)
    detail, place = fields.get("detail"), f"{where}.detail"
    if isinstance(given, Mapping):
        inner = cast("Mapping[str, Any]", given)
        given = inner.get("url")
        if "detail" in inner:
            detail, place = inner["detail"], f"{where}.{name}.detail"
    if detail is not None and detail not in DETAILS:
        raise invalid(place, f"must be one of {', '.join(DETAILS)}", detail)
    return given


def _uuid(fields: Mapping[str, Any], where: str) -> str | None:
    uuid = fields.get("uuid")
    if uuid is None or (isinstance(uuid, str) and 1 <= len(uuid) <= MAX_UUID_CHARS):
        return uuid
    raise invalid(f"{where}.uuid", f"must be a string of 1 to {MAX_UUID_CHARS} characters", uuid)
