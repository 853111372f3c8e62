"""Requests on their way in: from the frontends through the renderer to the scheduler, with everything they carry.

A *request* is what the client sent.  A *sequence* is one list of tokens that grows for it.  A request with `n` completions
has the `n` sequences `id, id + 1, … id + n - 1`, so one integer names both.

The types that a request carries along are here, too: its adapter, its prompt embeddings, the marks of its reasoning and its
grammar.  They cross to a device that may be in another process, so they are plain data, or have a part that is.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NewType

import msgspec

from trouper.actors.messages.media import MediaItem
from trouper.actors.messages.sinks import GenerationSink, MakeVisible, PoolingSink, ReplySink
from trouper.config.generation import Marks
from trouper.inputs import PoolingPrompt
from trouper.lora import LoRARequest
from trouper.outputs import Placeholders
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams

RequestId = NewType("RequestId", int)
SequenceId = NewType("SequenceId", int)

# Far above any real load.  The limit bounds every inbox, and a caller that submits endlessly gets a QueueOverflowError.
MAX_OPEN_REQUESTS = 2**20

# Sizes of the arrays that a GPU has for each request.  The renderer refuses a request that needs more.
# Biased tokens, banned tokens and, until `min_tokens`, stop tokens.
MAX_EDITS = 1024
# Tokens of a bad word, without its last one.
MAX_BAD_WORD = 16


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter in the memory of the device.

    Requests refer to it by the slot, so steps need no names.
    """

    # From 1 on.
    slot: int
    # Hash of its files, see `AdapterFiles`.  It is part of the names of KV blocks, which must stay valid after a restart.
    digest: bytes
    # Shown in metrics and errors.
    name: str


EmbedsDtype = Literal["float32", "float16", "bfloat16", "float64"]


class Embeds(msgspec.Struct, frozen=True):
    """Prompt embeddings: a dense matrix [rows, columns] in place of the embeddings of tokens, row-major and little-endian."""

    dtype: EmbedsDtype
    num_rows: int
    num_columns: int
    data: memoryview
    # Position of the first row in the prompt.
    first: int = 0


class ReasoningRules(msgspec.Struct, frozen=True):
    """The marks of the reasoning in one request's outputs, and its token budget.

    A grammar constrains only the text behind the end mark.
    """

    start: str
    end: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    # Whether the prompt ends inside the reasoning.
    begins_inside: bool
    # After this many tokens the end mark is forced.
    budget: int | None


class Vocabulary(msgspec.Struct, frozen=True):
    """Renderer → device: the tokens of a model, from which grammars and reasoning are followed.

    A device in another process gets it once, before the first grammar.
    """

    # The content of a tokenizer.json.
    rules: str
    # Size of the masks.
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    # The text of each token, by id.
    texts: tuple[str, ...]


class GrammarRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for the outputs of one request, in the form that crosses to another process.

    The device compiles them; the renderer has already checked that this is possible.
    """

    # A grammar in the format of `llguidance`.  None allows any text behind the reasoning.
    source: str | None
    # Each of these tokens ends the output.
    eos_token_ids: tuple[int, ...]
    # With it, these tokens are sampled only if the grammar allows no other.
    ignore_eos: bool
    # Size of the vocabulary and of the masks.
    num_tokens: int
    # The reasoning in front of the constrained text.
    reasoning: ReasoningRules | None
    # Memory of the compiled source, as measured by its trial.
    num_bytes: int = 0


class PrepareGrammar(msgspec.Struct, frozen=True):
    """Scheduler → Executor → device: compile a grammar during the steps, and keep it until it is released.

    Compiling may take seconds, so it must not delay the steps of other requests.
    """

    grammar: "Grammar"
    # Keys of the grammars to drop first.
    released: tuple[bytes, ...] = ()


class GrammarReady(msgspec.Struct, frozen=True):
    """Device → Executor → Scheduler: the answer to `PrepareGrammar`, with the error if the grammar does not compile.

    Requests that need the grammar start only after this answer.
    """

    key: bytes
    error: str | None = None


class GrammarWork(msgspec.Struct, frozen=True):
    """The cost of all grammars in one step.

    It is measured on the device and shown as a metric, because masks can delay a step.
    """

    # Time of the device's thread for following the grammars and filling masks.
    seconds: float
    # Tokens sampled under a grammar.
    num_tokens: int
    # Tokens sampled again because the grammar refused the first draw.
    num_redrawn: int


class Grammar:
    """Rules for the outputs of one request, in the form that devices use.  All sequences share one instance, which never changes.

    Args:
        matcher: creates a matcher of `llguidance` at the beginning of an output, or returns None without a source.
            It compiles the source unless `prepare` has done so.
        text_of: returns the text of a token.
        vocabulary: for a device in another process.  None for a device in this process.
        compile_s: seconds of the compilation.  None if the source was compiled before, or if there is no source.
        prepare: compiles the source for a device in this process, and keeps the result until `release`.
        release: drops the compiled source with this key.
    """

    def __init__(
        self,
        rules: GrammarRules,
        matcher: Callable[[], Any],
        text_of: Callable[[int], str],
        vocabulary: Vocabulary | None = None,
        compile_s: float | None = None,
        prepare: Callable[[], None] = lambda: None,
        release: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self.rules = rules
        self.key = b"" if rules.source is None else key_of(rules.source)
        self.prepare, self.release = prepare, release
        self.eos_token_ids, self.ignore_eos = rules.eos_token_ids, rules.ignore_eos
        self.num_tokens, self.reasoning = rules.num_tokens, rules.reasoning
        self.matcher, self.text_of = matcher, text_of
        self.vocabulary, self.compile_s = vocabulary, compile_s

    def __repr__(self) -> str:
        return f"<Grammar of {len(self.rules.source or '')} characters>"


def key_of(source: str) -> bytes:
    """Return the key of a source on a device.  Requests with equal sources share the compiled grammar by this key."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that every client may set by name, in Python and in the body of any HTTP request.

    The bodies of the HTTP APIs inherit these fields, so a new option that clients may set is declared here only.

    Args:
        truncate_prompt_tokens: the maximum prompt tokens to keep; -1 means the context length.
        truncation_side: `left` cuts the beginning of the prompt, `right` its end.  None takes the tokenizer's side.
        add_special_tokens: whether the tokenizer adds special tokens.  None means yes for text and no for a chat.
        data_parallel_rank: the replica to run the request on, unless its device is lost.  None lets the router choose.
    """

    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    data_parallel_rank: int | None = None


class RequestOptions(ClientOptions, frozen=True, kw_only=True):
    """Everything that a caller decides about one request besides its prompt and its parameters.

    Each public signature makes one, and it is carried whole to the messages `Render` and `Admit`.  An actor reads the
    fields it needs, so a new option passes through the frontends, the engine and the renderer without an edit there.

    Args:
        priority: a request with a larger number runs first under the policy `priority`.
        arrival_time: seconds of the wall clock.  None means the time at which the request is opened.
        max_text_tokens: the most tokens to read of each text to be pooled, without special tokens.
        mm_processor_kwargs: options for the processor of multimodal items.
        lora_request: the adapter to apply.
        loads_adapter: False refuses a request with an unknown adapter instead of loading it.
        trace_headers: W3C trace headers, the parent of the request's span.
        session_id: the name of a conversation.  Its requests run on the same replica, to hit its prefix cache.
        reasoning: the marks around the model's reasoning, unless the engine's options name them.
        key: the name of the client.  Each client gets an equal share of the steps, and at most half of the memory for grammars.
        cache_scope: requests share cached prefixes, and drafts from recent answers, only within one scope.
        resumed_token_ids: the first tokens of the answer, which an earlier process has sampled with the same seed.  They are not
            returned again.  Only for a request of one completion.
        visible: makes a function from an output's text to the part in which stop strings count.  None means all text.
    """

    priority: int = 0
    arrival_time: float | None = None
    max_text_tokens: tuple[int | None, ...] = ()
    mm_processor_kwargs: Mapping[str, Any] | None = None
    lora_request: LoRARequest | None = None
    loads_adapter: bool = True
    trace_headers: Mapping[str, str] | None = None
    session_id: str | None = None
    reasoning: Marks | None = None
    key: str = ""
    cache_scope: bytes = b""
    resumed_token_ids: tuple[int, ...] = ()
    visible: MakeVisible | None = None

    def without_tokenization(self) -> "RequestOptions":
        """Return these options for a prompt made of the token ids of an earlier output.

        They have already been applied to the earlier prompt.
        """
        return msgspec.structs.replace(
            self, truncate_prompt_tokens=None, truncation_side=None, add_special_tokens=None
        )


NO_OPTIONS = RequestOptions()


def client_options(body: ClientOptions) -> dict[str, Any]:
    """Return the options that clients may set as keywords for `RequestOptions`, from the body of an HTTP request.

    Other options, such as the trace headers, come from the server and never from a body.
    """
    return {name: getattr(body, name) for name in ClientOptions.__struct_fields__}


class Render(msgspec.Struct, frozen=True, kw_only=True):
    """Frontend → Renderer: a prompt in the caller's form, and the sink for its results.

    The sink carries the cancel scope of the rendering stage, so closing the reply slot ends the work.
    """

    id: RequestId
    prompt: PoolingPrompt
    # The engine's own copy.
    params: SamplingParams | PoolingParams
    # A `GenerationSink` or a `PoolingSink`, according to the parameters.
    slot: ReplySink
    options: RequestOptions
    # Seconds of the wall clock.
    arrival_time: float
    adapter: LoadedAdapter | None = None


class Track(msgspec.Struct, frozen=True):
    """Renderer → Detokenizer: expect tokens of the sequences of this request.  It is sent before `Admit`.

    The order matters: the first tokens may follow immediately after `Admit`.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    # Resolved: `max_tokens` is a number.
    params: SamplingParams
    slot: GenerationSink
    # None if the prompt has no text.
    prompt: str | None = None
    options: RequestOptions = NO_OPTIONS
    # Of images or recordings.
    placeholders: Placeholders | None = None
    # Of all recordings, or None.
    audio_seconds: float | None = None


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer → Scheduler: a rendered, validated request.

    Everything is resolved, so the scheduler needs neither the tokenizer nor the model's defaults. It is the only way
    in which a request reaches the scheduler.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    # Resolved: `max_tokens` is a number.
    params: SamplingParams
    # The primary EOS token.  None with `ignore_eos`.
    eos_token_id: int | None
    # Those of the caller, then the secondary EOS tokens of the model.
    stop_token_ids: tuple[int, ...]
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    options: RequestOptions = NO_OPTIONS
    arrival_time: float = 0.0
    cache_salt: str | None = None
    # Constrains the outputs.
    grammar: Grammar | None = None
    adapter: LoadedAdapter | None = None
    # Prompt embeddings in order.  The ids of the tokens in their place are zeros.
    embeds: tuple[Embeds, ...] = ()
    # For each KV block the digest of its embeddings or images, or empty bytes.
    row_digests: tuple[bytes, ...] = ()
    # Images, in the order of their positions.
    media: tuple[MediaItem, ...] = ()
    # Runs of tokens that see each other, as begin and end, in order.  One step computes all of a run.
    spans: tuple[tuple[int, int], ...] = ()


class AdmitPooling(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer → Scheduler: a rendered, validated pooling request, with everything its later stages need.

    Its slot goes along, because the pooler keeps no table of requests.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    # Resolved: every field has its final value.
    params: PoolingParams
    slot: PoolingSink
    # None means that all are 0.
    token_type_ids: tuple[int, ...] | None = None
    # Tokens attend only to the first `num_keys` tokens.  None means all.
    num_keys: int | None = None
    # Rows of a document without part in late interaction.
    skipped_rows: tuple[int, ...] = ()
    # Images, in the order of their positions.
    media: tuple[MediaItem, ...] = ()
    options: RequestOptions = NO_OPTIONS
    arrival_time: float = 0.0


class Abort(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: end this request, in whatever stage it is.

    It is legal at any time, also for finished requests.  The request's reader gets a final output.
    """

    id: RequestId
