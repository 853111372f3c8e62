"""Render prompts of every form into the messages that the engine needs.  Pure; runs in a renderer's thread.

The stages are: form → text (chat template) → length bound → tokens → truncation → validation → parameters.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import msgspec

from trouper.actors.messages.media import MediaItem, spans_of
from trouper.actors.messages.requests import (
    MAX_BAD_WORD,
    MAX_EDITS,
    Admit,
    AdmitPooling,
    Embeds,
    Render,
    Track,
)
from trouper.actors.messages.sinks import GenerationSink
from trouper.actors.rendering.conversations import (
    IMAGE_MARK,
    ConfinedTemplates,
    TemplateSource,
    render_once,
)
from trouper.actors.rendering.grammar.grammars import Grammars
from trouper.actors.rendering.media.items import (
    MediaPreprocessor,
    media_digests,
    prompt_digests,
)
from trouper.actors.rendering.media.parts import MediaPart, take_media
from trouper.actors.rendering.media.processor import NAME as OPTIONS
from trouper.actors.rendering.prompts.embeds import (
    decode_base64,
    decode_embeds,
    digests,
    from_tensor,
)
from trouper.actors.rendering.prompts.infill import KEYS as GAP_KEYS
from trouper.actors.rendering.prompts.infill import Gap, gap_ids, marks_of
from trouper.actors.rendering.prompts.placeholders import (
    DATA,
    UUIDS,
    encode_mixed,
    encode_with_images,
    expand_ids,
    images_of,
    lay_out_prefix,
    take_embeds,
    unmarked,
)
from trouper.actors.rendering.prompts.sampling import (
    ModelLimits,
    eos_ids,
    reasoning_of,
    resolve_sampling,
)
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.checkpoint.files import read_text
from trouper.config.engine_config import EngineConfig
from trouper.config.media import ITEMS, modality_of, no_media
from trouper.errors import (
    ChatTemplateResolutionError,
    ContextLengthError,
    TrouperValidationError,
    UnsupportedFeatureError,
    invalid,
    out_of_vocabulary,
)
from trouper.params import SamplingParams

MAX_SALT_CHARS = 128
# Clients know by these words of vLLM and OpenAI that a conversation must be shortened.
TOO_LONG = (
    "This model's maximum context length is {limit} tokens. However, your prompt contains {length}"
)
SHORTER = "Please reduce the length of the input prompt."
SPARE_TOKENS = 64  # a text cut before tokenising is left this much longer than it needs to be
# `mm_processor_kwargs` has no effect on a prompt without images.
TEXT_KEYS = frozenset({"type", "prompt", "cache_salt", "mm_processor_kwargs", DATA, UUIDS})
TOKENS_KEYS = TEXT_KEYS | {"prompt_token_ids"}
EMBEDS_KEYS = TEXT_KEYS - {DATA, UUIDS} | {"prompt_embeds"}
INFILL_KEYS = TEXT_KEYS - {DATA, UUIDS} | GAP_KEYS
CHAT_KEYS = frozenset(
    {
        "messages", "chat_template", "foreign_chat_template", "add_generation_prompt",
        "continue_final_message", "tools", "chat_template_kwargs", "template_defaults", "documents",
        "cache_salt", "mm_processor_kwargs",
    }
)  # fmt: skip
LATER_KEYS = frozenset(
    {"media_io_kwargs", "encoder_prompt", "decoder_prompt", "token_type_ids"}
)  # fmt: skip


class Rendered(msgspec.Struct, frozen=True):
    """The messages that introduce a request: to the Detokenizer (not when pooling), then to the Scheduler."""

    track: Track | None
    admit: Admit | AdmitPooling


class Form(NamedTuple):
    """A prompt in its simplest form: parts of a text, or token ids.

    Every kind of prompt is reduced to it first, so the later stages need no distinction.
    """

    pieces: list[str] | None
    ids: Sequence[Any] | None
    text: str | None
    salt: str | None
    adds_special_tokens: bool
    embeds: Sequence[Embeds] = ()
    gap: Gap | None = None  # to be filled in; the text is its prefix
    images: Sequence[MediaPart] = ()
    # The prompt's own `mm_processor_kwargs`.
    image_options: Any = None
    # What has written the placeholders.
    writer: str = "the prompt"


class Prompts:
    """Renders the prompts of one model: texts, token ids, conversations and embeddings.

    It never changes after its creation, so threads may share it. Each renderer uses it in its own thread.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        chat_template: str | None = None,
        images: MediaPreprocessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        # None for a model that takes no images.
        self.images = images
        self._keeps_end_by_default = self._keeps_end(None)
        # What a text is spelled with need not be looked at one by one.
        self._fits = tokenizer is not None and tokenizer.gives_below(limits.vocab_size)
        self._chat_template = chat_template
        self._control_tokens = ((), ()) if tokenizer is None else _control_tokens(tokenizer)
        if images is not None:  # so that no text of a user spells a placeholder
            special, added = self._control_tokens
            self._control_tokens = (*special, images.placeholder), added
        self._templates = ConfinedTemplates()
        eos = tuple(eos_ids(limits, tokenizer))
        self._grammars = Grammars(
            tokenizer, limits.vocab_size, eos, limits.sends_grammars, limits.structured_outputs
        )

    @classmethod
    def for_engine(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        images: MediaPreprocessor | None = None,
    ) -> Self:
        """Create the renderer of an engine's prompts from its configuration.

        `config.chat_template` may be the path of a file or the template itself.  `images` is None for a model of texts.
        """
        limits = ModelLimits(
            name=config.shown_name,
            vocab_size=config.model.vocab_size,
            max_model_len=config.max_model_len,
            max_logprobs=config.max_logprobs,
            eos_token_ids=config.model.eos_token_ids,
            hidden_size=config.model.hidden_size if config.enable_prompt_embeds else None,
            block_size=config.block_size,
            max_edits=MAX_EDITS if config.device == "cuda" else None,
            max_bad_word=MAX_BAD_WORD + 1 if config.device == "cuda" else None,
            sends_grammars=config.device_worker == "process",
            reasoning=config.reasoning,
            structured_outputs=config.structured_outputs,
            no_images=config.no_media,
            modality=modality_of(config.model.source_config),
            max_step=config.scheduler.max_num_scheduled_tokens,
        )
        return cls(tokenizer, limits, template_text(config.chat_template), images)

    def render_quickly(self, message: Render) -> Rendered:
        """Render one request, unless its grammar must be tried first, which takes long.

        Raises:

            UntriedGrammarError: another renderer must take the request.
            TrouperError: the prompt is invalid.
        """
        assert isinstance(message.params, SamplingParams)
        self._grammars.check_tried(message.params)
        return self.render(message)

    def render(self, message: Render) -> Rendered:
        """Render one request; raises a TrouperError for a bad prompt, or anything on a defect."""
        assert isinstance(message.params, SamplingParams)
        slot = cast("GenerationSink", message.slot)  # goes with the parameters
        form = self._form(message.prompt)
        embeds = tuple(form.embeds)
        items: tuple[MediaItem, ...] = ()
        if embeds:
            _check_embeds_request(message)
        wanted, keeps_end = self._cut(message)
        ends: tuple[int, ...] = ()
        if form.images:
            ids, items = self._with_images(form, message)
        elif form.gap is not None:
            ids, ends = self._encode_gap(form.gap, message)
        elif form.ids is None:
            adds = message.options.add_special_tokens
            adds = form.adds_special_tokens if adds is None else adds
            if embeds:
                ids, embeds = self._encode_mixed(form.pieces or [], embeds, adds)
            else:
                ids = self._encode(form.pieces or [], wanted, adds, keeps_end)
        else:
            ids = checked_ids(form.ids, self._limits.vocab_size)
        if wanted is not None and len(ids) > wanted:
            ids = ids[-wanted:] if keeps_end else ids[:wanted]
        self._check_length(len(ids), items)
        spans = self._spans(items, len(ids))
        prompt_token_ids, block_size = tuple(ids), self._limits.block_size
        names = digests(embeds, block_size) or media_digests(items, block_size)
        if spans and spans[0] == (0, len(ids)):
            names = prompt_digests(names, ids, block_size)
        resolved = resolve_sampling(message.params, len(ids), self._limits, self._tokenizer)
        marks = self._limits.reasoning or message.options.reasoning
        reasoning = reasoning_of(marks, resolved.params, form.text, ids, self._tokenizer)
        return Rendered(
            Track(
                message.id,
                prompt_token_ids,
                resolved.params,
                slot,
                form.text,
                message.options,
                {items[0].modality: [(x.first, x.num_tokens) for x in items]} if items else None,
                sum(item.seconds for item in items) or None,
            ),
            Admit(
                id=message.id,
                prompt_token_ids=prompt_token_ids,
                params=resolved.params,
                eos_token_id=resolved.eos_token_id,
                stop_token_ids=tuple(dict.fromkeys((*resolved.stop_token_ids, *ends))),
                bad_words_ids=resolved.bad_words_ids,
                options=message.options,
                arrival_time=message.arrival_time,
                cache_salt=form.salt,
                grammar=self._grammars.compile(resolved.params, reasoning, message.options.key),
                adapter=message.adapter,
                embeds=embeds,
                row_digests=names,
                media=items,
                spans=spans,
            ),
        )

    def _cut(self, message: Render) -> tuple[int | None, bool]:
        """Decide how many tokens to keep, or None for no limit, and whether to keep the end."""
        truncate, side = message.options.truncate_prompt_tokens, message.options.truncation_side
        if truncate is None and side is None:
            return None, self._keeps_end_by_default
        return self._wanted_length(truncate), self._keeps_end(side)

    def _keeps_end(self, side: str | None) -> bool:
        """A prompt is cut at its beginning unless the request, or else the tokenizer, decides otherwise."""
        if side not in (None, "left", "right"):
            raise invalid("truncation_side", "must be left or right", side)
        if side is None and self._tokenizer is not None:
            side = self._tokenizer.truncation_side
        return side != "right"

    def _form(self, prompt: Any) -> Form:
        if isinstance(prompt, str):
            return Form([prompt], None, prompt, None, True)
        if isinstance(prompt, Mapping):
            return self._dict_form(cast("Mapping[str, Any]", prompt))
        if isinstance(prompt, bytes | bytearray):
            return self._embeds_form(prompt, None, None)
        if isinstance(prompt, Sequence):
            return Form(None, prompt, None, None, False)
        raise invalid("prompt", "must be text, token ids or a prompt dict", type(prompt).__name__)

    def _dict_form(self, prompt: Mapping[str, Any]) -> Form:
        given = {key: value for key, value in prompt.items() if value is not None}
        if later := LATER_KEYS & given.keys():
            raise UnsupportedFeatureError(f"not supported yet: {', '.join(sorted(later))}")
        salt = _checked_salt(given.get("cache_salt"))
        for key, known in (
            ("messages", CHAT_KEYS), ("prompt_embeds", EMBEDS_KEYS), ("suffix", INFILL_KEYS),
            ("prompt_token_ids", TOKENS_KEYS), ("prompt", TEXT_KEYS),
        ):  # fmt: skip
            if key in given:
                if unknown := given.keys() - known:
                    raise invalid(
                        "prompt", f"unknown keys beside {key!r}", sorted(map(str, unknown))
                    )
                break
        else:
            raise invalid(
                "prompt", "a prompt dict needs prompt, prompt_token_ids, prompt_embeds or messages"
            )
        text = given.get("prompt")
        if text is not None and not isinstance(text, str):
            raise invalid("prompt", "must be text", type(text).__name__)
        if "messages" in given:
            pieces, embeds, images = self._chat(given)
            options = given.get(OPTIONS)
            writer = "the chat template"
            form = Form(pieces, None, unmarked(pieces), salt, False, embeds)
            return form._replace(images=images, image_options=options, writer=writer)
        if "suffix" in given:
            return Form(None, None, text, salt, True, gap=Gap.of(given))
        if "prompt_embeds" in given:
            return self._embeds_form(given["prompt_embeds"], text, salt)
        images, options = self._allowed(images_of(given)), given.get(OPTIONS)
        if "prompt_token_ids" in given:
            form = Form(None, given["prompt_token_ids"], text, salt, False)
        else:
            form = Form([text or ""], None, text, salt, True)
        return form._replace(images=images, image_options=options)

    def _allowed(self, images: list[MediaPart]) -> list[MediaPart]:
        """Refuse images or recordings if the model takes none."""
        limits = self._limits
        for image in images:
            if self.images is None or image.modality != limits.modality:
                given = limits.no_images, limits.name, image.where, limits.modality
                raise no_media(image.modality, *given)
        return images

    def _with_images(self, form: Form, message: Render) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Return the ids of a prompt with those of its images, and the images at their positions."""
        images, options = self.images, message.options
        assert images is not None
        if form.embeds:
            raise invalid("prompt_embeds", "not in a prompt with images or recordings")
        if options.truncate_prompt_tokens is not None or options.truncation_side is not None:
            raise invalid(
                "truncate_prompt_tokens",
                "not with images or recordings, whose tokens must stay whole",
            )
        scope = options.cache_scope + b"\0" + (form.salt or "").encode()
        given = options.mm_processor_kwargs, form.image_options
        placed = images.place(form.images, given, scope, options.key)
        if form.ids is not None:
            ids = checked_ids(form.ids, self._limits.vocab_size)
            return expand_ids(ids, images.placeholder_id, placed)
        tokenizer, pieces = self._needed_tokenizer("prompt"), form.pieces or []
        if form.writer != "the prompt":
            pieces = [piece.replace(IMAGE_MARK, images.mark) for piece in pieces]
        self._refuse_hopeless(sum(map(len, pieces)), tokenizer)
        adds = options.add_special_tokens
        adds = form.adds_special_tokens if adds is None else adds
        if images.spans == "prompt":
            begin = tokenizer.special_tokens.get("bos_token", "")
            pieces, adds = lay_out_prefix(pieces, images.placeholder, len(placed), begin), False
        ids, items = encode_with_images(
            pieces,
            images.placeholder,
            placed,
            tokenizer,
            adds_special_tokens=adds,
            writer=form.writer,
        )
        return checked_ids(ids, self._limits.vocab_size), items

    def _spans(self, items: Sequence[MediaItem], num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return the runs of tokens that see each other, which a step must compute as a whole.

        Raises:
            TrouperValidationError: one of them is longer than a step, or the model reads no prompts without images.
        """
        kind = "" if self.images is None else self.images.spans
        if kind == "prompt" and not items:
            raise invalid("prompt", "needs an image: this model does not read texts without one")
        spans = spans_of(kind, items, num_tokens)
        longest, limit = (
            max((end - begin for begin, end in spans), default=0),
            self._limits.max_step,
        )
        if longest > limit:
            what = "the prompt" if kind == "prompt" else "an image"
            rule = f"{what} has {longest} tokens that see each other, and one step computes {limit} tokens"
            raise invalid("prompt", f"{rule}; raise max_num_batched_tokens to {longest} or more")
        return spans

    def _embeds_form(self, given: Any, text: str | None, salt: str | None) -> Form:
        """Read a prompt of embeddings; its ids are zeros, which no part looks at."""
        embeds = self._decoded(given)
        return Form(None, [0] * embeds.num_rows, text, salt, False, (embeds,))

    def _decoded(self, given: Any) -> Embeds:
        width, max_rows = self._limits.hidden_size, self._limits.max_model_len
        if width is None:
            raise invalid("prompt_embeds", "not enabled (enable_prompt_embeds)")
        payload: Any = given
        if isinstance(given, str | memoryview):
            payload = decode_base64(cast("str | memoryview", given), width, max_rows)
        if isinstance(payload, bytes | bytearray | memoryview):
            return decode_embeds(cast("bytes", payload), width, max_rows)
        return from_tensor(payload, width, max_rows)

    def _chat(self, prompt: Mapping[str, Any]) -> tuple[list[str], list[Embeds], list[MediaPart]]:
        tokenizer = self._needed_tokenizer("messages")
        messages: Any = prompt["messages"]
        tools: Any = prompt.get("tools")
        variables: Any = prompt.get("chat_template_kwargs") or {}
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise invalid("messages", "must be a list of messages", type(messages).__name__)
        if tools is not None and not (
            isinstance(tools, Sequence)
            and all(isinstance(tool, Mapping) for tool in cast("Sequence[Any]", tools))
        ):
            raise invalid("tools", "must be a list of dicts")
        if not isinstance(variables, Mapping):
            raise invalid("chat_template_kwargs", "must be a dict", type(variables).__name__)
        variables = dict(cast("Mapping[str, Any]", variables))
        if documents := prompt.get("documents"):
            variables["documents"] = documents
        folder = "" if self.images is None else self.images.folder
        messages, images = take_media(cast("Sequence[Any]", messages), folder)
        images = self._allowed(images)
        messages, embeds = take_embeds(cast("Sequence[Any]", messages), self._decoded)
        foreign = prompt.get("foreign_chat_template")
        if foreign is None or foreign in tokenizer.chat_templates:
            given = foreign or prompt.get("chat_template")
            source = self._template_source(tokenizer, given, bool(prompt.get("tools")))
            render = self._templates.render
        else:
            source, render = foreign, render_once
        pieces = render(
            TemplateSource(source, *self._control_tokens),
            messages,
            tools=tools,
            add_generation_prompt=prompt.get("add_generation_prompt", True),
            continue_final_message=prompt.get("continue_final_message", False),
            variables={**prompt.get("template_defaults", {}), **variables},
            special_tokens=tokenizer.special_tokens,
            needed=list(variables),
            arranges=True,
        )
        return pieces, embeds, images

    def _template_source(self, tokenizer: Tokenizer, given: Any, has_tools: bool) -> str:
        """The request's template, or the engine's, or the tokenizer's; a name picks among its own."""
        own = tokenizer.chat_templates
        source = given if given is not None else self._chat_template
        if source is None:
            source = own.get("tool_use") if has_tools else None
            source = source or own.get("default")
        if source is None:
            raise ChatTemplateResolutionError(
                "the tokenizer has no chat template, and none was given (chat_template)"
            )
        if not isinstance(source, str):
            raise invalid("chat_template", "must be text", type(source).__name__)
        return own.get(source, source)

    def _encode(
        self, pieces: list[str], wanted: int | None, add_special_tokens: bool, keeps_end: bool
    ) -> list[int]:
        tokenizer = self._needed_tokenizer("prompt")
        num_chars = sum(map(len, pieces))
        if num_chars == 0:
            raise invalid("prompt", "the prompt must not be empty")
        if wanted is None:
            self._refuse_hopeless(num_chars, tokenizer)
        else:
            keep = (wanted + SPARE_TOKENS) * tokenizer.longest_token_chars
            if num_chars > keep and len(pieces) == 1:
                pieces = [pieces[0][-keep:] if keeps_end else pieces[0][:keep]]
        ids = tokenizer.encode_pieces(pieces, add_special_tokens)
        return ids if self._fits else checked_ids(ids, self._limits.vocab_size)

    def _encode_mixed(
        self, pieces: list[str], embeds: Sequence[Embeds], add_special_tokens: bool
    ) -> tuple[list[int], tuple[Embeds, ...]]:
        tokenizer = self._needed_tokenizer("prompt")
        self._refuse_hopeless(sum(map(len, pieces)), tokenizer)
        limit = self._limits.max_model_len
        ids, placed = encode_mixed(pieces, embeds, tokenizer, add_special_tokens, limit)
        return checked_ids(ids, self._limits.vocab_size), placed

    def _encode_gap(self, gap: Gap, message: Render) -> tuple[list[int], tuple[int, ...]]:
        """Return the tokens of a prompt with a gap, and those that end what fills it, as far as EOS would."""
        tokenizer = self._needed_tokenizer("suffix")
        if message.options.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", "not with suffix")
        marks = marks_of(tokenizer)
        if gap.max_tokens is None:
            self._refuse_hopeless(gap.num_chars, tokenizer)
        adds = message.options.add_special_tokens is not False
        ids = gap_ids(gap, marks, tokenizer, self._control_tokens[1], adds_bos=adds)
        ends_at_eos = isinstance(message.params, SamplingParams) and not message.params.ignore_eos
        ends = tuple(id for id in marks.ends if id < self._limits.vocab_size)
        return checked_ids(ids, self._limits.vocab_size), ends if ends_at_eos else ()

    def _refuse_hopeless(self, num_chars: int, tokenizer: Tokenizer) -> None:
        """Tokenising costs time in proportion to the text, so what cannot fit is not tokenised."""
        limit = self._limits.max_model_len
        if num_chars > limit * tokenizer.longest_token_chars:
            least = -(-num_chars // tokenizer.longest_token_chars)
            head = TOO_LONG.format(limit=limit, length=num_chars)
            text = f"prompt: {head} characters, which are at least {least} input tokens (max_model_len). {SHORTER}"
            raise ContextLengthError(text, parameter="prompt", limit=limit, length=least)

    def _needed_tokenizer(self, parameter: str) -> Tokenizer:
        if self._tokenizer is None:
            rule = "this engine has no tokenizer (skip_tokenizer_init), so it takes token ids only"
            raise invalid(parameter, rule)
        return self._tokenizer

    def _wanted_length(self, truncate: Any) -> int | None:
        if truncate is None:
            return None
        limit = self._limits.max_model_len
        if isinstance(truncate, bool) or not isinstance(truncate, int):
            raise invalid("truncate_prompt_tokens", "must be an integer", truncate)
        if truncate == -1:
            return limit - self._limits.room
        if not 1 <= truncate <= limit:
            rule = f"must be -1 or in [1, {limit}] (max_model_len)"
            if truncate > limit:
                # vLLM's sentence and nothing else, since clients compare it as a whole.
                text = "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size."
                raise TrouperValidationError(text, parameter="truncate_prompt_tokens")
            raise invalid("truncate_prompt_tokens", rule, truncate)
        return truncate

    def _check_length(self, length: int, items: Sequence[MediaItem] = ()) -> None:
        limit = self._limits.max_model_len
        if length == 0:
            raise invalid("prompt", "the prompt must not be empty")
        if length > limit - self._limits.room:
            also = ", and at least one new token must fit, too" if length == limit else ""
            head = TOO_LONG.format(limit=limit, length=length)
            num = sum(item.num_tokens for item in items)
            parts = f", {num} of them for {len(items)} {ITEMS[items[0].modality]}" if items else ""
            text = f"prompt: {head} input tokens{parts}{also} (max_model_len). {SHORTER}"
            raise ContextLengthError(text, parameter="prompt", limit=limit, length=length)


def _control_tokens(tokenizer: Tokenizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List the special tokens, and all added tokens."""
    added = tokenizer.added_tokens
    special = {text for id, text in added.items() if id in tokenizer.special_ids}
    return tuple(sorted(special)), tuple(sorted(set(added.values())))


def _check_embeds_request(message: Render) -> None:
    """Refuse parameters that need the prompt's tokens, which a prompt of embeddings does not have."""
    assert isinstance(message.params, SamplingParams)
    if message.params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "is not compatible with prompt_embeds")
    if message.options.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "not with prompt_embeds")


def template_text(given: str | None) -> str | None:
    """Return a chat template given as text, or read it from a file.

    A text with braces or line breaks is a template.

    Raises:

        TrouperValidationError: it is neither a template nor a readable file.
    """
    if given is None or any(character in given for character in "{}\n"):
        return given
    try:
        return read_text(Path(given), "chat_template")
    except (FileNotFoundError, ValueError) as error:
        raise invalid(
            "chat_template", f"neither a template nor a readable file: {error}", given
        ) from error


def checked_ids(ids: Any, num: int, parameter: str = "prompt_token_ids") -> list[int]:
    """Check that all token ids are integers from 0 to `num - 1`, and return them as a list.

    Raises:

        TrouperValidationError: the message names `parameter` and the first wrong id.
    """
    if not isinstance(ids, list | Sequence) or isinstance(ids, str | bytes):  # mostly a list
        raise invalid(parameter, "must be a list of ids", type(ids).__name__)
    known = cast("Sequence[int]", ids)
    if not all(map(operator.is_, map(type, known), repeat(int))):
        known = [_as_int(token_id, parameter) for token_id in known]
    if known and not (min(known) >= 0 and max(known) < num):
        wrong = next(token_id for token_id in known if not 0 <= token_id < num)
        raise out_of_vocabulary(parameter, wrong, vocab_size=num)
    return list(known)


def _as_int(token_id: Any, parameter: str) -> int:
    try:
        if not isinstance(token_id, bool):
            return operator.index(token_id)  # numpy's integers too, floats not
    except TypeError:
        pass  # said below
    raise invalid(parameter, "ids must be integers", token_id)


def _checked_salt(salt: Any) -> str | None:
    if salt is None:
        return None
    if isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_CHARS and not set(salt) & set("@/\\\0"):
        return salt
    rule = f"must be 1 to {MAX_SALT_CHARS} characters without @, /, \\ and NUL"
    raise invalid("cache_salt", rule, salt)
