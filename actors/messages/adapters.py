"""An adapter as a request and its sequences name it."""

import msgspec


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that the device has loaded."""

    slot: int  # on the device, from 1 on
    number: int  # counts loads: no two contents of a slot have one, so it names what a KV block was computed with
    name: str  # for people
