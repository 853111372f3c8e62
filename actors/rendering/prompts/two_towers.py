"""Render the prompts of a model with two towers, such as CLIP: each is a text or one image, never both.

An image counts as one token.  Its id is that of no text, because the tower of images reads no ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from trouper.actors.messages.requests import Render
from trouper.actors.rendering.media.parts import MediaPart, kind_of, take_media
from trouper.actors.rendering.media.processor import NAME as OPTIONS
from trouper.actors.rendering.prompts.images import images_of
from trouper.actors.rendering.prompts.pooling import PoolingEncoded, PoolingPrompts
from trouper.errors import invalid

BOTH = "has a text and an image, and this model embeds one of them at a time; send two requests"


class _Side(NamedTuple):
    """The text or the image of a prompt."""

    text: str
    images: Sequence[MediaPart]
    salt: str = ""
    options: Any = None


class TwoTowerPrompts(PoolingPrompts):
    """Renders prompts to the ids of a text, or to one processed image.

    Conversations need no chat template: they have one message, with a text or an image.
    """

    def _encoded(self, message: Render) -> PoolingEncoded:
        prompt: Any = message.prompt
        if not isinstance(prompt, Mapping) or not {"messages", "multi_modal_data"} & prompt.keys():
            return super()._encoded(message)
        given = cast("Mapping[str, Any]", prompt)
        side = self._of_messages(given) if "messages" in given else _of_data(given)
        if not side.images:
            return super()._encoded(msgspec.structs.replace(message, prompt=side.text))
        images = self._allowed([*side.images])
        where = images[-1].where
        if side.text.strip():
            raise invalid(where, BOTH)
        if len(images) > 1:
            raise invalid(where, "is a second image, and this model embeds one at a time")
        assert self.images is not None
        options = message.options
        if options.truncate_prompt_tokens is not None or options.truncation_side is not None:
            raise invalid("truncate_prompt_tokens", "not with images")
        scope = options.cache_scope + b"\0" + side.salt.encode()
        kwargs = options.mm_processor_kwargs, side.options
        (placed,) = self.images.place(images, kwargs, scope, options.key)
        return PoolingEncoded([*placed.ids], None, media=(placed.item,))

    def _of_messages(self, given: Mapping[str, Any]) -> _Side:
        messages: Any = given["messages"]
        if not isinstance(messages, list | tuple) or len(cast("Sequence[Any]", messages)) != 1:
            raise invalid("messages", "must have one message: this model reads no conversations")
        folder = "" if self.images is None else self.images.folder
        (message,), images = take_media(cast("Sequence[Any]", messages), folder)
        content = _field(message, "content")
        if isinstance(content, str):
            content = [content]
        if not isinstance(content, list | tuple):
            raise invalid("messages[0].content", "must be a text or a list of parts")
        texts: list[str] = []
        for i, part in enumerate(cast("Sequence[Any]", content)):
            text = part if isinstance(part, str) else _field(part, "text")
            if isinstance(text, str):
                texts.append(text)
            elif kind_of(part) is None:
                raise invalid(f"messages[0].content[{i}]", "must be a text or an image")
        salt = given.get("cache_salt") or ""
        return _Side("\n".join(texts), images, str(salt), given.get(OPTIONS))


def _field(given: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", given).get(name) if isinstance(given, Mapping) else None


def _of_data(given: Mapping[str, Any]) -> _Side:
    text: Any = given.get("prompt") or ""
    known = {"prompt", "multi_modal_data", "multi_modal_uuids", "cache_salt", "type", OPTIONS}
    if unknown := given.keys() - known:
        raise invalid("prompt", "unknown keys beside 'multi_modal_data'", sorted(map(str, unknown)))
    if not isinstance(text, str):
        raise invalid("prompt", "must be text", type(text).__name__)
    salt = given.get("cache_salt") or ""
    return _Side(text, images_of(given), str(salt), given.get(OPTIONS))
