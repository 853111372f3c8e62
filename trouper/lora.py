"""Define `LoRARequest`, the adapter of a request."""

from typing import Any

import msgspec

from trouper.errors import invalid

MAX_NAME = 128


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter, which the engine loads on first use.

    Args:

        lora_name: the name for clients; not empty and without slashes.
        lora_int_id: a number ≥ 1 that identifies the adapter.
        lora_path: a folder in PEFT's format.
        base_model_name: the model for which it was trained; only shown to users.
        load_inplace: load it again even if its number is loaded, because its files have changed.

    Raises:

        TrouperValidationError: an invalid name, number or path.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        name: Any = self.lora_name
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or set(name) & set("/\\\0"):
            rule = f"must have 1 to {MAX_NAME} characters, without slashes and NUL"
            raise invalid("lora_name", rule, name)
        number: Any = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**63:
            raise invalid("lora_int_id", "must be an integer ≥ 1", number)
        if not _is_path(self.lora_path):
            raise invalid("lora_path", "must be the path of a folder", self.lora_path)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value
