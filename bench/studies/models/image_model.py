"""Create the models and images for the study of images: the shapes of SmolVLM-256M and CLIP with random weights.

No real weights are needed, because costs depend on shapes only. The tokenizer has one token for each byte.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROWS = "<image>"
SPECIAL = (
    ROWS, "<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)),
)  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "pad_token_id": 2,
}  # fmt: skip
QUESTION = " What is in this image?"


def write_model(
    folder: Path,
    num_layers: int,
    longest_edge: int,
    *,
    tower_layers: int = 12,
    has_weights: bool = False,
    is_idefics: bool = False,
) -> None:
    """Write a model of SmolVLM's shape with a tokenizer of bytes.

    Args:
        longest_edge: the size to which images are scaled before they are cut into tiles of 512.
        has_weights: also write random weights, for studies that read them.
        is_idefics: name the same model Idefics 3, without a processor of videos, so that it needs no torchvision elsewhere.
    """
    import transformers as t

    library: Any = t
    kind = "Idefics3" if is_idefics else "SmolVLM"
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    config = getattr(library, f"{kind}Config")(
        vision_config={**TOWER, "num_hidden_layers": tower_layers},
        text_config=t.LlamaConfig(**TEXT, num_hidden_layers=num_layers),
        scale_factor=4,
        image_token_id=tokenizer.convert_tokens_to_ids(ROWS),
        pad_token_id=TEXT["pad_token_id"],
        tie_word_embeddings=False,
        architectures=[f"{kind}ForConditionalGeneration"],
    )
    images = getattr(library, f"{kind}ImageProcessorPil")(
        size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 512}
    )
    for each in (images, tokenizer):
        each.save_pretrained(folder)
    if has_weights:
        random_model(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    text = {"image_seq_len": 64, "processor_class": f"{kind}Processor"}
    (folder / "processor_config.json").write_text(json.dumps(text))


def random_model(config: Any) -> Any:
    """Return transformers' model of a config with random weights in bfloat16."""
    import torch
    import transformers as t

    made: Any = getattr(t, config.architectures[0])._from_config(config, dtype=torch.bfloat16)
    return made.eval()


def write_clip(folder: Path) -> None:
    """Write a model of the shape of CLIP ViT-B/32, without weights."""
    import transformers as t

    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    named = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    config = t.CLIPConfig(text_config=named, vision_config={}, architectures=["CLIPModel"])
    for each in (config, t.CLIPImageProcessorPil(), tokenizer):
        each.save_pretrained(folder)


def _tokenizer() -> Any:
    import transformers as t
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return t.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>")


def picture(seed: int) -> Any:
    """Make an image of 640 x 480 random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (480, 640, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def photo(seed: int) -> bytes:
    """Make a JPEG file of 1920 x 1080.  Smooth areas with some noise make it about as large as a photo, 0.6 MiB."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    areas = Image.fromarray(rng.integers(0, 255, (27, 48, 3), dtype=np.uint8))
    smooth = np.asarray(areas.resize((1920, 1080), Image.Resampling.BICUBIC), dtype=np.int16)
    noise = rng.integers(-9, 10, (1080, 1920, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def another(file: bytes, number: int) -> bytes:
    """Return a JPEG file with the same pixels and other bytes, so that caches do not recognise it."""
    return file + number.to_bytes(8)


def prompt(seed: int, before: str = "", behind: str = QUESTION) -> dict[str, Any]:
    return {"prompt": before + ROWS + behind, "multi_modal_data": {"image": picture(seed)}}


def engine_options(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 2048,
        "media_processor": "thread", "num_gpu_blocks_override": 1024, "block_size": 16, **given,
    }  # fmt: skip


def timed(work: Callable[[], Any]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin
