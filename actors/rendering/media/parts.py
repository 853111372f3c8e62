"""Extract images and recordings from the parts of messages, in every supported format of clients and Python callers.  Pure.

In the messages, `{"type": "image"}` or `{"type": "audio"}` replaces each item, as chat templates expect.  Only typed parts become
images: a text that contains a model's placeholder stays text, so users cannot forge an image.
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

# The `detail` of OpenAI's parts is checked but has no effect: the model's own processor chooses sizes, as in vLLM.
DETAILS = ("auto", "low", "high", "original")
MAX_UUID_CHARS = 256
LATER = {"video_url": "video", "video": "video", "input_video": "video"}
IMAGES = ("image_url", "input_image", "image", "image_pil")
RECORDINGS = ("input_audio", "audio_url", "audio")
# The `format` of OpenAI's parts is checked, but the actual format is detected from the file.
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "mpga", "mpeg")
EMBEDS = ("image_embeds", "audio_embeds")
FILES = ("file", "input_file", "document")


class Base64File(msgspec.Struct, frozen=True):
    """A base64 file from a request, decoded later in the renderer's thread.

    Attributes:
        field: the path of the field within the client's part, such as `.source.data`; empty if the part itself is the file.
    """

    text: str | memoryview
    field: str = ""

    def __repr__(self) -> str:
        return f"<a file in {len(self.text)} characters of base64>"


class FetchedFile(msgspec.Struct, frozen=True, weakref=True, eq=False):
    """The bytes of a file that replace a URL: downloaded from it, or uploaded in a form."""

    data: bytes

    def __repr__(self) -> str:
        return f"<a file of {len(self.data)} bytes>"


class MediaPart(NamedTuple):
    """One image or recording of a conversation, as the caller passed it.

    Attributes:
        data: the bytes of a file, a PIL image, an array, or samples with their rate; None if the caller sent only a `uuid`.
        uuid: the caller's identifier for the item, under which it is cached.
        where: its location, such as `messages[0].content[1]`.
        field: the field at this location that contains the file, such as `.image_url`.
    """

    data: Any
    uuid: str | None
    where: str
    modality: str = IMAGE
    field: str = ""


def take_media(messages: Sequence[Any], folder: str = "") -> tuple[list[Any], list[MediaPart]]:
    """Replace each image and recording in the messages by a marker.  Returns the new messages, and the items in order.

    Args:
        folder: read `file:` URLs only inside this folder; empty to read none.

    Raises:
        TrouperUnprocessableEntityError: the file of a `file:` URL cannot be read.
        MediaError, TrouperValidationError: a part contains no usable file.  The error names its location.
        UnsupportedFeatureError: a part is a video, a document or embeddings.
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
    """Return the type of a media part, or None for any other part."""
    if not isinstance(part, Mapping):
        return None
    fields = cast("Mapping[str, Any]", part)
    kind = fields.get("type")
    if kind is None:
        # OpenAI's clients may omit the type.  The name of the field then determines it.
        names = ("image_url", "input_audio", "audio_url", *LATER)
        kind = next((name for name in names if name in fields), None)
    if not isinstance(kind, str):
        return None
    return kind if kind in (*IMAGES, *RECORDINGS, *EMBEDS, *LATER, *FILES) else None


def is_media(part: Any) -> bool:
    """Return whether a part is an image or a recording in any supported format."""
    return kind_of(part) in (*IMAGES, *RECORDINGS)


def url_name(part: Any) -> str | None:
    """Return the name of the part's URL field, or None if its type has none."""
    kind = kind_of(part)
    if kind in ("image_url", "input_image"):
        return "image_url"
    return kind if kind == "audio_url" else None


def url_of(part: Any) -> Any:
    """Return the unchecked URL of an image or recording, or None for any other part."""
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
        rule = "images and audio are allowed only in user, system, developer and tool messages"
        raise invalid(where, rule)
    fields = cast("Mapping[str, Any]", part)
    modality = AUDIO if kind in RECORDINGS else IMAGE
    data = _data(kind, fields, where, folder)
    field = _field(kind, fields)
    found.append(MediaPart(data, _uuid(fields, where), where, modality, field))
    return {"type": modality, "index": len(found) - 1}


def _field(kind: str, fields: Mapping[str, Any]) -> str:
    """Return the path of the part's field that contains the file, for error messages."""
    if kind == "input_audio":
        return f".{kind}.data"
    given = fields.get(kind)
    return given.field if isinstance(given, Base64File) else f".{url_name(fields) or kind}"


def _data(kind: str, fields: Mapping[str, Any], where: str, folder: str) -> Any:
    """Return the bytes of a file, or the object that a Python caller passed; None if the part has only a `uuid`."""
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
    """Decode OpenAI's `input_audio`, an object with base64 `data` and a `format`."""
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
    """Read a file from a URL, from base64 or from a download.  Errors name the location `where`.

    Raises:
        MediaError, TrouperValidationError: the value does not contain a usable file.
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
    """Convert the refusal of a file to the error for the client, which names the file's location."""
    code, rule = error.refusal
    if code == UNAVAILABLE:
        return TrouperUnprocessableEntityError(f"{where}: {rule}", parameter=where)
    if code == TrouperValidationError.code:
        return invalid(where, rule)
    if code == INVALID_IMAGE:
        # The code that reads URLs and base64 does not know the modality.
        code = f"invalid_{modality}"
    return MediaError(f"{where}: {rule}", parameter=where, code=code)


def _url(name: str, fields: Mapping[str, Any], where: str) -> Any:
    """Return the URL from either of OpenAI's two formats: a string, or an object with `url` and `detail`."""
    if fields.get("file_id") is not None:
        raise invalid(
            f"{where}.file_id", f"this server stores no files; use {name} with a data: URL"
        )
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
