"""Open the journal of a server at its start."""

import hashlib
import os
from pathlib import Path

import msgspec

from trouper.actors.executor.workers.model_files import sample_model
from trouper.actors.rendering.prompts.prompts import template_text
from trouper.config.engine_config import EngineConfig
from trouper.errors import invalid
from trouper.frontends.server.durable.disk import FolderDisk
from trouper.frontends.server.durable.journal import Journal
from trouper.frontends.server.durable.segments import JournalError, Segments
from trouper.frontends.server.shared.settings import ServeSettings

# Files of a model's folder that decide about prompts and texts.
TEXT_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"
)  # fmt: skip


def open_journal(settings: ServeSettings, config: EngineConfig) -> Journal | None:
    """Open the folder of `--journal`, and find the streams of an earlier server.  Call it from a thread.

    Returns None without that option.

    Raises:
        TrouperValidationError: the folder cannot be used, or another server uses it.
    """
    if settings.journal is None:
        return None
    if not settings.responses_store_bytes:
        raise invalid("journal", "needs a store of responses: --responses-store-bytes is 0")
    if config.pooler is not None:
        raise invalid("journal", "a pooling model has no answers that take long")
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
    return Journal(segments, settings.journal_sync, settings.stream_retain_s)


def fingerprint(config: EngineConfig) -> bytes:
    """Return a digest of everything that decides about tokens and texts: weights, number formats, tokenizer and template."""
    found = hashlib.sha256()
    facts = (
        [(sample.num_bytes, sample.digest) for sample in sample_model(config)],
        [
            config.dtype,
            config.quantization,
            config.load_format,
            template_text(config.chat_template),
        ],
        config.model.hf_config,
    )
    found.update(msgspec.json.encode(facts, order="deterministic", enc_hook=repr))
    for name in TEXT_FILES:
        file = Path(config.tokenizer or config.model.path) / name
        if file.is_file():
            found.update(name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.digest()
