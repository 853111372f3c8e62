"""The reasoning that an output may begin with, on its way from the renderer to the device."""

import msgspec


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
