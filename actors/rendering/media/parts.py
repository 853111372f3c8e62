"""Take the images out of the parts of messages, in every form that clients and Python callers write.  Pure.

The messages keep `{"type": "image"}` in the place of each image, which is what chat templates read.  Text never becomes
an image: only parts count, and a text that spells a model's placeholder stays text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from trouper.actors.rendering.media.files import RefusedFileError
from trouper.actors.rendering.media.local_files import UNAVAILABLE, is_local, read_local
from trouper.actors.rendering.media.urls import decode_base64, read_url
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
LATER = {
    "input_audio": "audio", "audio_url": "audio", "audio": "audio",
    "video_url": "video", "video": "video", "input_video": "video",
}  # fmt: skip
IMAGES = ("image_url", "input_image", "image", "image_pil")
EMBEDS = ("image_embeds", "audio_embeds")
FILES = ("file", "input_file", "document")
# The place of an image in messages that go to a chat template, with the number of the image.
IMAGE = {"type": "image"}


class Base64File(msgspec.Struct, frozen=True):
    """A file that a frontend took from a field of its API as base64.  It is decoded in the renderer's thread."""

    text: str | memoryview

    def __repr__(self) -> str:
        return f"<a file in {len(self.text)} characters of base64>"


class FetchedFile(msgspec.Struct, frozen=True, weakref=True, eq=False):
    """A file that was fetched from the URL in its place."""

    data: bytes

    def __repr__(self) -> str:
        return f"<a fetched file of {len(self.data)} bytes>"


class ImagePart(NamedTuple):
    """One image of a conversation, in the form in which the caller gave it.

    Attributes:
        data: the bytes of a file, a PIL image or an array; None if only its `uuid` is given.
        uuid: the caller's name of it.
        where: its place, such as `messages[0].content[1]`.
    """

    data: Any
    uuid: str | None
    where: str


def take_images(messages: Sequence[Any], folder: str = "") -> tuple[list[Any], list[ImagePart]]:
    """Return the messages with a mark in the place of each image, and the images in order.

    Args:
        folder: `file:` URLs below it are read; empty for none.

    Raises:
        TrouperUnprocessableEntityError: a file of a `file:` URL cannot be read.
        MediaError, TrouperValidationError: a part has no image that can be used; the error names its place.
        UnsupportedFeatureError: a part is audio, video or a document.
    """
    found: list[ImagePart] = []
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
        kind = next((name for name in ("image_url", *LATER) if name in fields), None)
    if not isinstance(kind, str):
        return None
    return kind if kind in (*IMAGES, *EMBEDS, *LATER, *FILES) else None


def is_image(part: Any) -> bool:
    """Return whether a part is an image in any form."""
    return kind_of(part) in IMAGES


def url_of(part: Any) -> Any:
    """Return what a part of an image has as its URL, or None for any other part."""
    if kind_of(part) not in ("image_url", "input_image"):
        return None
    given = cast("Mapping[str, Any]", part).get("image_url")
    return cast("Mapping[str, Any]", given).get("url") if isinstance(given, Mapping) else given


def _taken(part: Any, where: str, role: Any, found: list[ImagePart], folder: str) -> Any:
    kind = kind_of(part)
    if kind is None:
        return part
    if kind in LATER:
        text = f"{where}: {LATER[kind]} is not supported; send text and images"
        raise UnsupportedFeatureError(text, parameter=where)
    if kind in FILES:
        text = f"{where}: files and documents are not supported; send each page as an image"
        raise UnsupportedFeatureError(text, parameter=where)
    if kind in EMBEDS:
        text = f"{where}: {kind} is not supported; send the image itself as image_url"
        raise UnsupportedFeatureError(text, parameter=where)
    if role not in ("user", "system", "developer", "tool"):
        rule = "images can be in messages of the user, the system and tools only"
        raise invalid(where, rule)
    fields = cast("Mapping[str, Any]", part)
    found.append(ImagePart(_data(kind, fields, where, folder), _uuid(fields, where), where))
    return {**IMAGE, "index": len(found) - 1}


def _data(kind: str, fields: Mapping[str, Any], where: str, folder: str) -> Any:
    """Return the bytes of a file, or the image object of a Python caller."""
    if kind in ("image_url", "input_image"):
        url = _url(kind, fields, where)
        if url is None and fields.get("uuid") is not None:
            return None
        return read_at(f"{where}.image_url", url, folder)
    given = fields.get(kind)
    if given is None and fields.get("uuid") is not None:
        return None
    if isinstance(given, Base64File):
        return read_at(where, given)
    if given is None or isinstance(given, str | memoryview | Mapping | list | tuple | int | float):
        rule = "must be a PIL image, an array or the bytes of a file; for a URL use a part of type image_url"
        raise invalid(f"{where}.{kind}", rule)
    return given


def read_at(where: str, given: Any, folder: str = "") -> bytes:
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
        raise refused(where, error) from None
    raise invalid(where, "must be a URL such as data:image/png;base64,…")


def refused(
    where: str, error: RefusedFileError
) -> TrouperValidationError | TrouperUnprocessableEntityError:
    """Return the error of a request with a refused file."""
    code, rule = error.refusal
    if code == UNAVAILABLE:
        return TrouperUnprocessableEntityError(f"{where}: {rule}", parameter=where)
    if code == TrouperValidationError.code:
        return invalid(where, rule)
    return MediaError(f"{where}: {rule}", parameter=where, code=code)


def _url(kind: str, fields: Mapping[str, Any], where: str) -> Any:
    """Return the URL of OpenAI's two forms: a text, or an object with `url` and `detail`."""
    if fields.get("file_id") is not None:
        raise invalid(
            f"{where}.file_id", "files are not stored here; use image_url with a data: URL"
        )
    given = fields.get("image_url")
    detail = fields.get("detail")
    if isinstance(given, Mapping):
        inner = cast("Mapping[str, Any]", given)
        given, detail = inner.get("url"), inner.get("detail", detail)
    if detail is not None and detail not in DETAILS:
        raise invalid(f"{where}.detail", f"must be one of {', '.join(DETAILS)}", detail)
    return given


def _uuid(fields: Mapping[str, Any], where: str) -> str | None:
    uuid = fields.get("uuid")
    if uuid is None or (isinstance(uuid, str) and 1 <= len(uuid) <= MAX_UUID_CHARS):
        return uuid
    raise invalid(f"{where}.uuid", f"must be a string of 1 to {MAX_UUID_CHARS} characters", uuid)
