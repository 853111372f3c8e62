"""Find the family of an encoder by the name of its architecture."""

from collections.abc import Callable

from trouper.actors.executor.models.encoder_traits import EncoderTraits
from trouper.actors.executor.models.families import bert, rotary_encoders
from trouper.actors.executor.models.traits import HfConfig, read_traits
from trouper.errors import UnsupportedFeatureError

# Names that begin like those of a reader, and are of other models.
REFUSED = {
    "BertGeneration": "is not supported; a BERT that embeds is a BertModel",
}
READERS: dict[str, Callable[[HfConfig], EncoderTraits]] = {
    "Bert": bert.bert,
    "Roberta": bert.roberta,
    # The first prefix that fits counts.
    "XLMRobertaXL": bert.xlm_roberta_xl,
    "XLMRoberta": rotary_encoders.xlm_roberta,
    "Data2VecText": bert.roberta,
    "MegatronBert": bert.megatron_bert,
    "Electra": bert.electra,
    "Albert": bert.albert,
    "Camembert": bert.roberta,
    "DistilBert": bert.distilbert,
    "MPNet": bert.mpnet,
    "DebertaV2": bert.deberta_v2,
    "ModernBert": rotary_encoders.modernbert,
    "EuroBert": rotary_encoders.eurobert,
    "JinaEmbeddingsV3": rotary_encoders.jina_v3,
    "T5Encoder": rotary_encoders.t5,
    "MT5Encoder": rotary_encoders.mt5,
    "UMT5Encoder": rotary_encoders.umt5,
    "NomicBert": rotary_encoders.nomic,
    "Gte": rotary_encoders.gte,
    "New": rotary_encoders.gte,
    "HF_ColBERT": bert.bert,
    "ColBERT": bert.bert,
}


def encoder_traits(config: HfConfig, architecture: str) -> EncoderTraits | None:
    """Read the config of an encoder.  Returns None for an architecture of another kind.

    Raises:
        UnsupportedFeatureError: a trait of this model is not known.
        TrouperValidationError: the config lacks a number or contradicts itself.
    """
    for prefix, reason in REFUSED.items():
        if architecture.startswith(prefix):
            raise UnsupportedFeatureError(f"{architecture}: {reason}", parameter="model")
    for prefix, reader in READERS.items():
        if architecture.startswith(prefix):
            return read_traits(reader, config, architecture)
    return None
