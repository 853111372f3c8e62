"""A model under the names of vLLM's ModelConfig, from the resolved configuration; `get_model_config` returns it."""

from typing import Any

from trouper.config.resolve import EngineConfig


class FieldsOfConfig(dict[str, Any]):
    """The fields of config.json, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config.json has no field {name!r}") from None


class ModelView:
    """A model as an engine runs it; names that are not here are those of trouper's own `ModelConfig`."""

    def __init__(self, config: EngineConfig, served_model_name: str | list[str] | None) -> None:
        self._model = config.model
        self.model = config.model.name
        self.served_model_name = served_model_name or config.model.name
        self.tokenizer = config.tokenizer
        self.skip_tokenizer_init = config.tokenizer is None
        self.dtype = config.dtype
        self.seed = config.seed
        self.max_model_len = config.max_model_len
        self.max_logprobs = config.max_logprobs
        self.quantization = config.quantization
        self.enforce_eager = config.enforce_eager
        self.runner_type = "generate" if config.pooler is None else "pooling"
        self.hf_config = FieldsOfConfig(config.model.source_config)
        self.hf_text_config = FieldsOfConfig(config.model.hf_config)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no model yet
            raise AttributeError(name)
        return getattr(self._model, name)

    def get_vocab_size(self) -> int:
        return self._model.vocab_size

    def get_hidden_size(self) -> int:
        return self._model.hidden_size

    def get_total_num_attention_heads(self) -> int:
        return int(self.hf_text_config.get("num_attention_heads") or 0)

    def get_total_num_kv_heads(self) -> int:
        found = self.hf_text_config.get("num_key_value_heads")
        return int(found or self.get_total_num_attention_heads())

    def get_total_num_hidden_layers(self) -> int:
        return int(self.hf_text_config.get("num_hidden_layers") or 0)

    def get_head_size(self) -> int:
        heads = self.get_total_num_attention_heads() or 1
        return int(self.hf_text_config.get("head_dim") or self.get_hidden_size() // heads)

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Return the sampling defaults that differ from those of `SamplingParams`."""
        return dict(self._model.default_sampling)
