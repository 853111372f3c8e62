"""Find the places of images, recordings and embeddings in a prompt, and put their tokens or rows there.  Pure.

In a conversation the chat template writes the placeholders of images and recordings.  A text of a user that spells one is no
placeholder, because it contains a boundary.  In a plain prompt the caller writes the placeholders, as with vLLM.

A conversation may have embeddings among the parts of a message: `{"type": "prompt_embeds", "data": …}`.  The template receives a mark in
place of each such part, and the rendered text is split at the marks, so no token spans one.  If the template drops a part, its
embeddings are dropped as well.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from trouper.actors.messages.media import MediaItem
from trouper.actors.messages.requests import Embeds
from trouper.actors.rendering.conversations import MARK
from trouper.actors.rendering.media.items import PlacedItem
from trouper.actors.rendering.media.parts import MAX_UUID_CHARS, MediaPart
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.media import AUDIO, IMAGE, ITEMS
from trouper.errors import UnsupportedFeatureError, invalid

DATA, UUIDS = "multi_modal_data", "multi_modal_uuids"


def images_of(prompt: Mapping[str, Any]) -> list[MediaPart]:
    """Return the images or recordings in `multi_modal_data` of a prompt, with their `multi_modal_uuids`.

    Raises:
        TrouperValidationError: one of the two has a wrong form, or there are both images and recordings.
        UnsupportedFeatureError: it contains a video.
    """
    data, uuids = (_by_modality(prompt, name) for name in (DATA, UUIDS))
    given = [modality for modality in ITEMS if modality in {**data, **uuids}]
    if len(given) > 1:
        raise invalid(DATA, "has images and audio, and no model takes both")
    return _parts(given[0], data, uuids) if given else []


def _parts(
    modality: str, data: Mapping[str, list[Any]], uuids: Mapping[str, list[Any]]
) -> list[MediaPart]:
    images, names, what = data.get(modality, []), uuids.get(modality, []), ITEMS[modality]
    if names and data.get(modality) is None:
        images = [None] * len(names)
    if names and len(names) != len(images):
        rule = f"has {len(names)} of {what}, and {DATA} has {len(images)} {what}"
        raise invalid(UUIDS, rule)
    found: list[MediaPart] = []
    image: Any
    for i, image in enumerate(images):
        where, uuid = f"{DATA}.{modality}[{i}]", names[i] if names else None
        if uuid is not None and not (isinstance(uuid, str) and 1 <= len(uuid) <= MAX_UUID_CHARS):
            raise invalid(UUIDS, f"must be strings of 1 to {MAX_UUID_CHARS} characters", uuid)
        if image is None and uuid is None:
            raise invalid(where, "has neither data nor a uuid")
        if isinstance(image, str) or (modality == IMAGE and isinstance(image, Mapping)):
            forms = (
                "an array, a pair (array, rate)" if modality == AUDIO else "a PIL image, an array"
            )
            rule = f"must be {forms} or the bytes of a file; for a URL use messages with a part {modality}_url"
            raise invalid(where, rule)
        found.append(MediaPart(image, uuid, where, modality))
    return found


def _by_modality(prompt: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
    given: Any = prompt.get(name)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid(name, "must be a dict such as {'image': …}", type(given).__name__)
    found: dict[str, list[Any]] = {}
    for modality, values in cast("Mapping[Any, Any]", given).items():
        if modality not in ITEMS:
            rule = f"{name}: {str(modality)[:64]!r} is not supported; only image and audio are"
            raise UnsupportedFeatureError(rule, parameter=name)
        is_list = isinstance(values, list | tuple)
        if modality == AUDIO and name == DATA:
            is_list = isinstance(values, list) and not _is_samples(cast("list[Any]", values))
        if values is not None:
            found[modality] = list(cast("Sequence[Any]", values)) if is_list else [values]
    return found


def _is_samples(values: list[Any]) -> bool:
    """Return whether a list is one recording: samples, as vLLM takes them."""
    return bool(values) and isinstance(values[0], int | float)


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
    _check_count(num_found, images, repr(placeholder), writer)
    ids: list[int] = []
    placed: list[MediaItem] = []
    segment: list[str] = []
    for piece in pieces:
        text, *more = piece.split(placeholder)
        segment.append(text)
        for following in more:
            is_first, image = not placed, images[len(placed)]
            segment[-1] += image.before
            ids += tokenizer.encode_pieces(
                segment, adds_special_tokens and is_first, continues=not is_first
            )
            _put(ids, placed, image)
            segment = [image.after + following]
    ids += tokenizer.encode_pieces(segment, False, continues=True)
    return ids, tuple(placed)


def lay_out_prefix(
    pieces: Sequence[str], placeholder: str, num_images: int, begin: str
) -> list[str]:
    """Lay out a prompt as PaliGemma reads it: images, the token that begins a text, the text, the end of a line.

    A text without a placeholder has its images in front.
    """
    found = list(pieces) or [""]
    if not any(placeholder in piece for piece in found):
        found[0] = placeholder * num_images + found[0]
    last = max(i for i, piece in enumerate(found) if placeholder in piece)
    head, _, tail = found[last].rpartition(placeholder)
    found[last] = head + placeholder + begin + tail
    found[-1] += "\n"
    return found


def expand_ids(
    ids: Sequence[int], placeholder_id: int, images: Sequence[PlacedItem]
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Put the tokens of the images in place of single placeholders.  A place that has all tokens of its image stays as it is.

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
        elif ids[place] == placeholder_id:
            place += 1
        else:
            found.append(ids[place])
            place += 1
            continue
        num_found += 1
        if image is not None:
            _put(found, placed, image)
    _check_count(num_found, images, f"the token {placeholder_id}", "the prompt")
    return found, tuple(placed)


def _put(ids: list[int], placed: list[MediaItem], image: PlacedItem) -> None:
    placed.append(msgspec.structs.replace(image.item, first=len(ids)))
    ids += image.ids


def _check_count(
    num_found: int, images: Sequence[PlacedItem], placeholder: str, writer: str
) -> None:
    num_images = len(images)
    if num_found != num_images:
        what = ITEMS[images[0].item.modality]
        rule = f"{writer} has {num_found} places for {what} ({placeholder}), and there are {num_images} {what}"
        raise invalid("prompt", rule)


KIND = "prompt_embeds"
MARKED = re.compile(f"{MARK}([0-9]{{1,9}}){MARK}")


def take_embeds(
    messages: Sequence[Any], decode: Callable[[Any], Embeds]
) -> tuple[list[Any], list[Embeds]]:
    """The messages with the number of its matrix in place of each payload, and the matrices."""
    found: list[Embeds] = []

    def taken(part: Any) -> Any:
        if not _is_embeds(part):
            return part
        found.append(decode(part.get("data")))
        return {"type": KIND, "index": len(found) - 1}

    rest: list[Any] = []
    for message in messages:
        fields = cast("Mapping[str, Any]", message if isinstance(message, Mapping) else {})
        content = fields.get("content")
        if isinstance(content, list | tuple) and any(map(_is_embeds, cast("list[Any]", content))):
            message = {**fields, "content": [taken(part) for part in cast("list[Any]", content)]}
        rest.append(message)
    return rest, found


def encode_mixed(
    pieces: Sequence[str],
    embeds: Sequence[Embeds],
    tokenizer: Tokenizer,
    add_special_tokens: bool,
    max_length: int,
) -> tuple[list[int], tuple[Embeds, ...]]:
    """Return token ids, with zeros in place of embeddings, and the matrices in their places.

    Ends when there are more than `max_length`: a template may place a matrix as often as it likes.
    """
    ids: list[int] = []
    placed: list[Embeds] = []
    is_first = True
    for segment in _segments(pieces):
        if isinstance(segment, list):
            adds = add_special_tokens and is_first
            ids += tokenizer.encode_pieces(segment, adds, continues=not is_first)
        elif segment < len(embeds):  # a caller may have written a mark of its own somewhere
            placed.append(msgspec.structs.replace(embeds[segment], first=len(ids)))
            ids += [0] * placed[-1].num_rows
        if len(ids) > max_length:
            break
        is_first = False
    return ids, tuple(placed)


def unmarked(pieces: Sequence[str]) -> str:
    return MARKED.sub("", "".join(pieces))


def _segments(pieces: Sequence[str]) -> Iterator[list[str] | int]:
    """Pieces up to the next mark, the number in it, and so on."""
    segment: list[str] = []
    for piece in pieces:
        text, *more = MARKED.split(piece)
        segment.append(text)
        for number, following in zip(more[::2], more[1::2], strict=True):
            yield segment
            yield int(number)
            segment = [following]
    yield segment


def _is_embeds(part: Any) -> bool:
    return isinstance(part, Mapping) and cast("Mapping[Any, Any]", part).get("type") == KIND
