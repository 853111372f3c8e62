"""Bugs of a server with a journal: in what it keeps, in how a later server goes on, and in what readers get."""

import msgspec

from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.segments import Segments
from trouper.frontends.server.durable.streams import Cursor, DurableStream, DurableStreams
from trouper.frontends.server.generation.driver import Driver
from trouper.frontends.server.generation.durable import StreamRun
from trouper.frontends.server.generation.token_keeper import TokenKeeper, TokenSplitter

from .bugs import bug
from .durable_world import draw_durable, draw_with_kills

# The journal


@bug(Journal, "_holds", draw_with_kills)
def tokens_are_sent_before_they_are_written(right):
    return lambda self, batch: False


@bug(Segments, "rotate", draw_durable)
def earlier_segments_are_removed_first(right):
    def faulty(self):
        for name in self._disk.names():
            self._disk.unlink(name)
        right(self)

    return faulty


# The next server


@bug(StreamRun, "attach", draw_durable)
def seed_is_drawn_anew(right):
    def faulty(self, driver):
        if self._record is not None:
            self._saved = msgspec.structs.replace(self._saved, seed=self._saved.seed + 1)
        right(self, driver)

    return faulty


@bug(TokenKeeper, "open_choices", draw_durable)
def known_tokens_are_generated_again(right):
    return lambda self: dict.fromkeys(right(self), ())


@bug(TokenSplitter, "pass_by", draw_durable)
def text_forgets_the_tokens_before(right):
    return lambda self, token: None


@bug(Driver, "_rest", draw_durable)
def choice_that_has_ended_goes_on(right):
    def faulty(self, keeper):
        keeper._ended.clear()
        return right(self, keeper)

    return faulty


# Readers


@bug(Cursor, "covers", draw_durable)
def cursor_does_not_cover_its_own_event(right):
    return lambda self, entry: entry.cursor != self and right(self, entry)


@bug(DurableStream, "advance", draw_durable)
def cursor_counts_events(right):
    return lambda self, choice, num_tokens: right(self, choice, min(num_tokens, 1) * 2)


@bug(DurableStreams, "find", draw_durable)
def stranger_finds_a_stream(right):
    return lambda self, owner, id: self._streams.get(id)


@bug(DurableStreams, "repeated", draw_durable)
def key_of_another_owner_is_found(right):
    return lambda self, owner, key: next(
        (stream for (_, its_key), stream in self._keys.items() if its_key == key), None
    )


@bug(DurableStream, "wake", draw_durable)
def reader_is_not_woken_at_the_end(right):
    def faulty(self):
        if not self.is_over:
            right(self)

    return faulty
