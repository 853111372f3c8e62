"""Resolve the options of pooling, `PoolerConfig`, and the model's own files to a `PoolerSpec`.

An explicit option has precedence over the sentence-transformers files, and these over the architecture's default.  Only JSON
files are read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from trouper.config.checkpoint.files import checked, read_object
from trouper.config.checkpoint.sentence_transformers import (
    Dense,
    LateInteraction,
    SentenceTransformersFolder,
    SeqPooling,
    Splade,
)
from trouper.errors import UnsupportedFeatureError, invalid

TokPooling = Literal["ALL", "STEP"]
Activation = Literal["identity", "sigmoid", "softmax"]
SEQ_POOLINGS, TOK_POOLINGS = ("CLS", "LAST", "MEAN"), ("ALL", "STEP")
CLASSIFIERS = "ForSequenceClassification"
TOKEN_CLASSIFIERS = "ForTokenClassification"
CONVERSIONS = ("embed", "classify")
GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
LATE_INTERACTION = ("HF_ColBERT", "ColBERTModel")
# A text tower and an image tower whose embeddings can be compared.
TWO_TOWERS = ("CLIPModel", "SiglipModel", "Siglip2Model")
# Models that embed images of document pages, and questions about them, for late interaction.
PAGE_RETRIEVERS = ("ColPaliForRetrieval", "ColQwen2ForRetrieval")
ABOUT_PAGE = "Describe the image."
COLBERT_SIZES = ("colbert_dim", "dim", "projection_dim")
# Orders of preference: for the model's default task, and for the engine's.
MODEL_ORDER = ("embed", "classify", "token_embed", "token_classify")
ENGINE_ORDER = ("token_embed", "token_classify", "embed", "classify")
TOKEN_METHODS = ("from_2_way_softmax", "no_post_processing")


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a pooling engine under vLLM's names.  None uses the model's own value.

    Raises:
        TrouperValidationError: a value is invalid; the message names the option.
    """

    task: str | None = None
    pooling_type: str | None = None  # sets one of the next two
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    enable_flash_late_interaction: bool = True
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        kind = self.pooling_type
        if kind is not None and (self.seq_pooling_type or self.tok_pooling_type):
            raise invalid(
                "pooling_type",
                "sets seq_pooling_type or tok_pooling_type; give only one of the three",
                kind,
            )
        for name, known in (
            ("pooling_type", SEQ_POOLINGS + TOK_POOLINGS),
            ("seq_pooling_type", SEQ_POOLINGS),
            ("tok_pooling_type", TOK_POOLINGS),
        ):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise invalid(name, f"must be one of {', '.join(known)}", value)
        if self.logit_sigma == 0:
            raise invalid("logit_sigma", "must not be 0", 0)
        if self.enable_chunked_processing or self.max_embed_len is not None:
            raise UnsupportedFeatureError("enable_chunked_processing is not supported yet")

    @classmethod
    def of(cls, given: Any) -> "PoolerConfig":
        """Create the options from None, a dict, JSON text, a PoolerConfig, or any object with its
        attributes.

        The last form accepts vLLM's own PoolerConfig.

        Raises:

            TrouperValidationError: an unknown option, or a value of the wrong type.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        try:
            if isinstance(given, str):
                return msgspec.json.decode(given, type=cls)
            if not isinstance(given, dict):
                names = cls.__struct_fields__
                given = {n: getattr(given, n) for n in names if hasattr(given, n)}
            fields = cast("dict[str, Any]", given)
            if unknown := fields.keys() - set(cls.__struct_fields__):
                raise invalid("pooler_config", "unknown options", sorted(unknown))
            return msgspec.convert(fields, cls)
        except msgspec.MsgspecError as error:
            raise invalid("pooler_config", str(error), cast("Any", given)) from None

    @property
    def seq(self) -> str | None:
        kind = self.pooling_type
        return self.seq_pooling_type or (kind if kind in SEQ_POOLINGS else None)

    @property
    def tok(self) -> str | None:
        kind = self.pooling_type
        return self.tok_pooling_type or (kind if kind in TOK_POOLINGS else None)


class TokenClassifier(msgspec.Struct, frozen=True):
    """A classifier that uses rows of a language model's head, for rerankers trained to answer "yes" or "no".

    Its fields are vLLM's `hf_overrides` for such models.
    """

    tokens: tuple[str, ...]
    # The difference of the second and the first token's rows, instead of a row for each token.
    is_difference: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> "TokenClassifier | None":
        """Read `classifier_from_token` and `method`, or `is_original_qwen3_reranker`.  Returns None without them.

        Raises:
            TrouperValidationError: one of them is missing, or the method needs another number of tokens.
        """
        tokens, method = config.get("classifier_from_token"), config.get("method")
        if config.get("is_original_qwen3_reranker"):
            method = "from_2_way_softmax"
        if tokens is None and method not in TOKEN_METHODS:
            return None
        if method not in TOKEN_METHODS:
            rule = f"method: classifier_from_token needs one of {', '.join(TOKEN_METHODS)}"
            raise invalid("hf_overrides", rule, method)
        found = checked(
            tokens or [], list[str], "hf_overrides: classifier_from_token", "hf_overrides"
        )
        is_difference = method == TOKEN_METHODS[0]
        if not found or (is_difference and len(found) != 2):
            rule = f"classifier_from_token: {method} needs {'two tokens' if is_difference else 'tokens'}"
            raise invalid("hf_overrides", rule, tokens)
        return cls(tuple(found), is_difference)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes: the texts of the compared tokens.

        A method that computes the difference of two tokens has one class, named after the second token.
        """
        return self.tokens[1:] if self.is_difference else self.tokens


class PageLayout(msgspec.Struct, frozen=True):
    """How a model that embeds pages writes its prompts; its processor in transformers defines it.

    `{bos}`, `{pad}` and `{image}` are replaced by tokens, and `{text}` by a question or by the text about a page.
    """

    query: str
    page: str
    # The text about a page if the caller gives none.
    words: str

    @classmethod
    def of(cls, folder: Path, architecture: str) -> "PageLayout | None":
        """Read the layout of a model, with the prefixes of its processor_config.json.  Returns None for other models."""
        if architecture not in PAGE_RETRIEVERS:
            return None
        own = read_object(folder / "processor_config.json") or {}
        prefix, about = own.get("query_prefix"), own.get("visual_prompt_prefix")
        if architecture == "ColPaliForRetrieval":
            query = "{bos}" + (prefix or "Question: ") + "{text}" + "{pad}" * 10 + "\n"
            return cls(query, "{image}{bos}{text}\n", about or ABOUT_PAGE)
        page = (
            "<|im_start|>user\n<|vision_start|>{image}<|vision_end|>{text}<|im_end|><|endoftext|>"
        )
        if about:
            # The saved text contains the image's token and the words.
            page = str(about).replace("<|image_pad|>", "{image}").replace(ABOUT_PAGE, "{text}")
        return cls((prefix or "Query: ") + "{text}" + "{pad}" * 10 + "\n", page, ABOUT_PAGE)


class PoolerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All properties of pooling, resolved when the engine is built.

    The user's options, the model's own files and the defaults of its architecture have been merged.  Requests may
    override some of the result.
    """

    tasks: tuple[str, ...]
    task: str  # the model's default
    engine_task: str  # `encode` without task
    seq_pooling_type: SeqPooling
    tok_pooling_type: TokPooling
    embedding_size: int
    # Whether embeddings are normalised, and whether an activation is applied to logits, unless a request overrides it.
    normalizes: bool
    use_activation: bool
    activation: Activation
    labels: tuple[str, ...] = ()
    token_classifier: TokenClassifier | None = None
    dense: tuple[Dense, ...] = ()
    # None for embeddings that are pooled hidden states.
    splade: Splade | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    dimensions: int | None = None
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    lowers_case: bool = False
    # The text that precedes each embedded text.
    default_prompt: str = ""
    # The limit of the sentence-transformers files, else of the tokenizer.
    max_length: int | None = None
    # None for models without late interaction; their texts are tokenized unchanged.
    late: LateInteraction | None = None
    # A prompt is either a text or an image, and the tower itself returns the embedding.
    has_two_towers: bool = False
    # For a model that embeds pages as images.
    pages: PageLayout | None = None


def is_pooling(runner: str, convert: str, folder: Path, architecture: str) -> bool:
    """Return whether the model runs as a pooling model.

    Raises:
        TrouperValidationError: an option is unknown, or the model does not support it.
    """
    if runner not in ("auto", "generate", "pooling", "draft"):
        raise invalid("runner", "must be auto, generate or pooling", runner)
    if convert not in ("auto", "none", *CONVERSIONS):
        raise invalid("convert", "must be auto, none, embed or classify", convert)
    is_decoder = architecture.endswith(GENERATORS)
    if runner == "generate":
        if convert in CONVERSIONS:
            raise invalid(
                "convert", "converts to a pooling model, which needs runner='pooling'", convert
            )
        if not is_decoder:
            raise invalid(
                "runner", f"{architecture} is a pooling model; use runner='pooling'", runner
            )
        return False
    if is_decoder and convert == "none":
        if runner == "pooling":
            raise invalid(
                "convert", f"{architecture} needs convert='embed' or 'classify' to pool", convert
            )
        return False
    asked = runner == "pooling" or convert in CONVERSIONS
    return asked or not is_decoder or (folder / "modules.json").is_file()


def pooler_spec(
    wishes: PoolerConfig,
    folder: Path,
    architecture: str,
    config: dict[str, Any],
    convert: str = "auto",
) -> PoolerSpec:
    """Read the pooling properties from the model's files.  `convert` applies to a generative model.

    Raises:
        TrouperValidationError: the model does not support an option, or a file cannot be read.
        UnsupportedFeatureError: an unsupported sentence-transformers module.
    """
    is_decoder, has_two_towers = _is_decoder(architecture), architecture in TWO_TOWERS
    found = SentenceTransformersFolder(folder)
    saved = read_object(folder / "config_sentence_transformers.json") or {}
    tasks = _tasks(architecture, found, convert)
    task = wishes.task or next(task for task in MODEL_ORDER if task in tasks)
    if task not in tasks:
        raise invalid(
            "task", f"is not supported by this model; supported: {', '.join(tasks)}", task
        )
    by_default: SeqPooling = "LAST" if is_decoder else "CLS"
    if config.get("model_type") in ("modernbert", "eurobert") and "classify" in tasks:
        by_default = "MEAN" if config.get("classifier_pooling") == "mean" else "CLS"
    seq = wishes.seq or found.pooling or config.get("gguf_pooling") or by_default
    token_classifier = TokenClassifier.of(config) if "classify" in tasks else None
    labels = token_classifier.labels if token_classifier else _labels(config)
    embedding_size = _embedding_size(found, architecture, config)
    known: list[int] = list(config.get("matryoshka_dimensions") or ())
    if wishes.use_activation is not None:
        normalizes = activates = wishes.use_activation
    else:
        normalizes, activates = found.normalizes, True
    late = _late_interaction(folder, found, saved) if tasks == ("token_embed",) else None
    spec = PoolerSpec(
        tasks=tasks,
        task=task,
        engine_task=wishes.task or next(task for task in ENGINE_ORDER if task in tasks),
        seq_pooling_type=cast("SeqPooling", seq),
        tok_pooling_type=cast("TokPooling", wishes.tok or "ALL"),
        embedding_size=embedding_size,
        normalizes=normalizes,
        use_activation=activates,
        activation=_activation(config, saved, len(labels)),
        labels=labels,
        token_classifier=token_classifier,
        dense=found.dense,
        splade=found.splade,
        is_matryoshka=bool(known or config.get("is_matryoshka")),
        matryoshka_dimensions=tuple(known),
        dimensions=wishes.dimensions,
        logit_mean=wishes.logit_mean or 0.0,
        logit_sigma=1.0 if wishes.logit_sigma is None else wishes.logit_sigma,
        step_tag_id=wishes.step_tag_id,
        returned_token_ids=tuple(wishes.returned_token_ids or ()),
        lowers_case=found.lowers_case or (has_two_towers and _lowers_case(folder)),
        default_prompt=_default_prompt(saved, tasks, folder) or _task_instruction(config),
        max_length=max(late.query_length, late.document_length) if late else found.max_length,
        late=late,
        has_two_towers=has_two_towers,
        pages=PageLayout.of(folder, architecture),
    )
    if spec.dimensions is not None and spec.dimensions > embedding_size:
        raise invalid("dimensions", f"must be in [1, {embedding_size}]", spec.dimensions)
    return spec


def _lowers_case(folder: Path) -> bool:
    """Return whether the tokenizer's class in transformers converts texts to lower case, like that of SigLIP 2.

    trouper reads only the tokenizer's file, which lacks this step.
    """
    own = read_object(folder / "tokenizer_config.json") or {}
    return own.get("do_lower_case") is True or own.get("tokenizer_class") == "Siglip2Tokenizer"


def _default_prompt(saved: dict[str, Any], tasks: Sequence[str], folder: Path) -> str:
    """Return the text that sentence-transformers puts before every embedded text.

    Raises:
        TrouperValidationError: the name is not among the prompts.
        UnsupportedFeatureError: a classifier has a prompt, or pooling excludes the tokens of the prompt.
    """
    name = saved.get("default_prompt_name")
    if name is None:
        return ""
    file = "config_sentence_transformers.json"
    prompts: Any = saved.get("prompts") or {}
    if not isinstance(prompts, dict) or name not in prompts:
        raise invalid("model", f"{file}: default_prompt_name is not in its prompts", name)
    prompt = cast("dict[str, Any]", prompts)[name]
    if not prompt:
        return ""
    if not isinstance(prompt, str):
        raise invalid("model", f"{file}: the prompt {name!r} must be a text")
    if "embed" not in tasks:
        rule = f"{file}: default_prompt_name={name!r} is not supported for {', '.join(tasks)}; set it to null"
        raise UnsupportedFeatureError(rule, parameter="model")
    for pooling in folder.glob("*/config.json"):
        if (read_object(pooling) or {}).get("include_prompt") is False:
            rule = (
                f"include_prompt=false is not supported with {file}: default_prompt_name={name!r}"
            )
            raise UnsupportedFeatureError(rule, parameter="model")
    return prompt


def _task_instruction(config: dict[str, Any]) -> str:
    """Return the instruction of the chosen task, for a model with an adapter for each task."""
    instructions: Any = config.get("task_instructions") or {}
    if not isinstance(instructions, dict):
        raise invalid("model", "config.json: task_instructions must be an object")
    return str(cast("dict[str, Any]", instructions).get(str(config.get("default_task")), ""))


def _is_decoder(architecture: str) -> bool:
    """Recognise a decoder by its architecture's name: nearly all encoders are named after BERT."""
    return "bert" not in architecture.lower() and not architecture.startswith(
        ("MPNet", "Gte", "New", "XLM", "Electra", "Data2VecText", "JinaEmbeddingsV3", "T5", "MT5")
    )


def _tasks(architecture: str, found: "SentenceTransformersFolder", convert: str) -> tuple[str, ...]:
    if convert != "embed":
        if architecture.endswith(TOKEN_CLASSIFIERS):
            return ("token_classify",)
        if architecture.endswith(CLASSIFIERS) or convert == "classify":
            # The head of an encoder reads one state for the whole text; that of a decoder can also read each token's.
            return ("classify", "token_classify") if _is_decoder(architecture) else ("classify",)
    if architecture in (*LATE_INTERACTION, *PAGE_RETRIEVERS) or found.is_late_interaction:
        return ("token_embed",)
    if architecture in TWO_TOWERS:
        return ("embed",)
    if found.splade is not None:
        return ("embed",)
    return ("embed", "token_embed")


def _embedding_size(
    found: "SentenceTransformersFolder", architecture: str, config: dict[str, Any]
) -> int:
    if found.splade is not None:
        return int(config["vocab_size"])
    if found.dense:
        return found.dense[-1].num_outputs
    if architecture in LATE_INTERACTION:
        return int(next((config[name] for name in COLBERT_SIZES if config.get(name)), 128))
    if architecture in PAGE_RETRIEVERS:
        return int(config.get("embedding_dim") or 128)
    if architecture in TWO_TOWERS:
        if architecture == "CLIPModel":
            return int(config.get("projection_dim") or 512)
        return int(config.get("projection_size") or config["hidden_size"])
    return int(config.get("dim") or config["hidden_size"])


def _late_interaction(
    folder: Path, found: "SentenceTransformersFolder", saved: dict[str, Any]
) -> LateInteraction | None:
    stanford = read_object(folder / "artifact.metadata") or {}
    try:
        if found.mask is not None:
            return LateInteraction.of_sentence_transformers(
                saved, found.transformer, found.mask, found.max_length
            )
        return LateInteraction.of_pylate(saved) or LateInteraction.of_stanford(stanford)
    except msgspec.ValidationError as error:
        raise invalid(
            "model", f"invalid markers of queries and documents: {error}", str(folder)
        ) from None


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    names: dict[Any, Any] = config.get("id2label") or {}
    if not names:
        return tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels") or 2)))
    return tuple(str(names[key]) for key in sorted(names, key=int))


def _activation(config: dict[str, Any], saved: dict[str, Any], num_labels: int) -> Activation:
    """Find a cross-encoder's activation where any release of sentence-transformers stores it, the newest release first."""
    modules: dict[str, Any] = config.get("sentence_transformers") or {}
    own = (
        saved.get("activation_fn")
        or modules.get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    if own:
        name = str(own).rpartition(".")[2].lower()
        if name not in ("identity", "sigmoid", "softmax"):
            raise UnsupportedFeatureError(f"the activation {own} is not supported")
        return name
    match config.get("problem_type"):
        case "regression":
            return "identity"
        case "multi_label_classification":
            return "sigmoid"
        case _:
            return "sigmoid" if num_labels < 2 else "softmax"
