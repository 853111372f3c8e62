"""Make a tiny LLaVA with random weights, to try images without a download: python tiny_vision_model.py FOLDER

It has every file of a real model: weights, tokenizer, chat template and image processor.  Its answers are noise.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(folder: Path) -> None:
    """Write the files of the model into a folder."""
    # One token for each byte, and four special tokens behind them.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=56, patch_size=14, projection_dim=64),
        text_config=LlamaConfig(
            **sizes, vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=258
        ),
        image_token_id=image_token,
        image_token_index=image_token,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    square = {"height": 56, "width": 56}
    images = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=square)
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
