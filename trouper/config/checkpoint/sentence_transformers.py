"""Read the modules of a sentence-transformers folder: how hidden states become an embedding.

`modules.json` lists them in the order of computation, and each has its own config.  An unknown module is refused by name, because
skipping it would change every embedding.

Late-interaction models were trained with special markers and lengths of queries and documents.  PyLate stores these in
`config_sentence_transformers.json`, with the names and defaults used here; sentence-transformers in the configs of its modules; and
Stanford's ColBERT in `artifact.metadata`.  Without any of these files, texts are tokenized unchanged.
"""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from trouper.config.checkpoint.files import (
    DenseFields,
    Module,
    PoolingFields,
    TransformerFields,
    check_folder,
    checked,
    read_json,
    read_object,
)
from trouper.errors import UnsupportedFeatureError, invalid

UNLIMITED = 2**31
STANFORD = {"query_prefix": "[unused0]", "document_prefix": "[unused1]", "document_length": 220}
STANFORD_NAMES = {
    "query_token_id": "query_prefix", "doc_token_id": "document_prefix", "query_maxlen": "query_length",
    "doc_maxlen": "document_length", "attend_to_mask_tokens": "attend_to_expansion_tokens",
}  # fmt: skip


class LateInteraction(msgspec.Struct, frozen=True, kw_only=True):
    """Markers and lengths with which a late-interaction model was trained.

    Lengths are in tokens, including everything added.  A marker missing from the vocabulary is inserted as text.  The
    defaults are PyLate's.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    # Whether queries are padded to their length with mask tokens.
    do_query_expansion: bool = True
    # Whether attention sees the added mask tokens.
    attend_to_expansion_tokens: bool = False
    # Tokens that do not count in the scores of documents.
    skiplist_words: tuple[str, ...] = tuple(string.punctuation)

    @classmethod
    def of_pylate(cls, config: Mapping[str, Any]) -> Self | None:
        """Read PyLate's config_sentence_transformers.json.

        Returns None for a config without any of PyLate's fields.

        Raises:

            msgspec.ValidationError: a field has the wrong type.
        """
        given = {n: config[n] for n in cls.__struct_fields__ if config.get(n) is not None}
        return msgspec.convert(given, cls) if given else None

    @classmethod
    def of_sentence_transformers(
        cls,
        config: Mapping[str, Any],
        transformer: Mapping[str, Any],
        mask: Mapping[str, Any],
        max_length: int | None,
    ) -> Self:
        """Read the configs of a MultiVectorEncoder: its own, its Transformer's and its MultiVectorMask's.

        Raises:
            UnsupportedFeatureError: an unsupported option.
        """
        prompts: dict[str, Any] = config.get("prompts") or {}
        expansion: dict[str, Any] = transformer.get("query_expansion") or {}
        longest = max_length or UNLIMITED
        for name, value, known in (
            ("query_expansion.strategy", expansion.get("strategy"), (None, "fixed")),
            ("query_expansion.token", expansion.get("token"), (None,)),
            ("skiplist_tasks", mask.get("skiplist_tasks"), (None, ["document"])),
            ("keep_only_token_ids", mask.get("keep_only_token_ids"), (None,)),
        ):
            if value not in known:
                raise UnsupportedFeatureError(
                    f"{name}={value!r} of a MultiVectorEncoder is not supported"
                )
        given = {
            "query_prefix": prompts.get("query") or "",
            "document_prefix": prompts.get("document") or "",
            "query_length": expansion.get("length") or transformer.get("query_length") or longest,
            "document_length": transformer.get("document_length") or longest,
            "do_query_expansion": bool(expansion),
            "attend_to_expansion_tokens": expansion.get("attend", False),
            "skiplist_words": mask.get("skiplist_words") or (),
        }
        return msgspec.convert(given, cls)

    @classmethod
    def of_stanford(cls, metadata: Mapping[str, Any]) -> Self | None:
        """Read the artifact.metadata of Stanford's ColBERT.

        Its names are translated to PyLate's.  Fields that the file lacks get ColBERT's defaults,
        which differ from PyLate's.  Returns None for an empty file.
        """
        if not metadata:
            return None
        config: dict[str, Any] = dict(STANFORD)
        for theirs, name in STANFORD_NAMES.items():
            if metadata.get(theirs) is not None:
                config[name] = metadata[theirs]
        if metadata.get("mask_punctuation") is False:
            config["skiplist_words"] = ()
        return cls.of_pylate(config)


SeqPooling = Literal["CLS", "LAST", "MEAN"]
# The modes of sentence-transformers' pooling module, in both spellings of its config.
ST_MODES: dict[str, SeqPooling] = {
    "pooling_mode_cls_token": "CLS", "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST", "cls": "CLS", "mean": "MEAN", "lasttoken": "LAST",
}  # fmt: skip
# Name parts of `sentence_…_config.json`: old folders name the file after their model family.
ST_TRANSFORMERS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
DENSE_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid")


class Dense(msgspec.Struct, frozen=True):
    """A sentence-transformers Dense module: y = act(x Wᵀ + b).

    It projects a pooled embedding, or each token's for late interaction, to another size.  Its
    weights are in `folder`, relative to the model.
    """

    folder: str
    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: str
    # Whether a Normalize module precedes it.
    normalizes_input: bool = False


class Splade(msgspec.Struct, frozen=True):
    """The conversion of logits over the vocabulary to a sparse embedding with weights ≥ 0, one for each token."""

    # Whether the weight is the sum over the text's tokens, instead of the maximum.
    takes_sum: bool = False
    # How often log(1 + x) is applied to positive logits.
    num_logs: int = 1


class SentenceTransformersFolder:
    """The contents of modules.json and of the modules' own files, with defaults for missing ones.

    Reading checks that the modules form a pipeline that the pooler can compute, and refuses other
    modules by name.
    """

    def __init__(self, folder: Path) -> None:
        self.pooling: SeqPooling | None = None
        self.normalizes = True
        self.dense: tuple[Dense, ...] = ()
        self.splade: Splade | None = None
        self.is_late_interaction = False
        self.transformer: dict[str, Any] = {}
        self.mask: dict[str, Any] | None = None  # of a MultiVectorEncoder
        self.max_length = _tokenizer_length(folder)
        self.lowers_case = False
        if not (folder / "modules.json").is_file():
            return
        modules = checked(read_json(folder / "modules.json"), list[Module], "modules.json")
        kinds: list[str] = []
        for module in modules:
            kind = module.type.rpartition(".")[2]
            self._take(kind, _inside(folder, module.path), kinds)
            kinds.append(kind)
        self.normalizes = _is_normalized(kinds)
        if "MLMTransformer" in kinds and self.splade is None:
            rule = "the sentence-transformers module 'MLMTransformer' needs SpladePooling after it"
            raise UnsupportedFeatureError(rule, parameter="model")
        # A projection of each token without pooling over tokens.
        self.is_late_interaction = "Pooling" not in kinds and (
            "Dense" in kinds or self.mask is not None
        )
        if self.is_late_interaction:
            self.normalizes = True

    def _take(self, kind: str, folder: Path, before: Sequence[str]) -> None:
        match kind:
            case "Transformer" | "MLMTransformer":
                files = (folder / f"sentence_{name}_config.json" for name in ST_TRANSFORMERS)
                self.transformer = next(filter(None, map(read_object, files)), dict[str, Any]())
                own = checked(
                    self.transformer, TransformerFields, f"{folder.name}/sentence_…_config.json"
                )
                self.max_length = own.max_seq_length or self.max_length
                self.lowers_case = bool(own.do_lower_case)
            case "Pooling":
                if early := [name for name in before if name in ("Dense", "Normalize", "Pooling")]:
                    rule = f"the sentence-transformers module {early[0]!r} before Pooling is not supported"
                    raise UnsupportedFeatureError(rule, parameter="model")
                self.pooling = _pooling(_needed(folder / "config.json"))
            case "Dense":
                is_pooled, is_normalized = "Pooling" in before, _is_normalized(before)
                dense = _dense(folder, "sentence_embedding" if is_pooled else "token_embeddings")
                dense = msgspec.structs.replace(dense, normalizes_input=is_normalized)
                self.dense = (*self.dense, dense)
            case "SpladePooling" if before == ["MLMTransformer"]:
                self.splade = _splade(_needed(folder / "config.json"))
            case "MultiVectorMask":
                self.mask = _needed(folder / "config.json")
            case "Normalize" | "Dropout":
                pass
            case _:
                raise UnsupportedFeatureError(
                    f"the sentence-transformers module {kind!r} is not supported"
                )


def _tokenizer_length(folder: Path) -> int | None:
    """Return the number of tokens that a text may have, or None.  Tokenizers without a limit store a huge number."""
    length: Any = (read_object(folder / "tokenizer_config.json") or {}).get("model_max_length")
    return int(length) if type(length) in (int, float) and 1 <= length < UNLIMITED else None


def _pooling(config: dict[str, Any]) -> SeqPooling:
    modes = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on]
    own = checked(config, PoolingFields, "Pooling/config.json").pooling_mode
    if own is not None:
        modes = [own] if isinstance(own, str) else list(own)
    if len(modes) != 1 or modes[0] not in ST_MODES:
        raise UnsupportedFeatureError(f"the pooling {modes} is not supported")
    return ST_MODES[modes[0]]


def _splade(config: dict[str, Any]) -> Splade:
    strategy, act = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or act not in ("relu", "log1p_relu"):
        rule = f"SpladePooling with pooling_strategy={strategy!r} and activation_function={act!r} is not supported"
        raise UnsupportedFeatureError(rule, parameter="model")
    return Splade(strategy == "sum", 1 + (act == "log1p_relu"))


def _is_normalized(kinds: Sequence[str]) -> bool:
    """Check whether the last of these modules that changes an embedding is Normalize."""
    changing = [kind for kind in kinds if kind in ("Dense", "Normalize")]
    return changing[-1:] == ["Normalize"]


def _dense(folder: Path, feature: str) -> Dense:
    config = _needed(folder / "config.json")
    fields = checked(config, DenseFields, f"{folder.name}/config.json")
    name = (fields.activation_function or "identity").rpartition(".")[2].lower()
    if name not in DENSE_ACTIVATIONS:
        raise UnsupportedFeatureError(f"the activation {name} of {folder.name} is not supported")
    for field in ("module_input_name", "module_output_name"):
        if (found := getattr(fields, field)) not in (None, feature):
            rule = f"{folder.name}/config.json: {field}={found!r} is not supported"
            raise UnsupportedFeatureError(rule, parameter="model")
    if fields.use_residual:
        raise UnsupportedFeatureError(f"use_residual of {folder.name} is not supported")
    return Dense(str(folder), fields.in_features, fields.out_features, fields.bias, name)


def _needed(path: Path) -> dict[str, Any]:
    found = read_object(path)
    if found is None:
        raise invalid("model", "the model folder lacks this file", str(path))
    return found


def _inside(folder: Path, name: str) -> Path:
    """Return a module's folder inside the model's folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise invalid("model", "modules.json has a path that leads out of the folder", name)
    check_folder(folder / name)
    return folder / name
