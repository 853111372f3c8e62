"""The errors that callers can receive.  `except ValueError` catches each validation failure.

One table in the server assigns the HTTP status and `type` to each class.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class TrouperError(Exception):
    """The base of all errors that are raised on purpose."""


class TrouperClientError(TrouperError):
    """An error that the request caused."""


class TrouperValidationError(TrouperClientError, ValueError):
    """An invalid argument, prompt or parameter; `str()` names it.

    `code` and `parameter` travel with the error to the body of an HTTP response.  No program reads the message.
    """

    code = "invalid_value"

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.value = value

    def __str__(self) -> str:
        facts: list[str] = []
        if self.parameter is not None:
            facts.append(f"parameter={self.parameter}")
        if self.value is not None:
            text = repr(self.value)
            facts.append(f"value={text if len(text) <= 200 else text[:200] + '…'}")
        return f"{self.message} ({', '.join(facts)})" if facts else self.message


class ContextLengthError(TrouperValidationError):
    """More tokens than the model's context holds; `limit` and `length` are its size and the given number, if known.

    Clients recognise the code and shorten the conversation.
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
    """A path of the request leads out of the folder that the server allows."""


def invalid(parameter: str, rule: str, value: object = None) -> TrouperValidationError:
    """Make the error for a parameter that breaks `rule`; the message begins with the parameter's name."""
    return TrouperValidationError(f"{parameter}: {rule}", parameter=parameter, value=value)


MAX_SHOWN = 8  # wrong values that one error names


def out_of_vocabulary(parameter: str, *token_ids: int, vocab_size: int) -> TrouperValidationError:
    """Make the error for token ids that the model does not have; it names all of them, or the first eight."""
    # str() of some numbers is refused.
    shown = [str(id) if -(2**63) <= id < 2**63 else "a huge number" for id in token_ids[:MAX_SHOWN]]
    more = ["…"] if len(token_ids) > MAX_SHOWN else []
    which = f"id {shown[0]} is" if len(token_ids) == 1 else f"ids {', '.join(shown + more)} are"
    rule = f"token {which} out of vocabulary, ids must be in [0, {vocab_size})"
    return invalid(parameter, rule, token_ids[0] if len(token_ids) == 1 else None)


class ChatTemplateResolutionError(TrouperClientError):
    """The model has no chat template, or the given one cannot be used."""


class GrammarError(TrouperValidationError):
    """Constraint of an output that is no grammar, or too complex; `code` says which and is the HTTP error's code."""

    def __init__(self, message: str, *, parameter: str, code: str) -> None:
        super().__init__(message, parameter=parameter)
        self.code = code  # invalid_schema, invalid_grammar or schema_too_complex


class TemplateBudgetError(TrouperValidationError):
    """A chat template takes more time, memory or text than its limits allow."""

    code = "template_budget_exceeded"


class MediaError(TrouperValidationError):
    """An image of the request cannot be used; `code` names the reason and is the HTTP error's code.

    The codes are `invalid_image`, `media_too_large`, `media_budget`, `too_many_media`, `media_url_blocked` and
    `multimodal_cache_miss`.
    """

    def __init__(self, message: str, *, parameter: str, code: str, value: Any = None) -> None:
        super().__init__(message, parameter=parameter, value=value)
        self.code = code


class TrouperNotFoundError(TrouperClientError):
    """The model or adapter that a request names is not known; `parameter` is the field, where it is not the model."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class LoRAAdapterNotFoundError(TrouperNotFoundError):
    """The adapter that a request names is not known."""


class TrouperUnprocessableEntityError(TrouperClientError):
    """Media of the request cannot be fetched or decoded."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class UnsupportedFeatureError(TrouperError, NotImplementedError):
    """The model or this build lacks the feature; `parameter` names what asked for it, with `value`."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class MissingExtraError(UnsupportedFeatureError):
    """A feature needs an optional package that is not installed; the message says how to install it.

    `refusal` says only what cannot be done, for a client over HTTP, which can install nothing here.
    """

    def __init__(self, message: str, *, refusal: str, parameter: str | None = None) -> None:
        super().__init__(message, parameter=parameter)
        self.refusal = refusal


def rename_parameter(
    error: "TrouperValidationError | UnsupportedFeatureError", parameter: str
) -> None:
    """Give an error's parameter the name that the caller knows it by, also where the message begins with it."""
    head, text = f"{error.parameter}", str(error.args[0])
    if text.startswith(head):
        error.args = (parameter + text.removeprefix(head),)
    if isinstance(error, TrouperValidationError):
        error.message = str(error.args[0])
    error.parameter = parameter


@contextmanager
def prompt_named(place: str) -> Generator[None]:
    """Give the errors about a prompt the name that the caller knows it by."""
    try:
        yield
    except TrouperValidationError as error:
        if error.parameter in ("prompt", "prompt_token_ids", "prompt_embeds"):
            rename_parameter(error, place)
        raise


class GracefulHTTPError(TrouperError):
    """An expected refusal that knows its own HTTP status."""

    status = 503


class QueueOverflowError(GracefulHTTPError):
    """The queue holds `max_num_queued_reqs` requests."""


class MaxQueuedTokensError(GracefulHTTPError):
    """The queue holds `max_num_queued_tokens` tokens."""


class ProfilerAlreadyActiveError(GracefulHTTPError):
    """A second `start_profile` without `stop_profile`."""

    status = 409


class RemoteError(TrouperError):
    """A server that was asked over HTTP cannot be reached, has failed, or speaks another language."""


class TrouperServerError(TrouperError):
    """An error of the engine, which the request did not cause."""


class DeviceStartError(TrouperServerError):
    """A device's process, or what it needs, could not be started."""


class GenerationError(TrouperServerError):
    """One request failed inside the engine (`finish_reason="error"`); `code` names the cause."""

    def __init__(self, message: str = "", code: str = "internal_error") -> None:
        super().__init__(message)
        self.code = code


class RetryableRequestError(GenerationError):
    """A transient refusal or failure; the same request may be sent again.

    `code` says what the client waits for: `engine_paused`, `draining`, `device_restarting` or `adapters_in_use`.
    """

    def __init__(self, message: str = "", code: str = "engine_paused") -> None:
        super().__init__(message, code)


class AdaptersInUseError(RetryableRequestError):
    """Requests use all adapters that may be loaded at once; the next is loaded when one of them ends."""


class ExecutionError(GenerationError):
    """Model execution failed for these requests."""

    def __init__(self, message: str, request_ids: list[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class EnginePausedError(TrouperError, RuntimeError):
    """Waiting on a paused or sleeping engine would never end."""


class EngineForkedError(TrouperError, RuntimeError):
    """The engine runs in the process that this one was forked from; make one after forking."""


class EngineGenerateError(TrouperServerError):
    """An unexpected error in one `generate()` or `encode()`; the engine lives."""


class EngineDeadError(TrouperServerError):
    """The engine cannot serve any more; `__cause__` says why."""
