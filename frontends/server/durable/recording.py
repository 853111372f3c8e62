"""Record the requests of a server, so that `trouper replay` can compute them again and compare the tokens.

A record contains the seed, the parameters, and digests of the token ids of prompt and answer.  The ids themselves, and parameters with
text or tokens of the client, are included only with `--record-content`.  Each run of the server writes files of its own, with one JSON
record a line, readable only for their owner.

Recording never delays an answer: handlers submit encoded lines, and one task writes them in a thread.  If the disk is too slow, records
are dropped and counted.
"""

import dataclasses
import hashlib
import logging
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskStatus

from trouper import __version__
from trouper.actors.messages.requests import RequestOptions
from trouper.actors.scheduling.state.sequence import derived_seed
from trouper.config.args import EngineArgs
from trouper.config.checks import check_private_folder
from trouper.config.engine_config import EngineConfig
from trouper.config.generation import Marks
from trouper.errors import invalid
from trouper.frontends.server.shared.settings import ServeSettings
from trouper.lora import LoRARequest
from trouper.outputs import RequestOutput
from trouper.params import SamplingParams

if TYPE_CHECKING:
    from trouper.actors.engine.generation import Generation

logger = logging.getLogger(__name__)
# `trouper replay` finds the files by this suffix.
SUFFIX = ".jsonl"
# The memory limit of records queued for the disk: 64 MiB hold about 150,000 records without content.
MAX_PENDING_BYTES = 64 * 2**20
# At this size the recorder starts another file.
MAX_FILE_BYTES = 256 * 2**20
# Parameters that contain text or tokens of the client.
CONTENT = ("structured_outputs", "bad_words", "stop", "logit_bias", "allowed_token_ids", "extra_args", "stop_token_ids")  # fmt: skip
# Parameters that change only the end or the delivery of an answer.  A replay uses the recorded length instead.
ENDS_ONLY = ("stop", "output_kind", "stream_interval", "include_stop_str_in_output")
# Secrets, and options without effect on a replay.
LEFT_OUT = ("hf_token", "shutdown_timeout")


class TokenDigest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describe a list of token ids by length and digest, with the ids themselves only if content is recorded."""

    num: int
    sha256: str
    ids: list[int] | None = None

    @classmethod
    def of(cls, ids: Sequence[int], *, has_ids: bool) -> "TokenDigest":
        """Describe token ids."""
        return cls(len(ids), digest(ids), list(ids) if has_ids else None)


class ChoiceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describe one of the `n` choices of an answer.  The finish reason is None if the client disconnected before the end."""

    index: int
    tokens: TokenDigest
    finish_reason: str | None = None


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describe one prompt of a request and its answer.

    Attributes:
        seed: the client's seed, or else the one that the engine derived.
        params: the sampling parameters that differ from their defaults.
        adapter: the name of the LoRA adapter.
        withheld: names of inputs that a replay needs but the record lacks.
    """

    id: str
    seed: int
    params: dict[str, Any]
    prompt: TokenDigest
    outputs: list[ChoiceRecord]
    adapter: str | None = None
    reasoning: Marks | None = None
    withheld: list[str] = []


class RecordedAdapter(msgspec.Struct, frozen=True):
    """Describe an adapter by its folder and the digest of its files at the server's start."""

    path: str
    sha256: str


class RecordHead(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describe the server in the first line of a file, with the engine options that differ from their defaults."""

    created: float
    trouper: str
    model: str
    fingerprint: str
    dtype: str
    options: dict[str, Any]
    adapters: dict[str, RecordedAdapter]
    has_content: bool
    format: Literal["trouper-record"] = "trouper-record"
    version: Literal[2] = 2


def digest(ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids in hexadecimal.  Each id counts as eight bytes in native order."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()


def line_of(record: object) -> bytes:
    """Encode one line of a record file, with its newline."""
    return msgspec.json.encode(record) + b"\n"


def given_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults, as JSON values, without those in `ENDS_ONLY`."""
    plain, defaults = msgspec.to_builtins(params), msgspec.to_builtins(SamplingParams())
    given = {name: value for name, value in plain.items() if value != defaults[name]}
    return {name: value for name, value in given.items() if name not in ENDS_ONLY}


class RequestRecording:
    """Collect the answer of one request, by prompt and choice, until its end.

    Only the handler's task uses it.
    """

    def __init__(
        self,
        recorder: "RequestRecorder",
        prompts: Sequence[Any],
        params: SamplingParams,
        options: RequestOptions,
    ) -> None:
        self._recorder, self._prompts, self._params, self._options = (
            recorder,
            prompts,
            params,
            options,
        )
        self._generations: dict[int, Generation[RequestOutput]] = {}
        self._first: dict[int, RequestOutput] = {}
        self._ids: dict[int, dict[int, list[int]]] = {}
        self._reasons: dict[tuple[int, int], str] = {}

    def listed(
        self, generations: "Iterable[Generation[RequestOutput]]"
    ) -> "Iterator[Generation[RequestOutput]]":
        """Yield the engine's requests, one for each prompt, and remember them: they have the ids from which seeds are derived."""
        for i, generation in enumerate(generations):
            self._generations[i] = generation
            yield generation

    def note(self, i: int, output: RequestOutput) -> None:
        """Add the new tokens of an output of prompt `i`."""
        if i not in self._first:
            self._first[i] = msgspec.structs.replace(output, outputs=[])
        choices = self._ids.setdefault(i, {})
        for completion in output.outputs:
            choices.setdefault(completion.index, []).extend(completion.token_ids)
            if completion.finish_reason is not None:
                self._reasons[i, completion.index] = completion.finish_reason

    def end(self) -> None:
        """Submit one record for each prompt with output tokens."""
        for i, first in self._first.items():
            # A complete answer of an earlier process needs no engine request, and was recorded there.
            if any(self._ids[i].values()) and i in self._generations:
                self._recorder.put(self._record(i, first))
        self._first.clear()

    def _record(self, i: int, first: RequestOutput) -> RequestRecord:
        has_content, params = self._recorder.has_content, given_params(self._params)
        withheld = _missing(self._prompts[i])
        if self._options.lora_request is not None:
            withheld += self._recorder.changes_of(self._options.lora_request)
        if not has_content:
            withheld += [name for name in CONTENT if name in params]
            params = {name: value for name, value in params.items() if name not in CONTENT}
        seed, adapter = self._params.seed, self._options.lora_request
        if seed is None:
            number = self._generations[i].engine_id
            assert number is not None
            seed = derived_seed(self._recorder.seed, number)
        return RequestRecord(
            id=first.request_id,
            seed=seed,
            params=params,
            prompt=TokenDigest.of(first.prompt_token_ids, has_ids=has_content),
            outputs=[
                ChoiceRecord(
                    index, TokenDigest.of(ids, has_ids=has_content), self._reasons.get((i, index))
                )
                for index, ids in sorted(self._ids[i].items())
            ],
            adapter=None if adapter is None else adapter.lora_name,
            reasoning=self._options.reasoning,
            withheld=withheld,
        )


def _missing(prompt: Any) -> list[str]:
    """Name the inputs of a prompt that records never contain: images, sounds and embeddings."""
    if not isinstance(prompt, Mapping):
        return []
    return [name for name in ("multi_modal_data", "prompt_embeds") if prompt.get(name) is not None]  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]


class RequestRecorder:
    """Write the records of one run of a server.

    Args:
        folder: receives a file at the start, and another one after each full file.
        seed: the engine's seed, from which it derives those of requests without one.
    """

    def __init__(self, folder: Path, head: RecordHead, seed: int) -> None:
        self.has_content, self.seed = head.has_content, seed
        self._folder, self._head = folder, head
        self._pending: list[bytes] = []
        self._pending_bytes = self._file_bytes = self._num_files = 0
        # Records dropped because the disk was too slow or failed.
        self.num_dropped = 0
        self._has_failed = False
        self._news = anyio.Event()
        self._one_thread = anyio.CapacityLimiter(1)
        self._file = self._open()

    def __repr__(self) -> str:
        return f"<RequestRecorder {self._folder}, {self.num_dropped} dropped>"

    def begin(
        self, prompts: Sequence[Any], params: SamplingParams, options: RequestOptions
    ) -> RequestRecording:
        """Return the recording of a new request."""
        return RequestRecording(self, prompts, params, options)

    def changes_of(self, adapter: LoRARequest) -> list[str]:
        """Return a name for `withheld` if the adapter was loaded after the start, so that the file's first line lacks its digest."""
        first = self._head.adapters.get(adapter.lora_name)
        is_known = first is not None and first.path == os.path.abspath(adapter.lora_path)
        return [] if is_known else [f"the adapter {adapter.lora_name}, loaded after the start"]

    def put(self, record: RequestRecord) -> None:
        """Submit a record.  It is dropped if the queue for the disk is full."""
        line = line_of(record)
        if self._pending_bytes + len(line) > MAX_PENDING_BYTES:
            self._drop(1, "the disk is too slow")
            return
        self._pending.append(line)
        self._pending_bytes += len(line)
        self._news.set()

    async def run_writer(
        self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Write records until cancelled.  Records submitted before the cancellation are still written."""
        task_status.started()
        try:
            while True:
                await self._news.wait()
                self._news = anyio.Event()
                await self._write_pending()
        finally:
            with anyio.CancelScope(shield=True):
                await self._write_pending()
                await anyio.to_thread.run_sync(os.close, self._file, limiter=self._one_thread)

    async def _write_pending(self) -> None:
        lines, self._pending, self._pending_bytes = self._pending, [], 0
        if not lines:
            return
        try:
            # A cancellation would lose the lines.  If the disk hangs, the watchdog ends the process.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(
                    self._write, b"".join(lines), limiter=self._one_thread
                )
            self._has_failed = False
        except OSError as error:
            self._drop(len(lines), str(error))

    def _drop(self, num: int, why: str) -> None:
        self.num_dropped += num
        if not self._has_failed:
            logger.warning(
                "dropping records of requests until the disk accepts them again: %s", why
            )
        self._has_failed = True

    def _write(self, data: bytes) -> None:
        """Append whole lines, in the thread.  After a failure a newline comes first, because the last line may be incomplete."""
        if self._file_bytes > MAX_FILE_BYTES:
            os.close(self._file)
            self._file = self._open()
        if self._has_failed:
            data = b"\n" + data
        rest = memoryview(data)
        while rest:
            written = os.write(self._file, rest)
            self._file_bytes += written
            rest = rest[written:]

    def _open(self) -> int:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._head.created))
        name = f"{stamp}-{os.getpid()}-{self._num_files}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._folder / name, flags, 0o600)
        head = line_of(self._head)
        os.write(file, head)
        self._num_files, self._file_bytes = self._num_files + 1, len(head)
        return file


def open_recorder(
    settings: ServeSettings, config: EngineConfig, args: EngineArgs
) -> RequestRecorder | None:
    """Open the folder of `--record`, and compute the digests of the adapters.  Returns None without that option.

    It reads files, so call it from a thread.

    Raises:
        TrouperValidationError: the folder or an adapter is inaccessible, or the model does not generate.
    """
    if settings.record is None:
        if settings.record_content:
            raise invalid("record_content", "needs a folder: --record DIR")
        return None
    if config.pooler is not None:
        raise invalid("record", "a pooling model generates no text, so there is nothing to replay")
    # Imported here, because it imports torch, and a server should listen before that.
    from trouper.frontends.server.durable.opening import fingerprint

    folder = Path(settings.record)
    head = RecordHead(
        created=time.time(),
        trouper=__version__,
        model=str(config.model.path),
        fingerprint=fingerprint(config).hex(),
        dtype=str(config.dtype),
        options=_options(args),
        adapters={each.lora_name: _files_of(each) for each in settings.lora_modules},
        has_content=settings.record_content,
    )
    check_private_folder(folder, "record")
    try:
        return RequestRecorder(folder, head, config.scheduler.seed)
    except OSError as error:
        text = f"the folder cannot be written: {error.strerror}"
        raise invalid("record", text, settings.record) from None


def _files_of(adapter: LoRARequest) -> RecordedAdapter:
    from trouper.frontends.server.durable.opening import adapter_digest

    path = os.path.abspath(adapter.lora_path)
    try:
        return RecordedAdapter(path, adapter_digest(path).hex())
    except OSError as error:
        text = f"the adapter {adapter.lora_name} cannot be read: {error.strerror}"
        raise invalid("lora_modules", text, path) from None


def _options(args: EngineArgs) -> dict[str, Any]:
    """Return the options that differ from their defaults, with absolute paths.  Values that JSON cannot express are left out."""
    found: dict[str, Any] = {}
    defaults = EngineArgs()
    for field in dataclasses.fields(args):
        value: Any = getattr(args, field.name)
        if field.name in LEFT_OUT or value == getattr(defaults, field.name):
            continue
        if field.name in ("model", "tokenizer", "chat_template") and os.path.exists(value):
            value = os.path.abspath(value)
        try:
            found[field.name] = msgspec.json.decode(msgspec.json.encode(value))
        except (TypeError, msgspec.MsgspecError):
            continue
    return found
