"""The sizes of what the workers of a device share, from its config; torch is not needed."""

from trouper.actors.executor.models.families.mixtures import check_device
from trouper.actors.executor.models.families.registry import decoder_traits
from trouper.actors.executor.models.sharding import check_shards
from trouper.actors.executor.parallel.ranks import CrewSizes, ModelSizes
from trouper.config.resolve import EngineConfig


def crew_sizes(config: EngineConfig) -> CrewSizes:
    """Read the model's widths, and size all memory and links by them.

    Raises:
        TrouperValidationError: the model cannot be shared out among so many ranks.
        UnsupportedFeatureError: the architecture is not known, or not on the device.
    """
    traits = decoder_traits(config.model.hf_config, config.model.architecture)
    check_device(traits, config.device)
    check_shards(traits, config.tensor_parallel_size, quantization=config.quantization)
    return CrewSizes.of(config, ModelSizes(traits.hidden_size, traits.vocab_size))
