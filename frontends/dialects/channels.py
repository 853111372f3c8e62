"""Read an answer that is written in channels: gpt-oss's `<|channel|>analysis<|message|>...<|end|>`.

A message of the channel `analysis` is reasoning, one that is addressed to a function is a call, everything else
is content.  An answer may begin inside a message's header, since the prompt ends with `<|start|>assistant`.
"""

from trouper.frontends.dialects.calls import CallWriter
from trouper.frontends.dialects.reader import Parse, Reader, Sink

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 512


def read_channels(reader: Reader, calls: CallWriter, content: Sink, reason: Sink) -> Parse[None]:
    """Read message after message to the end of the answer."""
    marks = (CHANNEL, START, *ENDS)
    while calls.step() and (mark := (yield from reader.until(marks, content))):
        if mark in ENDS:
            continue
        text, found = yield from reader.until_soon((MESSAGE, *ENDS), MAX_HEADER)
        if found == MESSAGE:
            yield from _message(reader, text, calls, content, reason)
        elif mark == CHANNEL or not found:  # not a header after all
            content(mark + text + found)
    yield from reader.rest(content)


def _message(
    reader: Reader, header: str, calls: CallWriter, content: Sink, reason: Sink
) -> Parse[None]:
    channel = header.rpartition(CHANNEL)[2].split(maxsplit=1)[0] if header.strip() else ""
    recipient = header.partition("to=functions.")[2]
    if recipient and calls.schemas:
        name = recipient.split("<", 1)[0].split(maxsplit=1)
        if name and calls.start(name[0]):
            yield from reader.skip_blanks()
            yield from reader.until((*ENDS, START), calls.arguments)
            calls.end()
            return
    yield from reader.until((*ENDS, START), reason if channel == "analysis" else content)
