"""The resolved configuration under vLLM's names, for scripts that read vLLM's.

`get_model_config` returns the model's part, `vllm_config` all parts.
"""

from typing import Any

from trouper.config.engine_config import EngineConfig


class FieldsOfConfig(dict[str, Any]):
    """The fields of config.json, as keys and as attributes.

    Scripts for vLLM read `hf_config` as a transformers object, with attributes; trouper does not
    import transformers for it.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config.json has no field {name!r}") from None


class ModelView:
    """A model as an engine runs it.  Names that this class lacks are those of trouper's own `ModelConfig`."""

    def __init__(self, config: EngineConfig) -> None:
        self._model = config.model
        self.model = config.model.name
        names = config.served_names or (config.model.name,)
        self.served_model_name = names[0] if len(names) == 1 else list(names)
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
        # A copy under construction has no model yet.
        if name.startswith("_"):
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


class ConfigView:
    """A part of the configuration.  The error for an unknown name names the class to look in."""

    def __init__(self, kind: str, **fields: Any) -> None:
        self.__dict__.update(fields)
        self._kind = kind

    def __repr__(self) -> str:
        fields = {name: value for name, value in vars(self).items() if name != "_kind"}
        return f"{self.__dict__.get('_kind')}({', '.join(f'{n}={v!r}' for n, v in fields.items())})"

    def __getattr__(self, name: str) -> Any:
        kind = self.__dict__.get("_kind")
        known = ", ".join(each for each in vars(self) if each != "_kind")
        raise AttributeError(
            f"{kind} has no {name!r}: it has {known}. The engine's `config` has the whole resolved configuration"
        )


def vllm_config(config: EngineConfig) -> ConfigView:
    """Return the parts that scripts for vLLM read, from the resolved configuration.

    Names are vLLM's, such as `cache_config.block_size`.  A name without a counterpart raises
    AttributeError with a hint.
    """
    scheduler = config.scheduler
    num_workers = config.tensor_parallel_size * scheduler.num_stages
    return ConfigView(
        "VllmConfig",
        model_config=ModelView(config),
        cache_config=ConfigView(
            "CacheConfig",
            block_size=config.block_size,
            enable_prefix_caching=scheduler.enable_prefix_caching,
            gpu_memory_utilization=config.gpu_memory_utilization,
        ),
        parallel_config=ConfigView(
            "ParallelConfig",
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=scheduler.num_stages,
            data_parallel_size=config.data_parallel_size,
            world_size=num_workers,
        ),
        scheduler_config=ConfigView(
            "SchedulerConfig",
            max_model_len=config.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            policy=scheduler.policy,
        ),
        device_config=ConfigView("DeviceConfig", device_type=config.device),
    )
