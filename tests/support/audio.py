"""Tiny random models that hear, with processors and chat templates, and recordings for them."""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.vision import EOS, PAD, TEXT, tokenizer

RATE = 16_000
TOWER: dict[str, Any] = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
}  # fmt: skip
# Token names by family: the row token first.
TOKENS = {
    "qwen2_audio": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
    "qwen3_asr": ["<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"],
    "voxtral": ["[AUDIO]", "[BEGIN_AUDIO]", "[INST]", "[/INST]", "[TRANSCRIBE]"],
}
MARKS = {
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
}
FAMILIES = tuple(TOKENS)
# Windows of one second keep the towers small.
SECONDS = 1


def _config(kind: str) -> Any:
    t = transformers
    if kind == "qwen2_audio":
        tower = {**TOWER, "max_source_positions": 50 * SECONDS}
        return t.Qwen2AudioConfig(audio_config=tower, text_config=t.Qwen2Config(**TEXT))
    if kind == "voxtral":
        tower = {
            "num_mel_bins": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "max_source_positions": 50 * SECONDS,
        }  # fmt: skip
        return t.VoxtralConfig(audio_config=tower, text_config={**TEXT, "head_dim": 16})
    tower = {**TOWER, "downsample_hidden_size": 8, "output_dim": 64, "n_window_infer": 200}
    return t.Qwen3ASRConfig(audio_config=tower, text_config={**TEXT, "head_dim": 16})


class HearingModel:
    """A saved tiny model that hears, and the reference that answers for it."""

    def __init__(self, kind: str, folder: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self.kind, self.folder = kind, folder
        self.tokens = tokenizer(TOKENS[kind], "<image>")
        template = self.tokens.chat_template.replace("'image'", "'audio'")
        self.tokens.chat_template = template.replace("<image>", MARKS[kind])
        self.audio_token = TOKENS[kind][0]
        config = _config(kind)
        config.audio_token_id = self.row_id = self.tokens.convert_tokens_to_ids(self.audio_token)
        config.tie_word_embeddings = False
        config.text_config.tie_word_embeddings = False
        torch.manual_seed(5)
        classes = {
            "qwen2_audio": transformers.Qwen2AudioForConditionalGeneration,
            "voxtral": transformers.VoxtralForConditionalGeneration,
            "qwen3_asr": transformers.Qwen3ASRForConditionalGeneration,
        }
        self.model: Any = classes[kind](config).eval().float()
        with torch.no_grad():
            # Weights of the usual size let a recording change logprobs by a hundredth at least.
            for name, parameter in self.model.named_parameters():
                if parameter.dim() >= 2 and "embed_positions" not in name:
                    num_inputs = parameter[0].numel()
                    parameter.normal_(std=1.5 * num_inputs**-0.5)
                elif not parameter.any():
                    parameter.normal_(std=0.1)
        generation = self.model.generation_config
        generation.eos_token_id, generation.pad_token_id = EOS, PAD
        self.model.save_pretrained(folder)
        self.tokens.save_pretrained(folder)
        self.extractor = self._extractor()
        (folder / "preprocessor_config.json").write_text(json.dumps(self.extractor.to_dict()))

    def _extractor(self) -> Any:
        t, options = transformers, {"feature_size": 16, "chunk_length": SECONDS}
        if self.kind == "qwen3_asr":
            return t.Qwen3ASRFeatureExtractor(**options)
        return t.WhisperFeatureExtractor(**options)

    def inputs(self, samples: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the model's arguments for one recording, made by the library's own classes."""
        given: dict[str, Any] = {"sampling_rate": RATE, "return_tensors": "pt"}
        if self.kind == "qwen2_audio":
            found = self.extractor(
                samples, padding="max_length", return_attention_mask=True, **given
            )
            mask = found["attention_mask"]
            return {"input_features": found["input_features"], "feature_attention_mask": mask}
        if self.kind == "voxtral":
            given |= {"padding": True, "truncation": False, "pad_to_multiple_of": SECONDS * RATE}
            mels = self.extractor(samples, **given)["input_features"]
            windows = mels.reshape(mels.shape[1], -1, 100 * SECONDS).transpose(0, 1)
            return {"input_features": windows}
        found = self.extractor(
            samples,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            n_window=50,
            **given,
        )
        mask = found["attention_mask"]
        return {"input_features": found["input_features"], "input_features_mask": mask}

    def rows(self, samples: np.ndarray) -> range:
        """Return one number for each row of a recording."""
        length = -(-len(samples) // 160)
        if self.kind == "qwen2_audio":
            return range(((length - 1) // 2 + 1 - 2) // 2 + 1)
        if self.kind == "voxtral":
            return range(25 * -(-len(samples) // (SECONDS * RATE)))
        whole, rest = divmod(len(samples) // 160, 100)
        return range(13 * whole + -(-rest // 8))

    def logprobs(self, ids: list[int], recordings: list[np.ndarray]) -> torch.Tensor:
        """Return the logprobs [T, vocabulary] that the whole model of transformers gives to a prompt with recordings."""
        made = [self.inputs(samples) for samples in recordings]
        rows = {name: _joined([each[name] for each in made]) for name in (made[0] if made else ())}
        with torch.no_grad():
            found = self.model(input_ids=torch.tensor([ids]), **rows).logits[0]
        return torch.log_softmax(found.float(), -1)


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    most = max(value.shape[-1] for value in values)
    return torch.cat([torch.nn.functional.pad(v, (0, most - v.shape[-1])) for v in values])


def tone(seed: int, seconds: float = 0.7, rate: int = RATE) -> np.ndarray:
    """Make a recording: a tone that rises, with noise."""
    source = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    sound = np.sin(2 * np.pi * (200 + 97 * seed) * times * (1 + times))
    return (0.4 * sound + 0.05 * source.standard_normal(len(times))).astype(np.float32)


def saved(samples: np.ndarray, kind: str = "WAV", rate: int = RATE, **options: Any) -> bytes:
    """Return a file of samples."""
    import soundfile

    made = io.BytesIO()
    soundfile.write(made, samples, rate, format=kind, **options)
    return made.getvalue()
