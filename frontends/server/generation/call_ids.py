"""Ids of the tool calls of one reply.  Pure.

Chat templates of some models put the ids back into the prompt and take only those of their own form, so the form is a
column of the table of dialects.  Ids are a function of the reply, the choice and the call: a stream repeats none.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, NamedTuple, cast

from trouper.frontends.dialects.table import IdForm

LETTERS = ascii_letters + digits
NUM_LETTERS = 9  # of Mistral's
RANDOM = "chatcmpl-tool-"  # vLLM's


class CallIds(NamedTuple):
    """The ids of one reply.

    Attributes:
        form: the dialect's.
        seed: of the reply, and of no other.
        num_before: calls earlier in the conversation.
    """

    form: IdForm
    seed: str
    num_before: int = 0

    def of(self, index: int, name: str, choice: int = 0, prefix: str = "") -> str:
        """Return the id of a call.

        Args:
            index: counts the calls of the choice.
            name: of the tool.
            prefix: of the API, for models that take any id; "" is vLLM's form.
        """
        if self.form == "numbered":
            return f"functions.{name}:{self.num_before + index}"
        if self.form == "letters" or not prefix:
            digest = blake2b(f"{self.seed}_{choice}_{index}".encode(), digest_size=16)
            if self.form != "letters":
                return RANDOM + digest.hexdigest()
            return _spelled(int.from_bytes(digest.digest()))
        return f"{prefix}_{self.seed}_{index}"


def num_calls(messages: Iterable[Mapping[str, Any]]) -> int:
    """Count the calls in a conversation."""
    given: list[Any] = [message.get("tool_calls") for message in messages]
    return sum(len(cast("list[Any]", calls)) for calls in given if isinstance(calls, list))


def _spelled(number: int) -> str:
    letters: list[str] = []
    for _ in range(NUM_LETTERS):
        number, place = divmod(number, len(LETTERS))
        letters.append(LETTERS[place])
    return "".join(letters)
