"""Open a server's journal at its start, and compute the fingerprint by which a later server recognises the same model."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from trouper.actors.executor.workers.model_files import sample_model
from trouper.actors.rendering.prompts.prompts import template_text
from trouper.config.engine_config import EngineConfig
from trouper.errors import invalid
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.segments import FolderDisk, JournalError, Segments
from trouper.frontends.server.durable.streams import digest_of
from trouper.frontends.server.shared.settings import ServeSettings

# Files in a model's folder that determine token ids and chat prompts.
TOKENIZER_FILES = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
TEMPLATE_FILES = "chat_template.jinja", "chat_template.json"


def open_journal(settings: ServeSettings, config: EngineConfig) -> Journal | None:
    """Open the folder of `--journal` and recover the streams of an earlier server.  Returns None without that option.

    It reads all segments, so call it from a thread.

    Raises:
        TrouperValidationError: the folder is unusable or in use, or the options contradict each other.
    """
    if settings.journal is None:
        return None
    if not settings.responses_store_bytes:
        raise invalid(
            "journal", "needs the store of responses, so --responses-store-bytes must not be 0"
        )
    if config.pooler is not None:
        raise invalid("journal", "a pooling model generates no text, so there is nothing to resume")
    disk = FolderDisk(settings.journal)
    segments = Segments(
        disk,
        fingerprint(config),
        lambda: os.urandom(16),
        max_bytes=settings.journal_size,
        syncs=settings.journal_sync == "step",
    )
    try:
        segments.begin()
    except (JournalError, OSError) as error:
        disk.release()
        raise invalid("journal", f"cannot be written: {error}", settings.journal) from None
    journal = Journal(
        segments,
        settings.journal_sync,
        settings.stream_retain_s,
        grace_s=settings.stream_grace_s,
        keeps_all=settings.durable_streams == "all",
        max_event_bytes=settings.responses_store_bytes,
    )
    others = {s.admitted.model for s in segments.streams.values()} - {journal.fingerprint}
    if settings.journal_strict and others:
        disk.release()
        text = (
            "the journal contains answers of another model, which this one cannot continue; without this option they end with "
            "the error stream_lost"
        )
        raise invalid("journal_strict", text, settings.journal)
    return journal


def fingerprint(config: EngineConfig) -> bytes:
    """Return the concatenated digests of weights, configuration, tokenizer and chat template, which determine tokens and texts.

    Separate digests let an error name the part that has changed.  Eight bytes each are enough against accidents; attacks are out of scope.
    """
    samples = [(sample.num_bytes, sample.digest) for sample in sample_model(config)]
    formats = config.dtype, config.quantization, config.load_format, config.model.hf_config
    template = template_text(config.chat_template)
    parts = (
        samples,
        formats,
        _files(config, TOKENIZER_FILES),
        [template, *_files(config, TEMPLATE_FILES)],
    )
    return b"".join(map(digest_of, parts))


def adapter_digest(folder: str) -> bytes:
    """Return the SHA-256 of an adapter's files, which need not be loaded by an engine.

    It may take a second, so call it from a thread.  Raises OSError.
    """
    found = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.name.startswith("adapter_"):
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.digest()


def _files(config: EngineConfig, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, digest) of each of these files in the model's folder."""
    files = [Path(config.tokenizer or config.model.path) / name for name in names]
    return [
        (file.name, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in files
        if file.is_file()
    ]
