"""Train tokenizers small enough for a test, and write their folders."""

import json

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

LINES = [
    "the cat sat on the mat",
    "hello world, hello user",
    "日本語 and emoji 🎉",
    "user assistant",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level():
    """Like GPT-2, Qwen and Llama 3: every byte has a token, BOS is not added."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def metaspace():
    """Like Llama 2: ▁ for spaces, byte fallback, BOS by the post-processor."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    for letter in "▁abcdefghijklmnopqrstuvwxyz|<>_":
        vocab.setdefault(letter, len(vocab))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


BACKENDS = {"bytes": byte_level, "metaspace": metaspace}


def write_folder(folder, kind, config):
    """Write the files of a tokenizer of this kind, with these entries of `tokenizer_config.json`; returns the folder."""
    BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    if kind == "bytes":
        config = {"eos_token": "<|im_end|>"} | config
    else:
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
