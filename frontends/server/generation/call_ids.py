"""Make the ids of tool calls.  Pure.

Some models' chat templates render the ids of earlier calls and accept only their own form of id, so the table of dialects has a
column for the form.  An id is a function of the reply, the choice and the call, so it is unique and needs no state.
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
    """Makes the ids of the calls of one reply.

    Attributes:
        form: the form that the model's dialect needs.
        seed: a string unique to the reply.
        num_before: the number of calls earlier in the conversation.
    """

    form: IdForm
    seed: str
    num_before: int = 0

    def of(self, index: int, name: str, choice: int = 0, prefix: str = "") -> str:
        """Return the id of a call.

        Args:
            index: the number of the call in its choice, from 0.
            name: the name of the tool.
            choice: the number of the choice.
            prefix: the API's prefix, for models that accept any id; an empty one gives vLLM's form.
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
