"""Parse an answer in channels: the format of gpt-oss, `<|channel|>analysis<|message|>...<|end|>`.

A message in the channel `analysis` is reasoning, a message to a function is a call, and everything else is content.  An
answer may begin inside the header of a message, because the prompt ends with `<|start|>assistant`.
"""

from trouper.frontends.dialects.calls import CallWriter
from trouper.frontends.dialects.reader import Parse, Reader, Sink

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 512


def read_channels(reader: Reader, calls: CallWriter, content: Sink, reason: Sink) -> Parse[None]:
    """Read messages up to the end of the answer.

    A header without a message is treated as content, so no text of the answer is lost.
    """
    marks = (CHANNEL, START, *ENDS)
    while calls.step() and (mark := (yield from reader.until(marks, content))):
        if mark in ENDS:
            continue
        text, found = yield from reader.until_soon((MESSAGE, *ENDS), MAX_HEADER)
        if found == MESSAGE:
            yield from _message(reader, mark, text, calls, content, reason)
        # The text is not a header.
        elif mark == CHANNEL or not found:
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
    """Read arguments, which may be absent, and the mark behind them.  Returns whether they are complete.

    If the text is not valid arguments, everything up to the mark is read.
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
