"""The errors that callers can receive.  `except ValueError` catches each validation failure.

One table in the server assigns the HTTP status and `type` to each class.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class TrouperError(Exception):
    """The base of all errors raised on purpose.

    Catch it to handle every expected failure.  Any other exception from trouper is a bug, and the server answers with
    status 500 for it.
    """


class TrouperClientError(TrouperError):
    """An error that the request caused.

    Sending the same request again fails again.  The server answers with status 400, 403, 404 or
    422, depending on the subclass.
    """


class TrouperValidationError(TrouperClientError, ValueError):
    """An invalid argument, prompt or parameter; `str()` names it with its value.

    `code` and `parameter` travel with the error to the body of an HTTP response, so no program
    needs to parse the message.
    """

    code = "invalid_value"

    def __init__(
        self,
        message: str,
        *,
        parameter: str | None = None,
        value: Any = None,
        rule: str | None = None,
    ) -> None:
        """Store the message, the parameter and its value.

        Args:
            rule: the message without the name of the parameter, for callers with another name for it.
        """
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.value = value
        self.rule = message if rule is None else rule

    def __str__(self) -> str:
        facts: list[str] = []
        if self.parameter is not None:
            facts.append(f"parameter={self.parameter}")
        if self.value is not None:
            text = repr(self.value)
            facts.append(f"value={text if len(text) <= 200 else text[:200] + '…'}")
        return f"{self.message} ({', '.join(facts)})" if facts else self.message


class ContextLengthError(TrouperValidationError):
    """The prompt or the output would exceed the model's context.

    `limit` is the context's size in tokens and `length` the requested number, if known.  Clients recognise the code and
    shorten the conversation.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        parameter: str,
        value: Any = None,
        limit: int | None = None,
        length: int | None = None,
    ) -> None:
        super().__init__(message, parameter=parameter, value=value)
        self.limit = limit
        self.length = length


class OutsideRootError(TrouperValidationError):
    """A path of the request leads out of the folder that the server allows.

    Symbolic links are followed before the comparison.  The server answers with status 403.
    """


def invalid(parameter: str, rule: str, value: object = None) -> TrouperValidationError:
    """Return the error for a parameter that violates `rule`.

    The message is the parameter's name, a colon and the rule, for example "top_p: must be in (0,
    1]".  `value` appears only in `str()` of the error.
    """
    message = f"{parameter}: {rule}"
    return TrouperValidationError(message, parameter=parameter, value=value, rule=rule)


# Maximum number of invalid values to list in one error.
MAX_SHOWN = 8


def out_of_vocabulary(parameter: str, *token_ids: int, vocab_size: int) -> TrouperValidationError:
    """Return the error for token ids outside of the vocabulary.

    It lists up to `MAX_SHOWN` of them and the valid range.  `parameter` is the list that contained them.
    """
    # Python refuses to convert integers of more than 4,300 digits to text.
    shown = [str(id) if -(2**63) <= id < 2**63 else "a huge number" for id in token_ids[:MAX_SHOWN]]
    more = ["…"] if len(token_ids) > MAX_SHOWN else []
    which = f"id {shown[0]} is" if len(token_ids) == 1 else f"ids {', '.join(shown + more)} are"
    rule = f"token {which} out of vocabulary; ids must be in [0, {vocab_size})"
    return invalid(parameter, rule, token_ids[0] if len(token_ids) == 1 else None)


class ChatTemplateResolutionError(TrouperClientError):
    """The model has no chat template, or the given one cannot be used.

    Pass `chat_template`, or use completions instead of chat: a base model without a template was
    not trained for chat.
    """


class GrammarError(TrouperValidationError):
    """A constraint of structured outputs is invalid or too complex to compile.

    `code` is `invalid_schema`, `invalid_grammar` or `schema_too_complex`, and is also the code in the HTTP error.
    """

    def __init__(self, message: str, *, parameter: str, code: str) -> None:
        super().__init__(message, parameter=parameter)
        self.code = code


class TemplateBudgetError(TrouperValidationError):
    """A chat template exceeds its limit of time, memory or output.

    Templates from clients run in a separate process, which is stopped at the limit, so other requests are not affected.
    """

    code = "template_budget_exceeded"


class MediaError(TrouperValidationError):
    """An image or recording of the request cannot be used; `code` is the reason, and also the code in the HTTP error.

    The codes are `invalid_image`, `media_too_large`, `media_budget`, `too_many_media`, `media_url_blocked` and
    `multimodal_cache_miss`.
    """

    def __init__(self, message: str, *, parameter: str, code: str, value: Any = None) -> None:
        super().__init__(message, parameter=parameter, value=value)
        self.code = code


class TrouperNotFoundError(TrouperClientError):
    """The model or adapter that a request names is unknown.

    `parameter` is the field with the name, or None if the name is the model's.  The server answers
    with status 404.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class LoRAAdapterNotFoundError(TrouperNotFoundError):
    """The adapter that a request names is not loaded, and cannot be loaded on demand.

    Load adapters at start by `--lora-modules`, or at run time by `/v1/load_lora_adapter`.
    """


class TrouperUnprocessableEntityError(TrouperClientError):
    """Media of the request cannot be fetched or decoded."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class UnsupportedFeatureError(TrouperError, NotImplementedError):
    """The model, the device or this version of trouper does not support a requested feature.

    A feature is never ignored silently.  `parameter` and `value` requested it.  The server answers with status 400 instead of
    501, because clients retry after a 5xx.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class MissingExtraError(UnsupportedFeatureError):
    """A feature needs an optional package, and the package is not installed.

    The message contains the command to install it.  `refusal` omits the command, because clients over HTTP cannot
    install anything here.
    """

    def __init__(self, message: str, *, refusal: str, parameter: str | None = None) -> None:
        super().__init__(message, parameter=parameter)
        self.refusal = refusal


def rename_parameter(
    error: "TrouperValidationError | UnsupportedFeatureError", parameter: str
) -> None:
    """Replace an error's parameter by the caller's name for it, also at the beginning of the message.

    For example, the check of a prompt does not know that the field of the request is called `input`.
    """
    head, text = f"{error.parameter}", str(error.args[0])
    if text.startswith(head):
        error.args = (parameter + text.removeprefix(head),)
    if isinstance(error, TrouperValidationError):
        error.message = str(error.args[0])
    error.parameter = parameter


ONE_MESSAGE = "messages[0]"


@contextmanager
def prompt_named(place: str) -> Generator[None]:
    """Rename the parameter in errors about a prompt, within a `with` block.

    `place` is the caller's name of the prompt, such as `input.2`.  Other errors pass unchanged.
    """
    try:
        yield
    except TrouperValidationError as error:
        if error.parameter in ("prompt", "prompt_token_ids", "prompt_embeds"):
            rename_parameter(error, place)
        elif error.parameter is not None and not place.startswith(("messages", "prompt")):
            # A side of a score with images is rendered as a conversation of one message.
            inner = error.parameter.removeprefix(ONE_MESSAGE)
            if inner != error.parameter:
                # Cohere's `images` have no parts.
                inner = "" if place.startswith("images[") else inner
                rename_parameter(error, place + inner)
        raise


class GracefulHTTPError(TrouperError):
    """An expected refusal with its own HTTP status, by default 503.

    The engine works as intended: the request met a limit or a temporary state, and can be sent again later.
    """

    status = 503


class QueueOverflowError(GracefulHTTPError):
    """The number of open requests has reached the limit `max_num_queued_reqs`.

    The request was refused on arrival and has used no memory of the KV cache.  The server answers with status 503 and
    Retry-After.
    """


class MaxQueuedTokensError(GracefulHTTPError):
    """The number of prompt tokens still to be computed has reached the limit `max_num_queued_tokens`.

    The request was refused on arrival.  The server answers with status 503 and Retry-After, because the number falls as
    prompts are computed.
    """


class ProfilerAlreadyActiveError(GracefulHTTPError):
    """`start_profile` was called although the profiler is already running; call `stop_profile` first."""

    status = 409


class RemoteError(TrouperError):
    """A server cannot be reached over HTTP, has failed, or uses another protocol.

    The client commands, such as `trouper chat` and `trouper ps`, raise it; the message contains the
    address.
    """


class TrouperServerError(TrouperError):
    """An error of the engine, which the request did not cause.

    The server answers with a 5xx.  Whether the same request may succeed later depends on the
    subclass.
    """


class DeviceStartError(TrouperServerError):
    """A device's process, or something it needs, could not be started.

    Examples are a worker that ends before it is ready, or shared memory that the system refuses.
    The message contains the worker's own reason if there is one.
    """


class GenerationError(TrouperServerError):
    """One request failed inside the engine, and its output has `finish_reason="error"`.

    `code` names the cause, and other requests continue.  Tokens generated before the failure have
    been delivered.
    """

    def __init__(self, message: str = "", code: str = "internal_error") -> None:
        super().__init__(message)
        self.code = code


class RetryableRequestError(GenerationError):
    """A temporary refusal or failure; the same request may be sent again later.

    `code` is the cause: `engine_paused`, `draining`, `device_restarting` or `adapters_in_use`.  The server answers with
    status 503.
    """

    def __init__(self, message: str = "", code: str = "engine_paused") -> None:
        super().__init__(message, code)


class AdaptersInUseError(RetryableRequestError):
    """Running requests use all adapter slots.

    A slot becomes free when the requests of its adapter end, so the request can be sent again later.  `max_cpu_loras` sets the
    number of slots.
    """


class ExecutionError(GenerationError):
    """Model execution failed for these requests.

    The offline API raises it for the first failed output; `request_ids` lists every failed request
    of the call.
    """

    def __init__(self, message: str, request_ids: list[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class EnginePausedError(TrouperError, RuntimeError):
    """The engine is paused or asleep, so a blocking call would never return.

    The offline API raises it before it queues anything.  Call `wake_up()` first.
    """


class EngineForkedError(TrouperError, RuntimeError):
    """The engine runs in the process from which this one was forked.

    Its threads and workers were not copied by the fork.  Create the engine after forking, or use
    the spawn method.
    """


class EngineGenerateError(TrouperServerError):
    """An unexpected error in one call of `generate()` or `encode()`.

    The engine continues with the other requests.  The name is vLLM's, for programs that catch it.
    """


class EngineDeadError(TrouperServerError):
    """The engine has ended after an error, or was not started, and serves no more requests.

    `__cause__` is the original exception.  Create a new engine to continue.
    """
