"""Refuse requests that the engine cannot take: beyond its limits, or for a replica that does not exist.

Without limits a flood of requests would use all memory.  `max_num_queued_reqs` counts every unfinished completion, waiting or
running.  `max_num_queued_tokens` counts whole prompts until their first token: by an estimate until they are rendered, then exactly.
A request is refused if the others have reached a limit, whatever its own length is.
"""

from collections.abc import Callable
from typing import Any, cast

from trouper.actors.messages.requests import MAX_OPEN_REQUESTS
from trouper.actors.output.slot import Prefills
from trouper.actors.rendering.media.parts import is_media
from trouper.errors import MaxQueuedTokensError, QueueOverflowError, invalid

TOKENS_PER_IMAGE = (
    1024  # until it is processed: SmolVLM has 872 for 640 x 480 pixels, Pixtral up to 4,096
)
CHARACTERS_PER_TOKEN = 4  # of usual text; it counts only until the prompt is rendered
BYTES_PER_EMBEDDING = 2**13  # 4096 numbers of two bytes
# A prompt contains messages, a message parts, and a part its text: with the lists between them, six levels.
DEPTH = 6


def estimate_tokens(prompt: Any, depth: int = DEPTH) -> int:
    """Estimate the tokens of a prompt from its size, without tokenizing it.  Returns 0 for a value that is not a prompt.

    Args:
        depth: the most levels to descend.
    """
    if isinstance(prompt, str):
        return len(prompt) // CHARACTERS_PER_TOKEN
    if depth == 0:
        return 0
    items: list[Any] = []
    if isinstance(prompt, dict):
        given = cast("dict[Any, Any]", prompt)
        keys = ("prompt_token_ids", "prompt", "text_pair", "messages", "content", "text")
        items = [given[key] for key in keys if key in given]
        # The prompt itself is no part of a message.
        if depth < DEPTH and is_media(prompt):
            return TOKENS_PER_IMAGE
    elif isinstance(prompt, list | tuple):
        items = list(cast("list[Any]", prompt))
        if items and isinstance(items[0], int):
            return len(items)
    num_rows = _payload_bytes(prompt) // BYTES_PER_EMBEDDING
    num_rows += TOKENS_PER_IMAGE * _num_data_images(prompt)
    return num_rows + sum(estimate_tokens(item, depth - 1) for item in items)


def embeds_bytes(prompt: Any) -> int:
    """Count the bytes of a prompt's embeddings in the caller's form, over all messages of a conversation.

    They count against a limit of their own, because embeddings take thousands of times the memory of token ids.
    """
    if isinstance(prompt, str):
        return 0
    messages = _items(prompt, "messages")
    parts = [part for message in messages for part in _items(message, "content")]
    return sum(map(_payload_bytes, parts)) if parts else _payload_bytes(prompt)


def has_images(prompt: Any) -> bool:
    """Return whether a prompt has images, which are decoded in a lane of their own."""
    if isinstance(prompt, str):
        return False
    messages = _items(prompt, "messages")
    if any(is_media(part) for message in messages for part in _items(message, "content")):
        return True
    return _num_data_images(prompt) > 0


def _num_data_images(prompt: Any) -> int:
    """Count the images and recordings in the `multi_modal_data` of a prompt."""
    data = (
        cast("dict[Any, Any]", prompt).get("multi_modal_data") if isinstance(prompt, dict) else None
    )
    given: list[Any] = list(cast("dict[Any, Any]", data).values()) if isinstance(data, dict) else []
    return sum(_count(values) for values in given)


def _count(values: Any) -> int:
    if isinstance(values, list | tuple):
        return len(cast("list[Any]", values))
    return 0 if values is None else 1


def _items(given: Any, key: str) -> list[Any]:
    found = cast("dict[Any, Any]", given).get(key) if isinstance(given, dict) else None
    return list(cast("list[Any]", found)) if isinstance(found, list | tuple) else []


def _payload_bytes(prompt: Any) -> int:
    """Return the payload size of prompt embeddings or of a part with them.  Returns 0 for any other value."""
    if isinstance(prompt, dict):
        given = cast("dict[Any, Any]", prompt)
        kind = given.get("type")
        is_part = isinstance(kind, str) and kind == "prompt_embeds"
        prompt = given.get("data" if is_part else "prompt_embeds")
        if isinstance(prompt, str):
            return len(prompt)
    if isinstance(prompt, bytes | bytearray):
        return len(prompt)
    try:
        return getattr(prompt, "nbytes", 0)
    except RuntimeError:
        # Torch raises it for a sparse tensor, which the renderer refuses.
        return 0


class Admission:
    """Count the open completions and the tokens in prefill against their limits.  None means no limit.

    Both limits are checked before a request has any state, so a refusal costs almost nothing.
    """

    def __init__(
        self,
        max_num_reqs: int | None,
        max_num_tokens: int | None,
        note_rejection: Callable[[str], None],
    ) -> None:
        self.prefills = Prefills()
        self._max_num_reqs = max_num_reqs
        self._max_num_tokens = max_num_tokens
        self._note_rejection = note_rejection
        self._num_open = 0

    def __repr__(self) -> str:
        return f"<Admission {self._num_open} open, {self.prefills.num_tokens} tokens in prefill>"

    def check(self, n: int) -> None:
        """Raise QueueOverflowError or MaxQueuedTokensError if n more completions would exceed a limit.

        Nothing is reserved: `enter` counts the request once it is really opened.
        """
        limit = self._max_num_reqs
        if self._num_open + n > MAX_OPEN_REQUESTS or (
            limit is not None and self._num_open + n > limit
        ):
            self._note_rejection("max_num_queued_reqs")
            raise QueueOverflowError(
                f"{self._num_open} requests are open, and {n} more exceed max_num_queued_reqs ({limit})"
            )
        limit, num_tokens = self._max_num_tokens, self.prefills.num_tokens
        if limit is not None and num_tokens >= limit:
            self._note_rejection("max_num_queued_tokens")
            raise MaxQueuedTokensError(
                f"{num_tokens} prompt tokens are in prefill (max_num_queued_tokens is {limit})"
            )

    def enter(self, n: int) -> None:
        self._num_open += n

    def leave(self, n: int) -> None:
        self._num_open -= n


MAX_SESSION_ID = 256  # characters


def check_place(rank: object, session_id: object, num_replicas: int) -> None:
    """Refuse a replica that does not exist, and an invalid name of a session.

    Both only influence the choice of a replica, but an ignored wish would be a silent fault.

    Raises:

        TrouperValidationError: the message names the parameter.
    """
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise invalid("data_parallel_rank", "must be an integer", rank)
        if not 0 <= rank < num_replicas:
            rule = f"must be in [0, {num_replicas - 1}]: data_parallel_size is {num_replicas}"
            raise invalid("data_parallel_rank", rule, rank)
    if session_id is not None and not (
        isinstance(session_id, str) and 0 < len(session_id) <= MAX_SESSION_ID
    ):
        rule = f"must be a string of 1 to {MAX_SESSION_ID} characters"
        raise invalid("session_id", rule, session_id)
