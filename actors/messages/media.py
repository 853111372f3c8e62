"""Media of a request, images or recordings, on their way from a renderer to the device.

A renderer turns each of them into an *item*: the arrays that the tower takes, and the tokens in the item's place.
The device computes one row of numbers for some of these tokens, and uses the rows in place of the tokens' embeddings.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class MediaArray(msgspec.Struct, frozen=True, weakref=True):
    """One input of a tower, dense and row-major."""

    # The name of the tower's argument, such as `pixel_values`.
    name: str
    # A numpy name: `float32`, `int64`, `bool`.
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class MediaItem(msgspec.Struct, frozen=True):
    """One processed item at its place in a prompt.

    The prompt has `num_tokens` tokens for it from position `first` on.  Those in `runs` get the tower's rows, in order;
    the others, such as marks of a line's end, are ordinary tokens.
    """

    # 32 bytes: equal keys have equal content and equal processing, so their rows are equal.
    key: bytes
    # `image` or `audio`.
    modality: str
    arrays: tuple[MediaArray, ...]
    num_tokens: int
    # Offsets from `first`, and lengths.
    runs: tuple[tuple[int, int], ...]
    first: int = 0
    # Time, height and width of the rows, for a model of positions in three dimensions.
    grid: tuple[int, int, int] | None = None
    # Of a recording.
    seconds: float = 0.0
    # Whether a client's name of the content is in the key, in place of the content.
    is_named: bool = False

    @property
    def num_rows(self) -> int:
        """Count the rows that the tower computes."""
        return sum(length for _, length in self.runs)

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the arrays."""
        return sum(array.data.nbytes for array in self.arrays)

    @property
    def end(self) -> int:
        """Return the position behind the last token."""
        return self.first + self.num_tokens


class ProcessedMedia(NamedTuple):
    """The result of a processor for one image or recording.

    Attributes:
        arrays: the inputs of the tower.
        text: the text in its place, in which the tokenizer recognises special tokens.
        seconds: the length of a recording.
    """

    arrays: tuple[MediaArray, ...]
    text: str
    seconds: float = 0.0


def spans_of(kind: str, items: Sequence[MediaItem], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of tokens that see each other in a prompt with images; see `MediaFamily.spans` for the kinds."""
    if kind == "prompt" and items:
        return ((0, num_tokens),)
    if kind != "image":
        return ()
    runs = ((item.first + offset, length) for item in items for offset, length in item.runs)
    return tuple((first, first + length) for first, length in runs)
