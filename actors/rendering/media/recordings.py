"""Judge whether the file of a recording is whole.  Pure.

libsndfile reads a file that was cut, or damaged, or to which another recording was appended, as if it was a shorter one. A model
would then answer about a part of what it was sent, without an error. So the structure of a file is checked here, and what
would be left out is refused by name. FLAC needs no check, because its decoder notices all of this.
"""

import zlib

# Encoders that write a WAV file to a pipe give it a length of 2 or 4 GiB.
PIPED_BYTES = 0x7FFF_0000
CUT = "is incomplete: its header promises more samples"
APPENDED = "has another recording behind the first, which would not be heard; send each by itself"
# The checksum of OGG takes the bits of each byte from the highest, and that of zlib from the lowest.
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_FIRST, _LAST = 2, 4
# By version (2.5, none, 2, 1): kilobits a second of layer III, and samples a second.
_SLOW = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_FAST = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_RATES = ((11025, 12000, 8000), (), (22050, 24000, 16000), (44100, 48000, 32000))


def fault_of(data: bytes | memoryview) -> str | None:
    """Return what of a recording would be left out, as a rule that it breaks, or None if it is whole."""
    raw = bytes(data)
    if raw[:4] in (b"RIFF", b"RIFX"):
        return CUT if _is_cut_wav(raw) else None
    if raw[:4] == b"OggS":
        return _fault_of_ogg(raw)
    return APPENDED if _is_longer_mp3(raw) else None


def _is_cut_wav(data: bytes) -> bool:
    """Return whether a WAV file ends before its samples do."""
    order = "big" if data[:4] == b"RIFX" else "little"
    place = 12
    while place + 8 <= len(data):
        size = int.from_bytes(data[place + 4 : place + 8], order)
        if data[place : place + 4] == b"data":
            return len(data) - place - 8 < size < PIPED_BYTES
        place += 8 + size + size % 2
    return False


def _fault_of_ogg(data: bytes) -> str | None:
    """Check the pages of an OGG file: each is whole, follows the one before, and the last one is marked as such."""
    # By stream: the number of its next page, or None behind its last.
    expected: dict[bytes, int | None] = {}
    place, has_data = 0, False
    while place < len(data):
        head = data[place : place + 27]
        if head[:4] != b"OggS" or len(head) < 27:
            return "is damaged: a page does not follow the page before it"
        sizes = data[place + 27 : place + 27 + head[26]]
        end = place + 27 + head[26] + sum(sizes)
        if len(sizes) < head[26] or end > len(data):
            return "is incomplete: it ends within a page"
        page = head[:22] + bytes(4) + data[place + 26 : end]
        if _ogg_checksum(page) != int.from_bytes(head[22:26], "little"):
            return "is damaged: the checksum of a page is wrong"
        flags, stream, number = head[5], head[14:18], int.from_bytes(head[18:22], "little")
        if flags & _FIRST:
            if has_data:
                return APPENDED
            expected[stream] = number
        has_data = has_data or not flags & _FIRST
        if expected.get(stream) != number:
            return "is damaged: a page is missing"
        expected[stream] = None if flags & _LAST else number + 1
        place = end
    if any(number is not None for number in expected.values()):
        return "is incomplete: no page is marked as its last"
    return None


def _ogg_checksum(page: bytes) -> int:
    found = zlib.crc32(page.translate(_REVERSED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
    return int(f"{found:032b}"[::-1], 2)


def _is_longer_mp3(data: bytes) -> bool:
    """Return whether an MP3 file has more frames than its first frame declares, which are those that the decoder reads."""
    place = _behind_tag(data, 0)
    size = _mp3_frame(data, place)
    # The header of the encoder is in the place of the first frame's samples.
    marks = [
        found for mark in (b"Xing", b"Info") if (found := data.find(mark, place, place + 64)) > 0
    ]
    if not size or not marks or not data[marks[0] + 7] & 1:
        return False
    declared = int.from_bytes(data[marks[0] + 8 : marks[0] + 12], "big")
    place += size
    for _ in range(declared):
        size = _mp3_frame(data, place)
        if not size:
            return False
        place += size
    place = _behind_tag(data, place)
    size = _mp3_frame(data, place)
    return bool(size and _mp3_frame(data, place + size))


def _behind_tag(data: bytes, place: int) -> int:
    """Return the place behind an ID3 tag, if there is one."""
    if data[place : place + 3] == b"TAG":
        place += 128
    head = data[place : place + 10]
    if head[:3] != b"ID3" or len(head) < 10:
        return place
    # Seven bits in each byte.
    size = sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    return place + 10 + size + (10 if head[5] & 16 else 0)


def _mp3_frame(data: bytes, place: int) -> int:
    """Return the bytes of the frame at a place, or 0 if there is none."""
    head = data[place : place + 4]
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return 0
    version, bitrate, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or rate == 3 or bitrate in (0, 15):
        return 0
    is_one = version == 3
    bits = (_FAST if is_one else _SLOW)[bitrate] * (144_000 if is_one else 72_000)
    return bits // _RATES[version][rate] + (head[2] >> 1 & 1)
