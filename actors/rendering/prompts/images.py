"""Prompts with images: find the placeholders in a text or in token ids, and put the tokens of the images in their place.  Pure.

In a conversation the chat template writes the placeholders.  A text of a user that spells one is no placeholder, because it
contains a boundary.  In a plain prompt the caller writes the placeholders, as with vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from trouper.actors.messages.media import MediaItem
from trouper.actors.rendering.media.items import PlacedItem
from trouper.actors.rendering.media.parts import MAX_UUID_CHARS, ImagePart
from trouper.actors.rendering.tokenizers.tokenizer import Tokenizer
from trouper.errors import UnsupportedFeatureError, invalid

DATA, UUIDS = "multi_modal_data", "multi_modal_uuids"


def images_of(prompt: Mapping[str, Any]) -> list[ImagePart]:
    """Return the images in `multi_modal_data` of a prompt, with their `multi_modal_uuids`.

    Raises:
        TrouperValidationError: one of the two has a wrong form.
        UnsupportedFeatureError: it contains audio or video.
    """
    data, uuids = (_by_modality(prompt, name) for name in (DATA, UUIDS))
    images, names = data.get("image", []), uuids.get("image", [])
    if names and data.get("image") is None:
        images = [None] * len(names)
    if names and len(names) != len(images):
        rule = f"has {len(names)} of images, and {DATA} has {len(images)} images"
        raise invalid(UUIDS, rule)
    found: list[ImagePart] = []
    image: Any
    for i, image in enumerate(images):
        where, uuid = f"{DATA}.image[{i}]", names[i] if names else None
        if uuid is not None and not (isinstance(uuid, str) and 1 <= len(uuid) <= MAX_UUID_CHARS):
            raise invalid(UUIDS, f"must be strings of 1 to {MAX_UUID_CHARS} characters", uuid)
        if image is None and uuid is None:
            raise invalid(where, "has neither data nor a uuid")
        if isinstance(image, str | Mapping):
            rule = "must be a PIL image, an array or the bytes of a file; for a URL use messages with a part image_url"
            raise invalid(where, rule)
        found.append(ImagePart(image, uuid, where))
    return found


def _by_modality(prompt: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
    given: Any = prompt.get(name)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid(name, "must be a dict such as {'image': …}", type(given).__name__)
    found: dict[str, list[Any]] = {}
    for modality, values in cast("Mapping[Any, Any]", given).items():
        if modality != "image":
            rule = f"{name}: {str(modality)[:64]!r} is not supported; only images are"
            raise UnsupportedFeatureError(rule, parameter=name)
        is_list = isinstance(values, list | tuple)
        if values is not None:
            found[modality] = list(cast("Sequence[Any]", values)) if is_list else [values]
    return found


def encode_with_images(
    pieces: Sequence[str],
    placeholder: str,
    images: Sequence[PlacedItem],
    tokenizer: Tokenizer,
    *,
    adds_special_tokens: bool,
    writer: str,
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Encode a text, with the tokens of the images in place of the placeholders, in order.

    Args:
        pieces: parts of the text that no token spans, and no placeholder either.
        writer: what has written the placeholders, for the error.

    Raises:
        TrouperValidationError: there are more or fewer placeholders than images.
    """
    num_found = sum(piece.count(placeholder) for piece in pieces)
    _check_count(num_found, len(images), repr(placeholder), writer)
    ids: list[int] = []
    placed: list[MediaItem] = []
    segment: list[str] = []
    for piece in pieces:
        text, *more = piece.split(placeholder)
        segment.append(text)
        for following in more:
            is_first = not placed
            ids += tokenizer.encode_pieces(
                segment, adds_special_tokens and is_first, continues=not is_first
            )
            _put(ids, placed, images[len(placed)])
            segment = [following]
    ids += tokenizer.encode_pieces(segment, False, continues=True)
    return ids, tuple(placed)


def expand_ids(
    ids: Sequence[int], row_token_id: int, images: Sequence[PlacedItem]
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Put the tokens of the images in place of single row tokens.  A place that has all tokens of its image stays as it is.

    Raises:
        TrouperValidationError: there are more or fewer places than images.
    """
    found: list[int] = []
    placed: list[MediaItem] = []
    place = num_found = 0
    while place < len(ids):
        image = images[len(placed)] if len(placed) < len(images) else None
        if image is not None and tuple(ids[place : place + len(image.ids)]) == image.ids:
            place += len(image.ids)
        elif ids[place] == row_token_id:
            place += 1
        else:
            found.append(ids[place])
            place += 1
            continue
        num_found += 1
        if image is not None:
            _put(found, placed, image)
    _check_count(num_found, len(images), f"the token {row_token_id}", "the prompt")
    return found, tuple(placed)


def _put(ids: list[int], placed: list[MediaItem], image: PlacedItem) -> None:
    placed.append(msgspec.structs.replace(image.item, first=len(ids)))
    ids += image.ids


def _check_count(num_found: int, num_images: int, placeholder: str, writer: str) -> None:
    if num_found != num_images:
        rule = f"{writer} has {num_found} places for images ({placeholder}), and there are {num_images} images"
        raise invalid("prompt", rule)
