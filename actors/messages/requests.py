"""Names of requests and sequences.

A *request* is what the client sent; a *sequence* is one list of tokens being grown for it.  A request
with `n` completions has the `n` sequences `id, id + 1, … id + n - 1`, so one integer names both.

An adapter as a request and its sequences name it.

Prompt embeddings on their way from the renderer to the device.

The reasoning that an output may begin with, on its way from the renderer to the device.

A grammar on its way from the renderer to the device, which may be in another process.

Requests on their way in: from the frontends through the renderer to the scheduler.

Limits that more than one part of the engine keeps.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NewType

import msgspec

from trouper.actors.messages.sinks import GenerationSink, MakeVisible, PoolingSink, ReplySink
from trouper.config.generation import Marks
from trouper.inputs import PoolingPrompt
from trouper.lora import LoRARequest
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams

RequestId = NewType("RequestId", int)
SequenceId = NewType("SequenceId", int)


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that the device has loaded."""

    slot: int  # on the device, from 1 on
    number: int  # counts loads: no two contents of a slot have one, so it names what a KV block was computed with
    name: str  # for people


EmbedsDtype = Literal["float32", "float16", "bfloat16", "float64"]


class Embeds(msgspec.Struct, frozen=True):
    """A dense matrix [rows, columns] that stands for the embeddings of tokens: row major, little endian."""

    dtype: EmbedsDtype
    num_rows: int
    num_columns: int
    data: memoryview  # the matrix's bytes
    first: int = 0  # position in the prompt of the first row


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning of one request's outputs: where it ends, and when it must.

    A grammar says nothing about it and begins behind its end.
    """

    start: str
    end: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    begins_inside: bool  # the prompt has opened it
    budget: int | None  # tokens, after which its end is forced


class Vocabulary(msgspec.Struct, frozen=True):
    """Renderer → device: the tokens of a model, as grammars and reasoning read them.

    It goes to a device in another process, once and before the first grammar.
    """

    rules: str  # a tokenizer.json
    num_tokens: int  # that masks are made for
    eos_token_ids: tuple[int, ...]
    texts: tuple[str, ...]  # of the tokens by id


class GrammarRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for the outputs of one request, as they cross to another process."""

    source: (
        str | None
    )  # as `llguidance` reads it; None: behind its reasoning an output may be anything
    eos_token_ids: tuple[int, ...]  # all of them end the output
    ignore_eos: bool  # they are drawn only where nothing else can be
    num_tokens: int  # of the vocabulary that masks are made for
    thinking: Thinking | None  # reasoning that comes first
    num_bytes: int = (
        0  # of memory that the source takes when it is compiled, as its trial measured it
    )


class PrepareGrammar(msgspec.Struct, frozen=True):
    """Scheduler → Executor → device: compile a grammar while steps go on, and keep it until it is released."""

    grammar: "Grammar"
    released: tuple[bytes, ...] = ()  # keys of grammars that are dropped first


class GrammarReady(msgspec.Struct, frozen=True):
    """Device → Executor → Scheduler: a grammar that was to be prepared has been compiled, or why not."""

    key: bytes
    error: str | None = None


class GrammarWork(msgspec.Struct, frozen=True):
    """The work of a step for the sequences in it that have a grammar."""

    seconds: float  # of the device's thread: to follow them, and to fill masks
    num_tokens: int  # that were sampled
    num_redrawn: int  # of those: the grammar refused the token that was drawn first


class Grammar:
    """Rules for the outputs of one request, as devices see them.  Sequences share them, and they never change.

    Args:
        matcher: returns a matcher of `llguidance` at the beginning of an output; None: behind its reasoning it may be anything.
            It compiles the source where `prepare` has not.
        text_of: gives the text of a token.
        vocabulary: for a device in another process; None: it is in this one.
        compile_s: that it took to compile; None: it was compiled before, or is none.
        prepare: compiles the source for a device in this process, and keeps what it compiled until `release`.
        release: gives up what `prepare` keeps of this key.
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
        self.num_tokens, self.thinking = rules.num_tokens, rules.thinking
        self.matcher, self.text_of = matcher, text_of
        self.vocabulary, self.compile_s = vocabulary, compile_s

    def __repr__(self) -> str:
        return f"<Grammar of {len(self.rules.source or '')} characters>"


def key_of(source: str) -> bytes:
    """Return the name of a source on a device: requests that bring the same one share what is compiled of it."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that every client may set by name, in Python and in the body of any HTTP request.

    The bodies of the HTTP APIs inherit these fields, so a new option that clients may set is declared here only.

    Args:
        truncate_prompt_tokens: the most prompt tokens to keep; -1 means the length of the context.
        truncation_side: `left` cuts the beginning of the prompt, `right` its end.  None takes the tokenizer's side.
        add_special_tokens: whether the tokenizer adds special tokens.  None means yes for text and no for a chat.
        data_parallel_rank: the replica that runs the request while it is alive.  None leaves the choice to the router.
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
        session_id: names a conversation; its requests run on one replica, which has their prefix in its cache.
        reasoning: the marks around the model's reasoning, unless the engine's options name them.
        key: names the client.  Each client has an equal share of the steps and at most half of the room for grammars.
        cache_scope: requests share cached prefixes, and drafts from recent answers, only within one scope.
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
    visible: MakeVisible | None = None

    def without_tokenization(self) -> "RequestOptions":
        """Return these options for a prompt that is made of the token ids of an earlier output."""
        return msgspec.structs.replace(
            self, truncate_prompt_tokens=None, truncation_side=None, add_special_tokens=None
        )


NO_OPTIONS = RequestOptions()


def client_options(body: ClientOptions) -> dict[str, Any]:
    """Return the options that clients may set as keywords for `RequestOptions`, from the body of an HTTP request."""
    return {name: getattr(body, name) for name in ClientOptions.__struct_fields__}


class Render(msgspec.Struct, frozen=True, kw_only=True):
    """Frontend → Renderer: a prompt as the caller wrote it, and the sink that takes its results.

    The sink carries the cancel scope of the rendering stage: closing the reply slot ends the work.
    """

    id: RequestId
    prompt: PoolingPrompt
    params: SamplingParams | PoolingParams  # the engine's own copy
    slot: ReplySink  # of the kind that goes with the parameters
    options: RequestOptions
    arrival_time: float  # wall clock, seconds
    adapter: LoadedAdapter | None = None


class Track(msgspec.Struct, frozen=True):
    """Renderer → Detokenizer: the sequences to expect tokens for.  Sent before `Admit`."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved: max_tokens is a number
    slot: GenerationSink
    prompt: str | None = None  # the text, where there is one
    options: RequestOptions = NO_OPTIONS


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer → Scheduler: a rendered, validated request."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved: max_tokens is a number
    eos_token_id: int | None  # the primary one; None with ignore_eos
    stop_token_ids: tuple[int, ...]  # the caller's, then the model's secondary EOS ids
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    options: RequestOptions = NO_OPTIONS
    arrival_time: float = 0.0
    cache_salt: str | None = None
    grammar: Grammar | None = None  # what an output must match
    adapter: LoadedAdapter | None = None
    embeds: tuple[Embeds, ...] = ()  # what stands for tokens, in order; their ids are zeros
    embeds_digests: tuple[bytes, ...] = ()  # by block; empty where it has none


class AdmitPooling(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer → Scheduler: a rendered, validated pooling request, with all that its later stages need."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: PoolingParams  # resolved: every field is decided
    slot: PoolingSink
    token_type_ids: tuple[int, ...] | None = None  # None: all are 0
    num_keys: int | None = None  # first tokens that the others attend to; None: all
    skipped_rows: tuple[int, ...] = ()  # of a document: they take no part in late interaction
    options: RequestOptions = NO_OPTIONS
    arrival_time: float = 0.0


class Abort(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: the request to end, in whatever stage it is.  Legal at any time."""

    id: RequestId


# Far above any real load: it turns a runaway caller into a QueueOverflowError, and bounds every inbox.
MAX_OPEN_REQUESTS = 2**20

# The room of one request on a GPU.  A request that needs more is refused when it is rendered.
MAX_EDITS = 1024  # biased, banned and, until min_tokens, stop tokens
MAX_BAD_WORD = 16  # tokens of a bad word, without its last
