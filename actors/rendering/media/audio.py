"""Decode recordings within limits, and turn each into the inputs of an audio tower.  Runs without torch.

A file of 50 KiB can declare days of silence, so its header is judged first, and it is decoded in blocks that stop at the
limit whatever the header says.  No text of libsndfile reaches a client.

The towers take log-mel spectrograms as Whisper's, which numpy computes here: the classes of transformers for them
either need torch, which the process for files does not have, or compute one frame at a time.
"""

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from trouper.actors.messages.media import ProcessedMedia
from trouper.actors.rendering.media.files import MAX_FILE_BYTES, RefusedFileError, fault_of
from trouper.actors.rendering.media.processor import dense, read_object
from trouper.config.media import MediaConfig
from trouper.errors import invalid

# libsndfile's names of formats.  MP3 is also what `.mpga` and `.mpeg` files are; Vorbis and Opus are in OGG.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
NAMES = "WAV, FLAC, OGG or MP3"
# Seconds of one recording, and of all recordings of a request.
MAX_SECONDS, MAX_REQUEST_SECONDS = 600, 1800
MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 1_000, 192_000
# Frames decoded at once: 8 MiB of eight channels.
BLOCK_FRAMES = 2**18
# Frames of a spectrogram computed at once: 13 MiB of 400 numbers.
BLOCK_WINDOWS = 4096
# The feature extractors of transformers that compute these spectrograms.
EXTRACTORS = ("WhisperFeatureExtractor", "Qwen3ASRFeatureExtractor")
# Qwen3-ASR takes half a second at least.
MIN_SAMPLES = 8000
# A FLAC encoder that writes to a pipe leaves the length out of the header.  libsndfile then reports this number of frames.
UNKNOWN_FRAMES = 2**63 - 1
FORMS = "must be the bytes of a file, an array of samples, or a pair (array, rate)"
Samples = np.ndarray[Any, np.dtype[np.float32]]


class Waveform(NamedTuple):
    """Samples of one channel between -1 and 1, and how many of them are a second."""

    samples: Samples
    rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


class ExtractorFields(msgspec.Struct):
    """The part of preprocessor_config.json that describes a spectrogram."""

    feature_extractor_type: str = EXTRACTORS[0]
    feature_size: int = 80
    sampling_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 400
    # Seconds of the windows that the towers of Qwen2-Audio and Voxtral take.
    chunk_length: int = 30
    dither: float = 0.0
    min_length: int = MIN_SAMPLES

    @property
    def num_window_samples(self) -> int:
        return self.chunk_length * self.sampling_rate


class AudioProcessor:
    """The processor of the recordings for a model folder.

    Args:
        config: names the folder and the family.
        audio_token: the text of the token in whose place a row is used.

    Raises:
        TrouperValidationError: the folder's files do not describe a known processor.
    """

    def __init__(self, config: MediaConfig, audio_token: str) -> None:
        from transformers.audio_utils import mel_filter_bank, window_function

        self._fields = fields = _extractor_fields(Path(config.folder))
        self._audio_token = audio_token
        self._prepare: Callable[[Samples], tuple[dict[str, Any], int]] = {
            "qwen2_audio": self._of_qwen2_audio,
            "voxtral": self._of_voxtral,
            "qwen3_asr": self._of_qwen3_asr,
        }[config.model_type]
        raw = read_object(Path(config.folder) / "config.json").get("audio_config")
        self._tower: dict[str, Any] = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        self._window = window_function(fields.n_fft, "hann")
        self._filters = mel_filter_bank(
            num_frequency_bins=1 + fields.n_fft // 2,
            num_mel_filters=fields.feature_size,
            min_frequency=0.0,
            max_frequency=8000.0,
            sampling_rate=fields.sampling_rate,
            norm="slaney",
            mel_scale="slaney",
        )

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Raise TrouperValidationError if there is any option: the towers prescribe the whole processing."""
        for name in kwargs:
            rule = f"the audio processor has no option {name[:64]!r}; it has none"
            raise invalid("mm_processor_kwargs", rule)

    def hear(
        self, given: "bytes | memoryview | Waveform", kwargs: Mapping[str, Any], max_seconds: float
    ) -> tuple[ProcessedMedia, int]:
        """Decode and process a file, or samples, and return the result with its seconds, rounded up.

        Raises:
            RefusedFileError: it is no recording, or too long for `max_seconds`, for `MAX_SECONDS` or for the model.
            TrouperValidationError: there is an option, and this processor has none.
        """
        self.check(kwargs)
        rate = self._fields.sampling_rate
        if isinstance(given, Waveform):
            check_length(given.seconds, max_seconds)
            waveform = _resampled(given, rate)
        else:
            waveform = decode_recording(given, rate, max_seconds)
        return self.process(waveform), math.ceil(waveform.seconds)

    def process(self, waveform: Waveform) -> ProcessedMedia:
        """Turn a recording at the model's rate into the inputs of the tower, and its text.

        Raises:
            RefusedFileError: it is too short or too long for the model, or has infinite samples or NaN.
        """
        samples = waveform.samples
        # Not earlier: the mean of channels and the resampler can exceed the largest number, too.
        if not np.isfinite(samples).all():
            raise RefusedFileError("invalid_audio", "has samples that are not finite numbers")
        # At a high rate a recording of a few samples has none left at the rate of the model.
        arrays, num_rows = self._prepare(samples) if len(samples) else ({}, 0)
        if num_rows < 1:
            raise RefusedFileError("invalid_audio", "is too short for the model to hear anything")
        made = tuple(dense(name, values) for name, values in arrays.items())
        return ProcessedMedia(made, self._audio_token * num_rows, waveform.seconds)

    def _of_qwen2_audio(self, samples: Samples) -> tuple[dict[str, Any], int]:
        """Fill one window; a mask shows where the recording ends in it."""
        fields = self._fields
        if len(samples) > fields.num_window_samples:
            seconds = len(samples) / fields.sampling_rate
            rule = f"has {seconds:.1f} s, and this model hears {fields.chunk_length} s; send it in parts"
            raise RefusedFileError("media_too_large", rule)
        features = self._log_mel(_padded(samples, fields.num_window_samples))
        num_frames = -(-len(samples) // fields.hop_length)
        mask = _mask(num_frames, features.shape[1])
        num_rows = (_halved(num_frames) - 2) // 2 + 1
        return {"input_features": features[None], "feature_attention_mask": mask}, num_rows

    def _of_voxtral(self, samples: Samples) -> tuple[dict[str, Any], int]:
        """Cut the spectrogram of the whole recording into windows; the last is filled with silence."""
        size = self._fields.num_window_samples
        num_windows = -(-len(samples) // size)
        features = self._log_mel(_padded(samples, num_windows * size))
        mels = features.reshape(len(features), num_windows, -1).transpose(1, 0, 2)
        width, wide = (
            int(self._tower.get(*x)) for x in (("hidden_size", 1280), ("intermediate_size", 5120))
        )
        return {"input_features": mels}, num_windows * _halved(mels.shape[2]) * width // wide

    def _of_qwen3_asr(self, samples: Samples) -> tuple[dict[str, Any], int]:
        """Fill the last of the pieces that the tower's convolutions take; each is a second."""
        features = self._log_mel(_padded(samples, max(len(samples), self._fields.min_length)))
        piece = 2 * int(self._tower.get("n_window", 50))
        num_frames = features.shape[1]
        total = -(-num_frames // piece) * piece
        mask = _mask(num_frames, total)
        features = np.pad(features, ((0, 0), (0, total - num_frames)))
        whole, rest = divmod(num_frames, piece)
        num_rows = whole * _after_convolutions(piece) + _after_convolutions(rest)
        return {"input_features": features[None], "input_features_mask": mask}, num_rows

    def _log_mel(self, samples: Samples) -> Samples:
        """Return the log-mel spectrogram [M, T] with one frame for each `hop_length` samples."""
        fields = self._fields
        padded = np.pad(samples, fields.n_fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, fields.n_fft)
        # The library drops the last frame, too.
        windows = windows[:: fields.hop_length][: len(samples) // fields.hop_length]
        blocks: list[np.ndarray[Any, Any]] = []
        for begin in range(0, len(windows), BLOCK_WINDOWS):
            spectrum = np.fft.rfft(windows[begin : begin + BLOCK_WINDOWS] * self._window)
            blocks.append((np.abs(spectrum) ** 2) @ self._filters)
        logs = np.log10(np.maximum(np.concatenate(blocks).T, 1e-10))
        return ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


def decode_recording(data: bytes | memoryview, rate: int, max_seconds: float) -> Waveform:
    """Decode a file to one channel at `rate`.

    Raises:
        RefusedFileError: `invalid_audio` or `media_too_large`.
    """
    import soundfile  # pyright: ignore[reportMissingTypeStubs]

    if not len(data):
        raise RefusedFileError("invalid_audio", f"is empty; send a {NAMES} file")
    if len(data) > MAX_FILE_BYTES:
        rule = (
            f"has {len(data)} bytes, and a recording may have {MAX_FILE_BYTES}; send a smaller one"
        )
        raise RefusedFileError("media_too_large", rule)
    try:
        file: Any = soundfile.SoundFile(io.BytesIO(data))
    except MemoryError:
        raise
    except Exception:  # the library's texts are not for clients
        rule = f"cannot be read as audio; send a {NAMES} file"
        raise RefusedFileError("invalid_audio", rule) from None
    with file:
        if file.format not in FORMATS:
            raise RefusedFileError("invalid_audio", f"has another format; send a {NAMES} file")
        check_rate(file.samplerate)
        check_channels(file.channels)
        if file.frames < UNKNOWN_FRAMES:
            check_length(file.frames / file.samplerate, max_seconds)
        if (fault := fault_of(data)) is not None:
            raise RefusedFileError("invalid_audio", f"{fault}; send a whole {NAMES} file")
        try:
            return _decoded(file, rate, max_seconds)
        except (MemoryError, RefusedFileError):
            raise
        except Exception:
            rule = f"is damaged or incomplete; send a whole {NAMES} file"
            raise RefusedFileError("invalid_audio", rule) from None


def _decoded(file: Any, rate: int, max_seconds: float) -> Waveform:
    import soxr  # pyright: ignore[reportMissingTypeStubs]

    # Otherwise soundfile seeks behind each block, which fails at the end of a file without a length.
    file.seekable = lambda: False
    resampler = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
    pieces: list[Samples] = []
    num_frames = 0
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        num_frames += len(block)
        # The header may have lied.
        check_length(num_frames / file.samplerate, max_seconds)
        pieces.append(resampler.resample_chunk(_mono(block)))
    if not num_frames or num_frames < file.frames < UNKNOWN_FRAMES:
        raise RefusedFileError(
            "invalid_audio", f"is damaged or incomplete; send a whole {NAMES} file"
        )
    pieces.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    return Waveform(np.concatenate(pieces), rate)


def waveform_of(given: Any) -> Waveform | bytes:
    """Return the file or the samples that a Python caller's object contains.

    Args:
        given: bytes of a file; an array; an array with its rate, as a pair or as a dict with `array` and `sampling_rate`.
            An array without a rate has that of the model, which is 16,000 in all families.

    Raises:
        RefusedFileError: it is none of these.
    """
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(cast("bytes", given))
    values, rate = _samples_and_rate(given)
    try:
        samples: Any = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
        hertz = float(rate)
    except Exception:  # an object may raise anything when it is read
        raise RefusedFileError("invalid_value", FORMS) from None
    if isinstance(rate, bool) or not hertz.is_integer():
        raise RefusedFileError("invalid_value", f"has a rate of {hertz:g}, which is no integer")
    check_rate(int(hertz))
    if samples.dtype.kind == "i" and samples.dtype.itemsize in (2, 4):
        samples = samples / float(2 ** (8 * samples.dtype.itemsize - 1))
    if samples.dtype.kind != "f" or samples.ndim not in (1, 2) or not samples.size:
        shown = f"{samples.dtype} {list(samples.shape)}"
        rule = f"{FORMS}; samples are floats, int16 or int32, not {shown}"
        raise RefusedFileError("invalid_value", rule)
    if samples.ndim == 2:
        # Either order of the two axes is usual.
        samples = samples if samples.shape[1] <= samples.shape[0] else samples.T
        check_channels(samples.shape[1])
        samples = _mono(samples)
    check_length(len(samples) / hertz, MAX_SECONDS)
    return Waveform(np.ascontiguousarray(samples, np.float32), int(hertz))


def _samples_and_rate(given: Any) -> tuple[Any, Any]:
    if isinstance(given, Mapping):
        fields = cast("Mapping[str, Any]", given)
        if set(fields) != {"array", "sampling_rate"}:
            rule = f"{FORMS}; a dict must have array and sampling_rate"
            raise RefusedFileError("invalid_value", rule)
        return fields["array"], fields["sampling_rate"]
    if isinstance(given, tuple):
        pair = cast("tuple[Any, ...]", given)
        if len(pair) != 2:
            raise RefusedFileError("invalid_value", FORMS)
        return pair
    return given, ExtractorFields().sampling_rate


def check_length(seconds: float, max_seconds: float) -> None:
    """Check the seconds of a recording.  Raises RefusedFileError."""
    if seconds > MAX_SECONDS:
        rule = f"has {seconds:.0f} s, and a recording may have {MAX_SECONDS}; send it in parts"
        raise RefusedFileError("media_too_large", rule)
    if seconds > max_seconds:
        rule = f"is too much: all recordings of a request may have {MAX_REQUEST_SECONDS} s; send fewer or shorter ones"
        raise RefusedFileError("media_too_large", rule)


def check_rate(rate: int) -> None:
    """Check the samples of a second.  Raises RefusedFileError."""
    if not MIN_RATE <= rate <= MAX_RATE:
        rule = f"has {rate} samples a second, and {MIN_RATE} to {MAX_RATE} are allowed"
        raise RefusedFileError("invalid_audio", rule)


def check_channels(num_channels: int) -> None:
    """Check the number of channels.  Raises RefusedFileError."""
    if not 1 <= num_channels <= MAX_CHANNELS:
        rule = f"has {num_channels} channels, and at most {MAX_CHANNELS} are allowed"
        raise RefusedFileError("invalid_audio", rule)


def _mono(samples: np.ndarray[Any, Any]) -> Samples:
    with np.errstate(over="ignore", invalid="ignore"):
        return samples[:, 0] if samples.shape[1] == 1 else samples.mean(1, dtype=np.float32)


def _resampled(waveform: Waveform, rate: int) -> Waveform:
    import soxr  # pyright: ignore[reportMissingTypeStubs]

    if waveform.rate == rate:
        return waveform
    return Waveform(soxr.resample(waveform.samples, waveform.rate, rate), rate)


def _padded(samples: Samples, length: int) -> Samples:
    return np.pad(samples, (0, length - len(samples)))


def _mask(num_frames: int, length: int) -> NDArray[np.int64]:
    """Return ones for the frames of the recording and zeros for those that fill its length [1, length]."""
    mask = np.zeros((1, length), np.int64)
    mask[:, :num_frames] = 1
    return mask


def _halved(length: int) -> int:
    """Return the length behind a convolution that takes every second frame."""
    return (length - 1) // 2 + 1 if length else 0


def _after_convolutions(length: int) -> int:
    return _halved(_halved(_halved(length)))


def _extractor_fields(folder: Path) -> ExtractorFields:
    """Read the description of the spectrogram, from either of the two files that may have it.

    Raises:
        TrouperValidationError: it is of another kind.
    """
    given: Any = read_object(folder / "preprocessor_config.json")
    if not given:
        given = read_object(folder / "processor_config.json").get("feature_extractor") or {}
    try:
        fields = msgspec.convert(given, ExtractorFields)
    except msgspec.ValidationError as error:
        rule = f"the folder's audio processor cannot be read: {error}"
        raise invalid("model", rule, str(folder)) from None
    if fields.feature_extractor_type not in EXTRACTORS or fields.dither:
        what = "dither" if fields.dither else fields.feature_extractor_type
        rule = f"the folder's audio processor is not supported: {what}; supported: {', '.join(EXTRACTORS)}"
        raise invalid("model", rule, str(folder))
    return fields
