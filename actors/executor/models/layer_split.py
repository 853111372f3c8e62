"""Which layers of a model a pipeline stage has, from the model's sizes.  Pure: all stages come to the same cut."""

import msgspec

from trouper.actors.executor.models.traits import DecoderTraits, LayerTraits
from trouper.config.resolve import EngineConfig
from trouper.config.stages import Stage, split_layers


def model_stages(config: EngineConfig, traits: DecoderTraits) -> tuple[Stage, ...]:
    """Cut the model as the config says: by its own partition, or by the bytes that a step reads.

    Raises:
        TrouperValidationError: there are more stages than layers, or the partition does not fit.
    """
    head = traits.vocab_size * traits.hidden_size
    return split_layers(
        [_layer_size(traits, layer) for layer in traits.layers],
        config.num_stages,
        head_cost=head,
        partition=config.layer_partition,
    )


def traits_of(stage: Stage, traits: DecoderTraits) -> DecoderTraits:
    """Return the traits of a stage's layers alone."""
    return msgspec.structs.replace(traits, layers=traits.layers[stage.first : stage.last])


def _layer_size(traits: DecoderTraits, layer: LayerTraits) -> int:
    """Count the weights of a layer's products: of experts all, as a step of many tokens reads them."""
    width, num_matrices = traits.mlp.intermediate_size, 3 if traits.mlp.is_gated else 2
    if layer.is_sparse and traits.experts is not None:
        experts = traits.experts
        width = experts.count * experts.intermediate_size + experts.shared_size
        num_matrices = 3
    return traits.hidden_size * (2 * traits.q_size + 2 * traits.kv_size + num_matrices * width)
