"""Find the reader of an architecture, and the architecture that can compute a model.

`config.json` names the class of the transformers library that a model was trained with.  A decoder class in `READERS`, or an encoder
class that begins like a name in `ENCODERS`, is computed by trouper's own code.  A new family needs only a reader, if its
differences are traits already.
"""

from collections.abc import Callable

import msgspec

from trouper.actors.executor.models.encoder_traits import EncoderTraits
from trouper.actors.executor.models.families import bert, rotary_encoders
from trouper.actors.executor.models.families.hybrids import HYBRIDS
from trouper.actors.executor.models.families.layer_norm import LAYER_NORM_FAMILIES
from trouper.actors.executor.models.families.mixtures import MIXTURES
from trouper.actors.executor.models.families.rms_norm import RMS_NORM_FAMILIES
from trouper.actors.executor.models.traits import DecoderTraits, HfConfig, read_traits
from trouper.errors import UnsupportedFeatureError

SEES_AHEAD = (
    "its tokens attend to later ones (is_causal or use_bidirectional_attention), so it cannot generate; "
    "runner='pooling' embeds with it"
)
SIBLING_SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "Model")
READERS: dict[str, Callable[[HfConfig], DecoderTraits]] = {
    **RMS_NORM_FAMILIES,
    **LAYER_NORM_FAMILIES,
    **MIXTURES,
    **HYBRIDS,
}
# The text models of multimodal architectures by `model_type`, from `text_config` if there is one. Three-dimensional
# positions have only one dimension in prompts of text.
TEXT_MODELS = {
    "colpali": "GemmaForCausalLM",
    "colqwen2": "Qwen2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}

# Multimodal classes that scale or cap logits like their text model's own class. All others return the plain product,
# whatever `text_config` contains.
SCALING_HEADS = frozenset(
    {
        "CohereCompassForConditionalGeneration", "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration", "Granite4VisionForConditionalGeneration",
        "GraniteDoclingForConditionalGeneration", "HyperCLOVAXVisionV2ForConditionalGeneration",
        "Inkling2ForConditionalGeneration", "Inkling2LoopForConditionalGeneration",
        "MistralLarge4ForConditionalGeneration", "MuseGlimmerForConditionalGeneration",
        "MuseSparkForConditionalGeneration", "PaliGemmaForConditionalGeneration", "T5Gemma2ForConditionalGeneration",
    }
)  # fmt: skip
# Attention within their prompts is bidirectional, although their text models are causal.
PREFIX_MODELS = ("PaliGemmaForConditionalGeneration",)


def decoder_traits(
    config: HfConfig, architecture: str, *, may_see_ahead: bool = False
) -> DecoderTraits:
    """Read the traits of a decoder from its Hugging Face config.

    Args:
        may_see_ahead: accept bidirectional attention; such a model can pool but not generate.

    Raises:
        UnsupportedFeatureError: the architecture, or a trait of this model, is not supported.
        TrouperValidationError: the config lacks a number or contradicts itself.
    """
    outer = architecture
    if is_text_part(outer):
        architecture = TEXT_MODELS.get(str(config.get("model_type")), architecture)
    if outer in PREFIX_MODELS:
        # It describes prompts with images, whose tokens see each other as the plan of a step says.
        config = {**config, "use_bidirectional_attention": None}
    if outer == "ColPaliForRetrieval":
        # All tokens of a page, and of a question, see each other.
        config = {**config, "use_bidirectional_attention": True}
    reader = READERS.get(architecture)
    if reader is None:
        known = ", ".join(sorted(READERS))
        raise UnsupportedFeatureError(
            f"architecture {architecture!r} is not supported; supported: {known}"
        )
    traits = read_traits(reader, config, architecture)
    if is_text_part(outer) and outer not in SCALING_HEADS:
        traits = msgspec.structs.replace(traits, logits_scale=1.0, final_softcap=None)
    if not traits.is_causal and not may_see_ahead:
        raise UnsupportedFeatureError(SEES_AHEAD, parameter="model")
    return traits


def is_text_part(architecture: str) -> bool:
    """Whether the architecture is a multimodal one, which also takes images or audio.

    Its text model is a part of the checkpoint, with names of its own.
    """
    return architecture.endswith(("ForConditionalGeneration", "ForRetrieval"))


def check_text_part(architecture: str) -> None:
    """Check that the text model of a multimodal architecture reads prompts of text like the whole model does.

    A silent difference would give wrong answers.

    Raises:
        UnsupportedFeatureError: it does not.
    """
    if architecture in PREFIX_MODELS:
        rule = (
            f"{architecture} needs bidirectional attention within prompts, which is not supported"
        )
        raise UnsupportedFeatureError(rule, parameter="model")


def has_own_code(config: HfConfig, architecture: str) -> bool:
    """Whether trouper's own decoder computes this model: its architecture and all its traits are supported.

    Raises:
        TrouperValidationError: the config lacks a number or contradicts itself.
    """
    return own_refusal(config, architecture) is None


def own_refusal(config: HfConfig, architecture: str) -> UnsupportedFeatureError | None:
    """Return why trouper's own decoder does not compute this model.  None if it does.

    Raises:
        TrouperValidationError: the config lacks a number or contradicts itself.
    """
    try:
        decoder_traits(config, architecture)
    except UnsupportedFeatureError as error:
        return error
    return None


def generating_sibling(architecture: str) -> str:
    """Return the supported decoder that generates with the same body: Qwen3Model -> Qwen3ForCausalLM.

    A name without such a sibling is returned unchanged, so that errors contain the model's own name.
    """
    for suffix in SIBLING_SUFFIXES:
        sibling = architecture.removesuffix(suffix) + "ForCausalLM"
        if architecture.endswith(suffix) and sibling in READERS:
            return sibling
    return architecture


# Names that begin like those of a reader, and are of other models.
REFUSED_ENCODERS = {
    "BertGeneration": "is not supported; a BERT that embeds is a BertModel",
}
ENCODERS: dict[str, Callable[[HfConfig], EncoderTraits]] = {
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
    for prefix, reason in REFUSED_ENCODERS.items():
        if architecture.startswith(prefix):
            raise UnsupportedFeatureError(f"{architecture}: {reason}", parameter="model")
    for prefix, reader in ENCODERS.items():
        if architecture.startswith(prefix):
            return read_traits(reader, config, architecture)
    return None
