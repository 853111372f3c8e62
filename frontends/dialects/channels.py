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
            yield from _message(reader, mark, text, calls, content, reason)
        elif mark == CHANNEL or not found:  # not a header after all
            content(mark + text + found)
    yield from reader.rest(content)


def _message(
    reader: Reader, mark: str, header: str, calls: CallWriter, content: Sink, reason: Sink
) -> Parse[None]:
    channel = header.rpartition(CHANNEL)[2].split(maxsplit=1)[0] if header.strip() else ""
    recipient = header.partition("to=functions.")[2]
    if recipient and calls.schemas:
        name = recipient.split("<", 1)[0].split(maxsplit=1)
        reader.hold()
        if name and calls.start(name[0]):
            is_whole = yield from _arguments(reader, calls)
            is_call = calls.end(is_whole=is_whole)
            text = reader.give_back()
            if not is_call:
                content(mark + header + MESSAGE + text)
            return
        reader.rewind()
    yield from reader.until((*ENDS, START), reason if channel == "analysis" else content)


def _arguments(reader: Reader, calls: CallWriter) -> Parse[bool]:
    """Read arguments, which may be missing, and the mark behind them; where they are none what is up to the mark is read.
    Returns whether they are complete.
    """
    yield from reader.skip_blanks()
    is_whole = (yield from reader.peek()) != "{" or (yield from reader.json_value(calls.arguments))
    yield from reader.skip_blanks()
    if not (yield from reader.peek()):
        return is_whole and not (reader.is_cut and not calls.has_arguments)
    is_alone = (yield from reader.accept(*ENDS)) or (yield from reader.accept(START))
    if not is_alone:
        yield from reader.until((*ENDS, START), lambda _: None)
    return is_whole and bool(is_alone)
