"""Requests on their way in: from the frontends through the renderer to the scheduler."""

from collections.abc import Mapping
from typing import Any

import msgspec

from trouper.actors.messages.adapters import LoadedAdapter
from trouper.actors.messages.embeds import Embeds
from trouper.actors.messages.grammar import Grammar
from trouper.actors.messages.identifiers import RequestId
from trouper.actors.messages.sinks import GenerationSink, MakeVisible, PoolingSink, ReplySink
from trouper.config.generation import Marks
from trouper.inputs import PoolingPrompt
from trouper.params import SamplingParams
from trouper.pooling import PoolingParams


class Render(msgspec.Struct, frozen=True):
    """Frontend → Renderer: a prompt as the caller wrote it, and the sink that takes its results.

    The sink carries the cancel scope of the rendering stage: closing the reply slot ends the work.
    """

    id: RequestId
    prompt: PoolingPrompt
    params: SamplingParams | PoolingParams  # the engine's own copy
    slot: ReplySink  # of the kind that goes with the parameters
    priority: int
    arrival_time: float  # wall clock, seconds
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # left keeps the end; None: the tokenizer's
    add_special_tokens: bool | None = None  # None: True for text, False for chat
    max_text_tokens: tuple[
        int | None, ...
    ] = ()  # of each text to be pooled, special tokens not counted
    mm_processor_kwargs: Mapping[str, Any] | None = None  # concerns multimodal items only
    adapter: LoadedAdapter | None = None
    trace_headers: Mapping[str, str] | None = None  # W3C, for the request's span
    data_parallel_rank: int | None = None  # the replica to run on; None: the router's choice
    session_id: str | None = None  # of the conversation: its requests go to one replica
    reasoning: Marks | None = None  # around the reasoning, as the caller knows it
    key: str = ""  # of the client, of those that share what is bounded for all
    cache_scope: bytes = b""  # requests share prefixes only within one scope
    visible: MakeVisible | None = None  # of an output, by its prompt; None: all


class Track(msgspec.Struct, frozen=True):
    """Renderer → Detokenizer: the sequences to expect tokens for.  Sent before `Admit`."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved: max_tokens is a number
    slot: GenerationSink
    prompt: str | None = None  # the text, where there is one
    trace_headers: Mapping[str, str] | None = None
    visible: MakeVisible | None = None  # where stop strings count; None: everywhere


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer → Scheduler: a rendered, validated request."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # resolved: max_tokens is a number
    eos_token_id: int | None  # the primary one; None with ignore_eos
    stop_token_ids: tuple[int, ...]  # the caller's, then the model's secondary EOS ids
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    grammar: Grammar | None = None  # what an output must match
    adapter: LoadedAdapter | None = None
    embeds: tuple[Embeds, ...] = ()  # what stands for tokens, in order; their ids are zeros
    embeds_digests: tuple[bytes, ...] = ()  # by block; empty where it has none
    data_parallel_rank: int | None = None
    session_id: str | None = None
    key: str = ""  # of the client whose share of the steps it uses, and of the room for grammars
    cache_scope: bytes = b""  # requests share prefixes and drafts only within one scope


class AdmitPooling(msgspec.Struct, frozen=True, kw_only=True):
    """Renderer → Scheduler: a rendered, validated pooling request, with all that its later stages need."""

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: PoolingParams  # resolved: every field is decided
    slot: PoolingSink
    token_type_ids: tuple[int, ...] | None = None  # None: all are 0
    num_keys: int | None = None  # first tokens that the others attend to; None: all
    skipped_rows: tuple[int, ...] = ()  # of a document: they take no part in late interaction
    priority: int = 0
    arrival_time: float = 0.0
    data_parallel_rank: int | None = None
    key: str = ""  # as of a `Render`


class Abort(msgspec.Struct, frozen=True):
    """Frontend → Scheduler: the request to end, in whatever stage it is.  Legal at any time."""

    id: RequestId
