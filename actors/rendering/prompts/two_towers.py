"""Render the prompts of models that embed one text or one image at a time, without a chat template.

A model with two towers, such as CLIP, reads a text or an image, never both.  An image counts as one token, whose id is that of
no text, because the tower of images reads no ids.

A model for pages, such as ColPali, reads a question or a page: an image, and words about it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from trouper.actors.messages.requests import Render
from trouper.actors.rendering.media.items import PlacedItem
from trouper.actors.rendering.media.parts import MediaPart, kind_of, take_media
from trouper.actors.rendering.media.processor import NAME as OPTIONS
from trouper.actors.rendering.prompts.placeholders import encode_with_images, images_of
from trouper.actors.rendering.prompts.pooling import PoolingEncoded, PoolingPrompts
from trouper.actors.rendering.prompts.prompts import checked_ids
from trouper.config.checkpoint.pooler import PoolerSpec
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
        self._check_text(side.text, where)
        if len(images) > 1:
            raise invalid(where, "is a second image, and this model embeds one at a time")
        assert self.images is not None
        options = message.options
        if options.truncate_prompt_tokens is not None or options.truncation_side is not None:
            raise invalid("truncate_prompt_tokens", "not with images")
        scope = options.cache_scope + b"\0" + side.salt.encode()
        kwargs = options.mm_processor_kwargs, side.options
        return self._seen(side.text, self.images.place(images, kwargs, scope, options.key))

    def _check_text(self, text: str, where: str) -> None:
        """Refuse an image with a text."""
        if text.strip():
            raise invalid(where, BOTH)

    def _seen(self, text: str, placed: Sequence[PlacedItem]) -> PoolingEncoded:
        """Return the prompt of an image."""
        return PoolingEncoded([*placed[0].ids], None, media=(placed[0].item,))

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


class PagePrompts(TwoTowerPrompts):
    """Renders a question, or a page with words about it, as the processor of ColPali or ColQwen2 lays them out.

    A text is a question, unless it is a document that a question is compared with.
    """

    def _check_text(self, text: str, where: str) -> None:
        """Accept words about a page."""

    def _seen(self, text: str, placed: Sequence[PlacedItem]) -> PoolingEncoded:
        assert self._spec.pages is not None
        assert self.images is not None
        layout, placeholder = self._spec.pages, self.images.placeholder
        # A prompt with a placeholder has its own layout.
        if placeholder not in text:
            text = self._laid_out(layout.page, text.strip() or layout.words)
        ids, items = encode_with_images(
            [text],
            placeholder,
            placed,
            self._needed_tokenizer("prompt"),
            adds_special_tokens=False,
            writer="the prompt",
        )
        return PoolingEncoded(checked_ids(ids, self._limits.vocab_size), None, media=items)

    def _encode_plain(
        self, text: str, message: Render, wanted: int | None, keeps_end: bool
    ) -> PoolingEncoded:
        params: Any = message.params
        late, layout = params.late_interaction_params, self._spec.pages
        assert layout is not None
        is_document = late is not None and late.mode != "cache_query"
        if is_document or not text:
            return super()._encode_plain(text, message, wanted, keeps_end)
        most = (message.options.max_text_tokens or (None,))[0]
        if most is not None:
            # Only the question is cut, not what follows it.
            ids = self._encode_text((text,), most, keeps_end=False, adds=False).ids
            text = self._needed_tokenizer("prompt").decode(ids)
        return self._encode_text((self._laid_out(layout.query, text),), wanted, keeps_end, False)

    def _laid_out(self, layout: str, text: str) -> str:
        names = self._needed_tokenizer("prompt").special_tokens
        for name in ("bos", "pad"):
            layout = layout.replace(f"{{{name}}}", names.get(f"{name}_token", ""))
        placeholder = "" if self.images is None else self.images.placeholder
        return layout.replace("{image}", placeholder).replace("{text}", text)


def prompts_of(spec: PoolerSpec) -> type[PoolingPrompts]:
    """Return the class that renders the prompts of a pooling model."""
    if spec.has_two_towers:
        return TwoTowerPrompts
    return PoolingPrompts if spec.pages is None else PagePrompts


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
