"""Images and recordings of requests to items for the device: keys, the cache of processed items, and limits.

Laws.
1. An item depends on its content and its options only, so equal keys have equal arrays and tokens.
2. A key contains the content, the options, the files of the processor, and the scope of the request: no tenant can find out from
   response times what another one has sent.
3. The arrays in memory take at most `mm_processor_cache_gb` and OPEN_BYTES: what is beyond is refused before it is decoded.
"""

import hashlib
import re
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import msgspec

from trouper.actors.messages.media import MediaItem, ProcessedMedia
from trouper.actors.rendering.media.audio import (
    MAX_REQUEST_SECONDS,
    AudioProcessor,
    Waveform,
    waveform_of,
)
from trouper.actors.rendering.media.confined import ConfinedMedia, MediaOrder
from trouper.actors.rendering.media.files import (
    MAX_REQUEST_PIXELS,
    RefusedFileError,
    check_size,
    decode,
    open_image,
)
from trouper.actors.rendering.media.parts import MediaPart, refused
from trouper.actors.rendering.media.processor import NAME, ImageProcessor, merged_kwargs
from trouper.actors.rendering.media.worker import make_processor
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.media import AUDIO, IMAGE, ITEMS, MediaConfig
from trouper.errors import (
    GenerationError,
    MediaError,
    QueueOverflowError,
    TrouperValidationError,
    invalid,
)

if TYPE_CHECKING:
    from PIL import Image

# Arrays of open requests that are not in the cache: 100 images of SmolVLM, 180 of a LLaVA in 1080p.
OPEN_BYTES = 2 * 2**30
# Tokens around a recording that chat templates of texts do not write.
MARKS = {
    "qwen2_audio": ("<|audio_bos|>", "<|audio_eos|>"),
    "qwen3_asr": ("<|audio_start|>", "<|audio_end|>"),
    "voxtral": ("[BEGIN_AUDIO]", ""),
}
# Files with an influence on arrays and tokens.
FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "config.json",
    "tokenizer_config.json",
)


class PlacedItem(NamedTuple):
    """An item, and the tokens in its place.

    Attributes:
        before: text in front of the tokens, to be encoded together with the text before the image.
        after: likewise, behind them.
    """

    ids: tuple[int, ...]
    item: MediaItem
    before: str = ""
    after: str = ""


class MediaWork(Protocol):
    """Decodes and processes one image, in a thread or in another process."""

    def warm(self) -> None:
        """Load the image processor; `process` does it otherwise."""
        ...

    def process(self, order: MediaOrder) -> tuple[ProcessedMedia, int]:
        """Return the processed image, and the number of its pixels.

        Raises:
            TrouperValidationError: the image or an option cannot be used.
        """
        ...


class MediaInThread:
    """Decodes and processes images in the calling thread."""

    def __init__(self, config: MediaConfig, image_token: str) -> None:
        self._config, self._image_token = config, image_token
        self._processor: ImageProcessor | AudioProcessor | None = None
        self._loading = threading.Lock()

    def warm(self) -> None:
        """Load the processor; raises TrouperValidationError if the folder has none."""
        self._loaded()

    def _loaded(self) -> ImageProcessor | AudioProcessor:
        with self._loading:
            if self._processor is None:
                self._processor = make_processor(self._config, self._image_token)
            return self._processor

    def process(self, order: MediaOrder) -> tuple[ProcessedMedia, int]:
        """Process a file, an RGB image or samples; see `MediaWork`."""
        processor = self._loaded()
        if isinstance(processor, AudioProcessor):
            return processor.hear(cast("Any", order.image), order.kwargs, order.limit)
        processor.check(order.kwargs)
        image: Any = order.image
        if isinstance(image, bytes):
            image = decode(open_image(image, order.limit))
        check_size(image.width, image.height, order.limit)
        return processor.process(image, order.kwargs), image.width * image.height


class MediaPreprocessor:
    """Makes items of a model's images.  Threads may share it.

    Args:
        work: decodes and processes images; as the configuration says by default.
    """

    def __init__(
        self, config: MediaConfig, tokenizer: Tokenizer, work: MediaWork | None = None
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        strings = tokenizer.vocabulary_strings([config.placeholder_id, config.row_token_id])
        # What marks an image in a prompt, and the token of its rows in the text of the image processor.
        self.placeholder, image_token = strings
        special = {*strings, *(tokenizer.added_tokens.get(i, "") for i in tokenizer.special_ids)}
        self._special = re.compile("|".join(re.escape(text) for text in special if text))
        if work is None and config.in_process:
            work = ConfinedMedia(config, image_token)
        self._work: MediaWork = work or MediaInThread(config, image_token)
        self._fingerprint = _fingerprint(Path(config.folder))
        self._cache = ItemCache(config.processor_cache_bytes)

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many images were looked up in the cache, and how many were found."""
        return self._cache.num_queries, self._cache.num_hits

    @property
    def modality(self) -> str:
        """Return what the model takes: images or audio."""
        return self._config.modality

    @property
    def mark(self) -> str:
        """Return the text in the place of an item in a chat template that shows texts only."""
        before, behind = MARKS.get(self._config.model_type, ("", ""))
        return f"{before}{self.placeholder}{behind}"

    @property
    def folder(self) -> str:
        """Return the folder whose files URLs may name; empty for none."""
        return self._config.sources.folder

    @property
    def placeholder_id(self) -> int:
        """Return the token that marks an image in a prompt."""
        return self._config.placeholder_id

    @property
    def spans(self) -> str:
        """Return which tokens see each other; see `MediaFamily`."""
        return self._config.family.spans

    def warm(self) -> None:
        """Load the image processor before the first image needs it.

        Raises:
            TrouperValidationError: the model's files do not describe an image processor.
            GenerationError: the process for images cannot be started.
        """
        self._work.warm()

    def clear(self) -> None:
        """Forget all processed images.  Their rows are not used again either, because later keys are others."""
        self._cache.clear()
        self._fingerprint = hashlib.sha256(self._fingerprint).digest()

    def place(
        self,
        parts: Sequence[MediaPart],
        kwargs: Sequence[Mapping[str, Any] | None],
        scope: bytes,
        client: str,
    ) -> list[PlacedItem]:
        """Return the items of a prompt's images, in order; their positions are not known yet.

        Args:
            kwargs: the request's `mm_processor_kwargs`; a later mapping has precedence.
            scope: requests of other scopes share nothing with this one.
            client: the name of the client, within which its uuids are unique.

        Raises:
            TrouperValidationError: an image or an option cannot be used; the parameter is the image's place.
            QueueOverflowError: open requests hold too many arrays.
        """
        config = self._config
        what = ITEMS[config.modality]
        if len(parts) > config.max_items:
            rule = f"the prompt has {len(parts)} {what}, and it may have {config.max_items} (limit_mm_per_prompt)"
            raise MediaError(f"{what}: {rule}", parameter=parts[-1].where, code="too_many_media")
        merged: Mapping[str, Any] = config.processor_kwargs
        for given in kwargs:
            merged = merged_kwargs(merged, _options(given))
        options = _packed(merged)
        left = MAX_REQUEST_SECONDS if self.modality == AUDIO else MAX_REQUEST_PIXELS
        found: list[PlacedItem] = []
        for part in parts:
            place = part.where + part.field
            with _named(place, self.modality):
                data = None if part.data is None else self._read(part.data)
                content = _content(data) if part.uuid is None else b"uuid" + part.uuid.encode()
                whose = scope if part.uuid is None else _joined(scope, client.encode())
                key = hashlib.sha256(_joined(self._fingerprint, whose, options, content)).digest()
                placed = self._cache.get(key)
                if placed is None:
                    if data is None:
                        rule = f"{place}: the item with this uuid is not cached; send its data, too"
                        raise MediaError(rule, parameter=place, code="multimodal_cache_miss")
                    order = MediaOrder(data, place, merged, left)
                    placed, size = self._processed(key, order, is_named=part.uuid is not None)
                    left -= size
            found.append(placed)
        return found

    def _read(self, given: Any) -> Any:
        """Return the bytes of a file, or what a Python caller's object shows or contains."""
        return waveform_of(given) if self.modality == AUDIO else _pixels_or_file(given)

    def _processed(
        self, key: bytes, order: MediaOrder, *, is_named: bool
    ) -> tuple[PlacedItem, int]:
        """Process an item that is not cached, and keep it.  Also returns the number of its pixels or seconds."""
        self._cache.check_room()
        processed, size = self._work.process(order)
        placed = self._placed(key, processed, is_named=is_named)
        self._cache.put(key, placed)
        return placed, size

    def _placed(self, key: bytes, processed: ProcessedMedia, *, is_named: bool) -> PlacedItem:
        if self._config.has_two_towers:
            item = MediaItem(key, IMAGE, processed.arrays, 1, ((0, 1),))
            return PlacedItem((self._config.row_token_id,), item)
        text = processed.text
        tokens = list(self._special.finditer(text))
        begin, end = (tokens[0].start(), tokens[-1].end()) if tokens else (0, len(text))
        ids = tuple(self._tokenizer.encode(text[begin:end], add_special_tokens=False))
        runs = tuple(_runs(ids, self._config.row_token_id))
        if not runs:
            raise GenerationError("the processor wrote no token for a row")
        grid = self._grid(processed) if self._config.family.has_grids else None
        arrays, seconds = processed.arrays, processed.seconds
        item = MediaItem(
            key,
            self.modality,
            arrays,
            len(ids),
            runs,
            grid=grid,
            seconds=seconds,
            is_named=is_named,
        )
        return PlacedItem(ids, item, text[:begin], text[end:])

    def _grid(self, processed: ProcessedMedia) -> tuple[int, int, int]:
        """Return the time, height and width of an image, in rows."""
        array = next(array for array in processed.arrays if array.name == "image_grid_thw")
        time, height, width = memoryview(array.data).cast("B").cast("q").tolist()
        size = self._config.merge_size
        return time, height // size, width // size


class ItemCache:
    """The last processed images, up to a number of bytes, and a count of all arrays in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items = OrderedDict[bytes, PlacedItem]()
        # Arrays in the cache or in open requests.
        self._num_live_bytes = 0
        self.num_queries = self.num_hits = 0
        # Reentrant, since a collection of garbage may end arrays at any point of this thread.
        self._lock = threading.RLock()

    def get(self, key: bytes) -> PlacedItem | None:
        """Return an item, and keep it for longer."""
        with self._lock:
            placed = self._items.get(key)
            self.num_queries += 1
            if placed is not None:
                self.num_hits += 1
                self._items.move_to_end(key)
            return placed

    def put(self, key: bytes, placed: PlacedItem) -> None:
        """Keep an item until newer ones need its room."""
        num_bytes = placed.item.num_bytes
        with self._lock:
            for array in placed.item.arrays:
                self._num_live_bytes += array.data.nbytes
                weakref.finalize(array, self._end, array.data.nbytes).atexit = False
            if key in self._items or num_bytes > self._max_bytes:
                return
            self._items[key] = placed
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, oldest = self._items.popitem(last=False)
                self._num_bytes -= oldest.item.num_bytes

    def check_room(self) -> None:
        """Raise QueueOverflowError if the arrays in memory leave no room for more."""
        limit = self._max_bytes + OPEN_BYTES
        if self._num_live_bytes >= limit:
            raise QueueOverflowError(
                f"open requests hold media of {self._num_live_bytes} bytes, and {limit} are allowed; try again later"
            )

    def clear(self) -> None:
        """Forget all items.  Open requests keep theirs."""
        with self._lock:
            self._items.clear()
            self._num_bytes = 0

    def _end(self, num_bytes: int) -> None:
        with self._lock:
            self._num_live_bytes -= num_bytes


def prompt_digests(
    digests: Sequence[bytes], ids: Sequence[int], block_size: int
) -> tuple[bytes, ...]:
    """Hash a prompt that sees all of itself, for the names of its blocks: each depends on all tokens and images of it."""
    whole = hashlib.sha256(b"prompt" + b"".join(digests))
    whole.update(array("q", ids).tobytes())
    return (whole.digest(),) * -(-len(ids) // block_size)


def media_digests(items: Sequence[MediaItem], block_size: int) -> tuple[bytes, ...]:
    """Hash the items that touch each block, for its name in the prefix cache; the hash of a block without items is empty.

    A name depends on each item's key and on where in the item the block begins, so equal names have equal rows.
    """
    blocks: dict[int, Any] = {}
    for item in items:
        for block in range(item.first // block_size, (item.end - 1) // block_size + 1):
            found = blocks.setdefault(block, hashlib.sha256(b"media"))
            offset = item.first - block * block_size
            found.update(item.key + offset.to_bytes(8, "little", signed=True))
    num_blocks = max(blocks, default=-1) + 1
    return tuple(blocks[i].digest() if i in blocks else b"" for i in range(num_blocks))


@contextmanager
def _named(where: str, modality: str) -> Generator[None]:
    """Give the errors about an item the name of its place."""
    try:
        yield
    except RefusedFileError as error:
        raise refused(where, error, modality) from None
    except TrouperValidationError as error:
        if error.parameter != "image":
            raise
        raise MediaError(f"{where}: {error.rule}", parameter=where, code="invalid_image") from error


def _options(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid(NAME, "must be a dict", type(given).__name__)
    return cast("Mapping[str, Any]", given)


def _packed(kwargs: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(kwargs, order="sorted")
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid(NAME, f"must contain plain data: {error}") from None


def _joined(*parts: bytes) -> bytes:
    """Join parts so that no other parts give the same bytes."""
    return b"".join(len(part).to_bytes(8) + part for part in parts)


def _content(data: Any) -> bytes:
    if isinstance(data, bytes):
        return b"file" + hashlib.sha256(data).digest()
    if isinstance(data, Waveform):
        return f"samples {data.rate} ".encode() + hashlib.sha256(data.samples.data).digest()
    width, height = data.size
    return f"pixels {width} {height} ".encode() + hashlib.sha256(data.tobytes()).digest()


def _pixels_or_file(data: Any) -> Any:
    """Return the bytes of a file, or the RGB image that a Python caller's object shows.

    Raises:
        RefusedFileError: it is neither, or too large.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(cast("bytes | bytearray | memoryview", data))
    from PIL import Image

    if isinstance(data, Image.Image):
        check_size(*data.size)
        # A copy, since the caller's image must stay as it is.
        return decode(data.copy())
    return decode(_from_array(data))


def _from_array(data: Any) -> "Image.Image":
    """Make an image of an array or a tensor of bytes: [H, W], [H, W, 3 or 4] or [3, H, W]."""
    import numpy as np
    from PIL import Image

    rule = "must be a PIL image, the bytes of a file, or an array of uint8 [H, W], [H, W, 3], [H, W, 4] or [3, H, W]"
    try:
        values: Any = np.asarray(data.cpu() if hasattr(data, "cpu") else data)
    except Exception:  # an object may raise anything when it is read
        raise RefusedFileError("invalid_value", rule) from None
    if values.ndim == 3 and values.shape[0] == 3 and values.shape[2] not in (3, 4):
        values = values.transpose(1, 2, 0)
    is_image = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))
    if values.dtype != np.uint8 or not is_image:
        shown = f"{type(data).__name__} of {values.dtype} {list(values.shape)}"
        raise RefusedFileError("invalid_value", f"{rule}, not {shown}")
    check_size(values.shape[1], values.shape[0])
    return Image.fromarray(np.ascontiguousarray(values))


def _runs(ids: Sequence[int], row_id: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each run of row tokens."""
    begin = None
    for place, token in enumerate((*ids, -1)):
        if token == row_id and begin is None:
            begin = place
        elif token != row_id and begin is not None:
            yield begin, place - begin
            begin = None


def _fingerprint(folder: Path) -> bytes:
    found = hashlib.sha256(metadata.version("transformers").encode())
    for name in FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        found.update(_joined(name.encode(), content))
    return found.digest()
