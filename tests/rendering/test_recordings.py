"""Recordings that a decoder would read in part have a fault, and whole ones have none."""

import random

import numpy as np
import pytest

from tests.support.audio import saved, tone
from trouper.actors.rendering.media.files import fault_of

KINDS = {"vorbis": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS"), "mp3": ("MP3", "MPEG_LAYER_III")}
# A tag of 128 bytes behind the recording, and one of 138 in front of it.
BEHIND, FRONT = b"TAG" + bytes(125), b"ID3\4\0\0\0\0\1\0" + bytes(128)


def made(kind, rate=16_000, num_channels=1, seed=1):
    samples = np.stack([tone(seed + i, 0.7, rate) for i in range(num_channels)], 1)
    name, subtype = KINDS[kind]
    return saved(samples, name, rate, subtype=subtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [8_000, 24_000, 48_000])
def test_whole_and_appended_files_are_told_apart(kind, rate):
    for num_channels in (1, 2):
        file, other = made(kind, rate, num_channels), made(kind, rate, seed=5)
        assert fault_of(memoryview(file)) is None
        assert "another recording" in fault_of(file + other)
        if kind == "mp3":
            assert fault_of(FRONT + file + BEHIND) is None
            assert "another recording" in fault_of(file + BEHIND + FRONT + other)


@pytest.mark.parametrize("kind", ["vorbis", "opus"])
def test_every_cut_and_every_bit_counts_in_ogg(kind):
    file, dice = made(kind), random.Random(3)
    for place in (*dice.sample(range(4, len(file)), 60), len(file) - 1):
        assert "is " in fault_of(file[:place])
        changed = bytearray(file)
        changed[place] ^= 1 << dice.randrange(8)
        assert fault_of(bytes(changed)) is not None
    second = file.find(b"OggS", 4)
    pages = [file[:second], file[second : file.find(b"OggS", second + 4)]]
    assert "marked as its last" in fault_of(pages[0])
    assert "missing" in fault_of(file.replace(pages[1], b""))
    assert "does not follow" in fault_of(file + b"more")


def test_wav_file_ends_behind_its_samples():
    for file in (saved(tone(1)), saved(tone(1), endian="BIG")):
        assert fault_of(file) is None
        assert "incomplete" in fault_of(file[:-1])
