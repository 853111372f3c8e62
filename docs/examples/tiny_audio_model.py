"""Make a tiny Qwen3-ASR with random weights, to try recordings without a download: python tiny_audio_model.py FOLDER

It has every file of a real model: weights, tokenizer, chat template and feature extractor.  Its answers are noise.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRForConditionalGeneration,
)

SPECIAL = ["<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(folder: Path) -> None:
    """Write the files of the model into a folder."""
    # One token for each byte, and six special tokens behind them.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
    }
    tower = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "downsample_hidden_size": 16,
        "output_dim": 64,
    }
    config = Qwen3ASRConfig(
        text_config=text,
        audio_config=tower,
        audio_token_id=tokenizer.convert_tokens_to_ids(SPECIAL[0]),
        pad_token_id=tokenizer.convert_tokens_to_ids("<pad>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("</s>"),
    )
    torch.manual_seed(0)
    Qwen3ASRForConditionalGeneration(config).save_pretrained(folder)
    Qwen3ASRFeatureExtractor().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
