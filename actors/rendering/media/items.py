"""Convert images and recordings of requests to items for the device, cache processed items, and limit their memory.

Laws.
1. An item depends only on its content and options, so equal keys have equal arrays and tokens.
2. A key is a hash of the content, the options, the processor's files and the request's scope.  Because of the scope, no tenant can find
   out from response times what another one has sent.
3. The arrays in memory take at most `mm_processor_cache_gb` plus OPEN_BYTES.  Beyond that, requests are refused before decoding.
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

# Limit for uncached arrays of open requests: 100 images of SmolVLM, or 180 of a LLaVA in 1080p.
OPEN_BYTES = 2 * 2**30
# Tokens before and after a recording, for chat templates that support only text.
MARKS = {
    "qwen2_audio": ("<|audio_bos|>", "<|audio_eos|>"),
    "qwen3_asr": ("<|audio_start|>", "<|audio_end|>"),
    "voxtral": ("[BEGIN_AUDIO]", ""),
}
# Files that influence arrays and tokens.  Their content is part of each key.
FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "config.json",
    "tokenizer_config.json",
)


class PlacedItem(NamedTuple):
    """An item, and the tokens that represent it in the prompt.

    Attributes:
        before: text to insert before these tokens, and to encode together with the text before the image.
        after: text to insert after these tokens, and to encode together with the text after the image.
    """

    ids: tuple[int, ...]
    item: MediaItem
    before: str = ""
    after: str = ""


class MediaWork(Protocol):
    """Decodes and processes one image or recording, in the calling thread or in another process."""

    def warm(self) -> None:
        """Load the processor now instead of at the first `process`."""
        ...

    def process(self, order: MediaOrder) -> tuple[ProcessedMedia, int]:
        """Decode and process one item.  Returns it with its number of pixels or seconds.

        Raises:
            TrouperValidationError: the file or an option cannot be used.
        """
        ...


class MediaInThread:
    """Decodes and processes images and recordings in the calling thread."""

    def __init__(self, config: MediaConfig, image_token: str) -> None:
        self._config, self._image_token = config, image_token
        self._processor: ImageProcessor | AudioProcessor | None = None
        self._loading = threading.Lock()

    def warm(self) -> None:
        """Load the processor.  Raises TrouperValidationError if the folder contains none."""
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
    """Convert a model's images or recordings to items.  Thread-safe.

    Args:
        work: decodes and processes the files.  By default the configuration chooses between threads and processes.
    """

    def __init__(
        self, config: MediaConfig, tokenizer: Tokenizer, work: MediaWork | None = None
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        strings = tokenizer.vocabulary_strings([config.placeholder_id, config.row_token_id])
        # The text that marks an image in a prompt, and the token that the image processor writes for each row.
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
        """Return the numbers of cache lookups and of cache hits."""
        return self._cache.num_queries, self._cache.num_hits

    @property
    def modality(self) -> str:
        """Return the modality that the model accepts: image or audio."""
        return self._config.modality

    @property
    def mark(self) -> str:
        """Return the text to write for an item if the chat template supports only text."""
        before, behind = MARKS.get(self._config.model_type, ("", ""))
        return f"{before}{self.placeholder}{behind}"

    @property
    def folder(self) -> str:
        """Return the folder whose files `file:` URLs may read, or an empty string."""
        return self._config.sources.folder

    @property
    def placeholder_id(self) -> int:
        """Return the token that marks an image in a prompt."""
        return self._config.placeholder_id

    @property
    def spans(self) -> str:
        """Return the rule for attention within an item; see `MediaFamily`."""
        return self._config.family.spans

    def warm(self) -> None:
        """Load the processor before the first request needs it.

        Raises:
            TrouperValidationError: the model's files do not describe a processor.
            GenerationError: the media process cannot be started.
        """
        self._work.warm()

    def clear(self) -> None:
        """Clear the cache.  Later keys differ from earlier ones, so rows cached on the device are not reused either."""
        self._cache.clear()
        self._fingerprint = hashlib.sha256(self._fingerprint).digest()

    def place(
        self,
        parts: Sequence[MediaPart],
        kwargs: Sequence[Mapping[str, Any] | None],
        scope: bytes,
        client: str,
    ) -> list[PlacedItem]:
        """Process the images or recordings of a prompt.  Returns their items in order, without positions.

        Args:
            kwargs: the request's `mm_processor_kwargs`.  Later mappings have precedence.
            scope: requests with different scopes share no cached items.
            client: the name of the client.  Its uuids are unique only within this name.

        Raises:
            TrouperValidationError: a file or an option cannot be used.  `parameter` is the item's location.
            QueueOverflowError: the arrays of open requests take too much memory.
        """
        config = self._config
        what = ITEMS[config.modality]
        if len(parts) > config.max_items:
            rule = f"the prompt has {len(parts)} {what}; the maximum is {config.max_items} (limit_mm_per_prompt)"
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
                        rule = (
                            f"{place}: the item with this uuid is not cached; send its data again"
                        )
                        raise MediaError(rule, parameter=place, code="multimodal_cache_miss")
                    order = MediaOrder(data, place, merged, left)
                    placed, size = self._processed(key, order, is_named=part.uuid is not None)
                    left -= size
            found.append(placed)
        return found

    def _read(self, given: Any) -> Any:
        """Return the bytes of a file, or the pixels or samples of a Python caller's object."""
        return waveform_of(given) if self.modality == AUDIO else _pixels_or_file(given)

    def _processed(
        self, key: bytes, order: MediaOrder, *, is_named: bool
    ) -> tuple[PlacedItem, int]:
        """Process an uncached item and cache it.  Returns it with its number of pixels or seconds."""
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
            raise GenerationError(
                "the model's processor created no placeholder token for an item; check the model's processor files"
            )
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
        """Return the grid of an image, (time, height, width), after merging patches."""
        array = next(array for array in processed.arrays if array.name == "image_grid_thw")
        time, height, width = memoryview(array.data).cast("B").cast("q").tolist()
        size = self._config.merge_size
        return time, height // size, width // size


class ItemCache:
    """An LRU cache of processed items, limited by bytes.  It also counts the bytes of all arrays in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items = OrderedDict[bytes, PlacedItem]()
        # Arrays in the cache or in open requests.
        self._num_live_bytes = 0
        self.num_queries = self.num_hits = 0
        # Reentrant, because garbage collection may run a finalizer at any point of this thread.
        self._lock = threading.RLock()

    def get(self, key: bytes) -> PlacedItem | None:
        """Return a cached item and mark it as just used, or return None."""
        with self._lock:
            placed = self._items.get(key)
            self.num_queries += 1
            if placed is not None:
                self.num_hits += 1
                self._items.move_to_end(key)
            return placed

    def put(self, key: bytes, placed: PlacedItem) -> None:
        """Cache an item, and evict the least recently used ones above the limit."""
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
        """Raise QueueOverflowError if the arrays in memory have reached the limit."""
        limit = self._max_bytes + OPEN_BYTES
        if self._num_live_bytes >= limit:
            raise QueueOverflowError(
                f"media in memory take {self._num_live_bytes} bytes (maximum {limit}); try again later"
            )

    def clear(self) -> None:
        """Remove all items from the cache.  Open requests keep theirs."""
        with self._lock:
            self._items.clear()
            self._num_bytes = 0

    def _end(self, num_bytes: int) -> None:
        with self._lock:
            self._num_live_bytes -= num_bytes


def prompt_digests(
    digests: Sequence[bytes], ids: Sequence[int], block_size: int
) -> tuple[bytes, ...]:
    """Hash a prompt with bidirectional attention for the names of its blocks.

    Each block depends on all tokens and images of the prompt, so all blocks get the same hash.
    """
    whole = hashlib.sha256(b"prompt" + b"".join(digests))
    whole.update(array("q", ids).tobytes())
    return (whole.digest(),) * -(-len(ids) // block_size)


def media_digests(items: Sequence[MediaItem], block_size: int) -> tuple[bytes, ...]:
    """Hash, for each block, the items that overlap it.  The hash becomes part of the block's name in the prefix cache.

    It depends on the items' keys and on their offsets in the block, so equal names have equal rows.  Empty without items.
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
    """Add the item's location to errors about it."""
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
    """Concatenate parts with their lengths, so that different parts never give the same bytes."""
    return b"".join(len(part).to_bytes(8) + part for part in parts)


def _content(data: Any) -> bytes:
    if isinstance(data, bytes):
        return b"file" + hashlib.sha256(data).digest()
    if isinstance(data, Waveform):
        return f"samples {data.rate} ".encode() + hashlib.sha256(data.samples.data).digest()
    width, height = data.size
    return f"pixels {width} {height} ".encode() + hashlib.sha256(data.tobytes()).digest()


def _pixels_or_file(data: Any) -> Any:
    """Return the bytes of a file, or convert a Python caller's image or array to RGB pixels.

    Raises:
        RefusedFileError: the object is neither, or too large.
    """
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(cast("bytes | bytearray | memoryview", data))
    from PIL import Image

    if isinstance(data, Image.Image):
        check_size(*data.size)
        # Decode a copy, because the caller's image must not be modified.
        return decode(data.copy())
    return decode(_from_array(data))


def _from_array(data: Any) -> "Image.Image":
    """Convert a uint8 array or tensor [H, W], [H, W, 3 or 4] or [3, H, W] to an image."""
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
