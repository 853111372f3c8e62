"""Turn one decoded image into the inputs of a vision tower and the placeholder text for the prompt.  Runs without torch.

The image processors and the placeholder texts are those of transformers.  Its combined processors are not used: some of them need
torchvision for videos, and all of them search the user's text for placeholders.  Each image is processed separately, so its arrays and
its tokens depend on nothing else in the prompt, and can be cached.
"""

import inspect
import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trouper.actors.messages.media import MediaArray, ProcessedMedia
from trouper.config.checkpoint.hf_config import of_retriever
from trouper.config.media import FAMILIES, MediaConfig
from trouper.errors import invalid

if TYPE_CHECKING:
    from PIL import Image

NAME = "mm_processor_kwargs"
# transformers groups the options of its processors in these scopes.  An option outside of them applies to images.
SCOPES = ("images_kwargs", "videos_kwargs", "audio_kwargs")
# Options that clients may not set, because they change the layout of the arrays, which the tower prescribes.
OURS = frozenset(
    {"return_tensors", "data_format", "device", "input_data_format", "disable_grouping"}
)
# Far above any real image: Idefics 3 turns 2,048 x 2,048 pixels into 39 MiB.
MAX_ARRAY_BYTES = 256 * 2**20
BREAK, END = "[IMG_BREAK]", "[IMG_END]"
BEGIN_OF_IMAGE, END_OF_IMAGE = "<start_of_image>", "<end_of_image>"


class ImageProcessor:
    """The image processor of a model folder.

    Args:
        config: contains the folder and the model family.
        image_token: the text of the token that is replaced by a row of the tower's output.

    Raises:
        TrouperValidationError: the folder's files do not describe an image processor of transformers.
    """

    def __init__(self, config: MediaConfig, image_token: str) -> None:
        from transformers import AutoImageProcessor

        folder = Path(config.folder)
        try:
            self._images: Any = cast("Any", AutoImageProcessor).from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library may raise anything for an unsuitable folder
            line = str(error).strip().partition("\n")[0]
            rule = f"transformers cannot read the image processor of the folder: {line}"
            raise invalid("model", rule, config.folder) from error
        self._inputs = FAMILIES[config.model_type].inputs
        fields = _fields(folder, image_token)
        self._texts = _texts(config, {**fields, "image_processor": self._images}, image_token)
        self._known = tuple(sorted(self._images.valid_kwargs.__annotations__.keys() - OURS))

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Check the option names in `mm_processor_kwargs`.

        Raises:
            TrouperValidationError: the processor has no such option, or the tower prescribes its value.
        """
        for name in image_kwargs(kwargs):
            if name in OURS:
                raise invalid(NAME, f"{name} cannot be set: the vision tower prescribes its value")
            if name not in self._known:
                known = ", ".join(self._known)
                raise invalid(
                    NAME, f"the image processor has no option {name[:64]!r}; supported: {known}"
                )

    def process(self, image: "Image.Image", kwargs: Mapping[str, Any]) -> ProcessedMedia:
        """Process one RGB image.

        Args:
            kwargs: `mm_processor_kwargs` of the engine and of the request, merged.

        Raises:
            TrouperValidationError: an option is unknown or has an invalid value, or the processor does not accept the image's size.
        """
        self.check(kwargs)
        options = {**self._texts.defaults, **image_kwargs(kwargs), "return_tensors": "np"}
        try:
            found: Any = self._images([image], **options)
            text = self._texts.text(found)
            arrays = tuple(
                dense(name, np.asarray(found[name])) for name in self._inputs if name in found
            )
        except MemoryError:
            raise
        # The library's message may contain anything, so clients do not see it.
        except Exception as error:
            what = f"an option of {NAME}, or this image," if kwargs else "this image"
            width, height = image.size
            rule = f"the image processor refuses {what} of {width} x {height} pixels"
            raise invalid("image", rule) from error
        num_bytes = sum(array.data.nbytes for array in arrays)
        if num_bytes > MAX_ARRAY_BYTES:
            rule = f"needs {num_bytes} bytes of arrays (maximum {MAX_ARRAY_BYTES}); send a smaller image"
            raise invalid("image", rule)
        return ProcessedMedia(arrays, text)


def image_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image options: those outside of any scope, overridden by those in `images_kwargs`."""
    flat = {name: value for name, value in kwargs.items() if name not in SCOPES}
    scoped: Any = kwargs.get(SCOPES[0]) or {}
    if not isinstance(scoped, Mapping):
        raise invalid(NAME, f"{SCOPES[0]} must be a dict", type(scoped).__name__)
    return {**flat, **cast("Mapping[str, Any]", scoped)}


def merged_kwargs(engine: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of the engine and of a request, including nested mappings.  The request has precedence."""
    found = dict(engine)
    for name, value in request.items():
        mine = found.get(name)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            value = merged_kwargs(cast("Mapping[str, Any]", mine), cast("Mapping[str, Any]", value))
        found[name] = value
    return found


class _Texts:
    """Generate the placeholder text of an image with one of transformers' processor classes.

    The instance is created without calling its constructor, which needs a tokenizer and, in some families, torchvision.
    """

    def __init__(self, cls: Any, fields: Mapping[str, Any]) -> None:
        self._processor = cls.__new__(cls)
        parameters = inspect.signature(cls.__init__).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        for name, value in {**defaults, **fields}.items():
            setattr(self._processor, name, value)
        given: Any = getattr(cls, SCOPES[0], None)
        if given is None:  # transformers before 5.24
            given = getattr(getattr(cls, "valid_processor_kwargs", None), "_defaults", {})
            given = given.get(SCOPES[0], {})
        self.defaults: dict[str, Any] = {
            name: value for name, value in given.items() if name not in OURS
        }

    def text(self, arrays: Any) -> str:
        return self._processor.replace_image_token(arrays, image_idx=0)


class _Pixtral:
    """Generate the placeholder text of a Pixtral image, with a marker after each row of patches.

    The class of transformers cannot be imported without torchvision.
    """

    def __init__(self, fields: Mapping[str, Any], image_token: str) -> None:
        self._patch = int(fields["patch_size"]) * int(fields.get("spatial_merge_size", 1))
        self._token = image_token
        self._break, self._end = (
            fields.get(name, default)
            for name, default in (("image_break_token", BREAK), ("image_end_token", END))
        )
        self.defaults: dict[str, Any] = {"patch_size": self._patch}

    def text(self, arrays: Any) -> str:
        height, width = (int(size) // self._patch for size in arrays["image_sizes"][0])
        lines = [self._token * width] * height
        return self._break.join(lines) + self._end


class _NoTexts:
    """Generate no text, because in models with two towers an image is a whole prompt."""

    defaults: Mapping[str, Any] = {}

    def text(self, arrays: Any) -> str:
        return ""


def _texts(
    config: MediaConfig, fields: Mapping[str, Any], image_token: str
) -> "_Texts | _Pixtral | _NoTexts":
    if config.has_two_towers:
        return _NoTexts()
    if config.is_pixtral:
        return _Pixtral(fields, image_token)
    name = config.family.processor
    kind = config.family.library or config.model_type
    module: Any = import_module(f"transformers.models.{kind}.processing_{kind}")
    return _Texts(getattr(module, name), fields)


def _fields(folder: Path, image_token: str) -> dict[str, Any]:
    """Return the attributes of a processor: from config.json, then tokenizer_config.json, then processor_config.json."""
    config, of_tokenizer, own = (
        read_object(folder / name)
        for name in ("config.json", "tokenizer_config.json", "processor_config.json")
    )
    config = of_retriever(config)
    vision: dict[str, Any] = config.get("vision_config") or {}
    sizes: list[Any] = [vision.get("patch_size", 14), vision.get("image_size", 336)]
    # In some configurations a size is a list of height and width.
    patch, image = (
        int(cast("list[Any]", size)[0] if isinstance(size, list) else size) for size in sizes
    )
    strategy = config.get("vision_feature_select_strategy", "default")
    ratio = config.get("downsample_ratio") or 1 / (config.get("scale_factor") or 1)
    num_tokens = config.get("mm_tokens_per_image") or int(math.pow(image // patch * ratio, 2))
    extra: Any = of_tokenizer.get("extra_special_tokens") or {}
    named: dict[str, Any] = {} if isinstance(extra, list) else {**of_tokenizer, **extra}
    tokens = {
        name: token
        for name, token in named.items()
        if name.endswith("_token") and isinstance(token, str)
    }
    known: dict[str, Any] = {
        "patch_size": patch,
        "spatial_merge_size": config.get("spatial_merge_size", 1),
        "vision_feature_select_strategy": strategy,
        # The class token of CLIP, which the strategy `default` removes again.
        "num_additional_image_tokens": 1 if strategy == "default" else 0,
        "num_image_tokens": num_tokens, "image_seq_len": num_tokens, "image_seq_length": num_tokens,
        "vision_aspect_ratio": config.get("vision_aspect_ratio", "anyres_max_9"),
        "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": "<global-img>", "global_image_token": "<global-img>",
        "start_image_token": "<img>", "end_image_token": "</img>",
    }  # fmt: skip
    given = {name: value for name, value in own.items() if isinstance(value, str | int | float)}
    found = {**known, **tokens, **given, "image_token": image_token}
    # Gemma 3 uses this text for each image, and for each crop of a large one.
    begin, end = found.get("boi_token", BEGIN_OF_IMAGE), found.get("eoi_token", END_OF_IMAGE)
    rows = image_token * int(found["image_seq_length"])
    return {**found, "full_image_sequence": f"\n\n{begin}{rows}{end}\n\n"}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist.  Raises TrouperValidationError for invalid JSON."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise invalid("model", f"{path.name} cannot be read: {error}", str(path)) from error
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def dense(name: str, values: np.ndarray[Any, Any]) -> MediaArray:
    """Wrap an input of a tower as contiguous, read-only memory in row-major order."""
    values = np.ascontiguousarray(values)
    return MediaArray(name, values.dtype.name, values.shape, values.data.cast("B").toreadonly())
