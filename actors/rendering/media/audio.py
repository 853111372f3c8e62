"""Decode recordings within limits, and convert each to the inputs of an audio tower.  Runs without torch.

A file of 50 KiB can declare days of silence, so its header is checked first, and decoding in blocks stops at the limit
even if the header is wrong.  Clients never see messages of libsndfile.

The towers take log-mel spectrograms like Whisper's.  They are computed here with numpy, because the feature extractors of
transformers either need torch, which the media process does not have, or compute only one frame at a time.
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

# libsndfile's names of formats.  `.mpga` and `.mpeg` files are MP3; OGG contains Vorbis or Opus.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
NAMES = "WAV, FLAC, OGG or MP3"
# Maximum length of one recording, and of all recordings of a request together.
MAX_SECONDS, MAX_REQUEST_SECONDS = 600, 1800
MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 1_000, 192_000
# Frames decoded at once: 8 MiB of eight channels.
BLOCK_FRAMES = 2**18
# Frames of a spectrogram computed at once: 13 MiB of 400 numbers.
BLOCK_WINDOWS = 4096
# The feature extractors of transformers that compute these spectrograms.
EXTRACTORS = ("WhisperFeatureExtractor", "Qwen3ASRFeatureExtractor")
# Qwen3-ASR needs at least half a second.
MIN_SAMPLES = 8000
# A FLAC encoder that writes to a pipe leaves the length out of the header.  libsndfile then reports this number of frames.
UNKNOWN_FRAMES = 2**63 - 1
FORMS = "must be the bytes of a file, an array of samples, or a pair (array, rate)"
Samples = np.ndarray[Any, np.dtype[np.float32]]


class Waveform(NamedTuple):
    """Mono samples between -1 and 1, and their rate per second."""

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
    # Length in seconds of the windows of Qwen2-Audio and Voxtral.
    chunk_length: int = 30
    dither: float = 0.0
    min_length: int = MIN_SAMPLES

    @property
    def num_window_samples(self) -> int:
        return self.chunk_length * self.sampling_rate


class AudioProcessor:
    """The audio processor of a model folder.

    Args:
        config: contains the folder and the model family.
        audio_token: the text of the token that is replaced by a row of the tower's output.

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
        """Raise TrouperValidationError if there is any option, because the towers prescribe all processing."""
        for name in kwargs:
            rule = f"the audio processor supports no options, but {name[:64]!r} is set; remove it"
            raise invalid("mm_processor_kwargs", rule)

    def hear(
        self, given: "bytes | memoryview | Waveform", kwargs: Mapping[str, Any], max_seconds: float
    ) -> tuple[ProcessedMedia, int]:
        """Decode and process a file or samples.  Returns the result, and its length in seconds, rounded up.

        Raises:
            RefusedFileError: the file is not a recording, or is longer than `max_seconds`, `MAX_SECONDS` or the model's limit.
            TrouperValidationError: `kwargs` contains an option, but this processor supports none.
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
        """Convert a recording at the model's sampling rate to the inputs of the tower and the placeholder text.

        Raises:
            RefusedFileError: the recording is too short or too long for the model, or contains infinite samples or NaN.
        """
        samples = waveform.samples
        # Checked only here, because mixing the channels and resampling can overflow, too.
        if not np.isfinite(samples).all():
            raise RefusedFileError("invalid_audio", "contains samples that are not finite numbers")
        # Resampling a recording of a few samples may leave none.
        arrays, num_rows = self._prepare(samples) if len(samples) else ({}, 0)
        if num_rows < 1:
            raise RefusedFileError("invalid_audio", "is too short for this model")
        made = tuple(dense(name, values) for name, values in arrays.items())
        return ProcessedMedia(made, self._audio_token * num_rows, waveform.seconds)

    def _of_qwen2_audio(self, samples: Samples) -> tuple[dict[str, Any], int]:
        """Pad the recording to one window, and mask the padding."""
        fields = self._fields
        if len(samples) > fields.num_window_samples:
            seconds = len(samples) / fields.sampling_rate
            rule = f"has {seconds:.1f} s (maximum {fields.chunk_length} s for this model); send it in parts"
            raise RefusedFileError("media_too_large", rule)
        features = self._log_mel(_padded(samples, fields.num_window_samples))
        num_frames = -(-len(samples) // fields.hop_length)
        mask = _mask(num_frames, features.shape[1])
        num_rows = (_halved(num_frames) - 2) // 2 + 1
        return {"input_features": features[None], "feature_attention_mask": mask}, num_rows

    def _of_voxtral(self, samples: Samples) -> tuple[dict[str, Any], int]:
        """Split the spectrogram of the whole recording into windows.  The last one is padded with silence."""
        size = self._fields.num_window_samples
        num_windows = -(-len(samples) // size)
        features = self._log_mel(_padded(samples, num_windows * size))
        mels = features.reshape(len(features), num_windows, -1).transpose(1, 0, 2)
        width, wide = (
            int(self._tower.get(*x)) for x in (("hidden_size", 1280), ("intermediate_size", 5120))
        )
        return {"input_features": mels}, num_windows * _halved(mels.shape[2]) * width // wide

    def _of_qwen3_asr(self, samples: Samples) -> tuple[dict[str, Any], int]:
        """Pad the spectrogram to whole chunks of the tower's convolutions, usually one second each."""
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
        rule = f"has {len(data)} bytes (maximum {MAX_FILE_BYTES}); send a smaller or compressed recording"
        raise RefusedFileError("media_too_large", rule)
    try:
        file: Any = soundfile.SoundFile(io.BytesIO(data))
    except MemoryError:
        raise
    # The library's message may contain anything, so clients do not see it.
    except Exception:
        rule = f"cannot be read as audio; send a {NAMES} file"
        raise RefusedFileError("invalid_audio", rule) from None
    with file:
        if file.format not in FORMATS:
            raise RefusedFileError(
                "invalid_audio", f"has an unsupported format; send a {NAMES} file"
            )
        check_rate(file.samplerate)
        check_channels(file.channels)
        if file.frames < UNKNOWN_FRAMES:
            check_length(file.frames / file.samplerate, max_seconds)
        if (fault := fault_of(data)) is not None:
            raise RefusedFileError("invalid_audio", f"{fault}; send a complete {NAMES} file")
        try:
            return _decoded(file, rate, max_seconds)
        except (MemoryError, RefusedFileError):
            raise
        except Exception:
            rule = f"is damaged or incomplete; send a complete {NAMES} file"
            raise RefusedFileError("invalid_audio", rule) from None


def _decoded(file: Any, rate: int, max_seconds: float) -> Waveform:
    import soxr  # pyright: ignore[reportMissingTypeStubs]

    # Otherwise soundfile seeks after each block, which fails at the end of a file without a declared length.
    file.seekable = lambda: False
    resampler = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
    pieces: list[Samples] = []
    num_frames = 0
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        num_frames += len(block)
        # The header may have declared fewer frames.
        check_length(num_frames / file.samplerate, max_seconds)
        pieces.append(resampler.resample_chunk(_mono(block)))
    if not num_frames or num_frames < file.frames < UNKNOWN_FRAMES:
        raise RefusedFileError(
            "invalid_audio", f"is damaged or incomplete; send a complete {NAMES} file"
        )
    pieces.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    return Waveform(np.concatenate(pieces), rate)


def waveform_of(given: Any) -> Waveform | bytes:
    """Convert a Python caller's recording to a file or to mono samples.

    Args:
        given: the bytes of a file; an array; or an array with its rate, as a pair or as a dict with `array` and `sampling_rate`.
            The default rate is the model's, which is 16,000 in all families.

    Raises:
        RefusedFileError: the value has another form, or an invalid rate or length.
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
        raise RefusedFileError("invalid_value", f"has a rate of {hertz:g}, which is not an integer")
    check_rate(int(hertz))
    if samples.dtype.kind == "i" and samples.dtype.itemsize in (2, 4):
        samples = samples / float(2 ** (8 * samples.dtype.itemsize - 1))
    if samples.dtype.kind != "f" or samples.ndim not in (1, 2) or not samples.size:
        shown = f"{samples.dtype} {list(samples.shape)}"
        rule = f"{FORMS}; samples are floats, int16 or int32, not {shown}"
        raise RefusedFileError("invalid_value", rule)
    if samples.ndim == 2:
        # Both orders of the axes are common.  The longer axis is time.
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
    """Check the length of a recording.  Raises RefusedFileError."""
    if seconds > MAX_SECONDS:
        rule = f"has {seconds:.0f} s (maximum {MAX_SECONDS} s); send it in parts"
        raise RefusedFileError("media_too_large", rule)
    if seconds > max_seconds:
        rule = f"exceeds the maximum of {MAX_REQUEST_SECONDS} s for all recordings of a request; send fewer or shorter ones"
        raise RefusedFileError("media_too_large", rule)


def check_rate(rate: int) -> None:
    """Check the sampling rate.  Raises RefusedFileError."""
    if not MIN_RATE <= rate <= MAX_RATE:
        rule = f"has {rate} samples per second; the rate must be {MIN_RATE} to {MAX_RATE}"
        raise RefusedFileError("invalid_audio", rule)


def check_channels(num_channels: int) -> None:
    """Check the number of channels.  Raises RefusedFileError."""
    if not 1 <= num_channels <= MAX_CHANNELS:
        rule = f"has {num_channels} channels (maximum {MAX_CHANNELS})"
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
    """Return a mask [1, length] with ones for the frames of the recording and zeros for padding."""
    mask = np.zeros((1, length), np.int64)
    mask[:, :num_frames] = 1
    return mask


def _halved(length: int) -> int:
    """Return the length of the output of a convolution with stride 2."""
    return (length - 1) // 2 + 1 if length else 0


def _after_convolutions(length: int) -> int:
    return _halved(_halved(_halved(length)))


def _extractor_fields(folder: Path) -> ExtractorFields:
    """Read the parameters of the spectrogram from preprocessor_config.json or processor_config.json.

    Raises:
        TrouperValidationError: the file describes another kind of feature extractor.
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
