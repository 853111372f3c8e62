"""`trouper run-batch`: answer a file of requests in OpenAI's batch format.

The requests go through the server's own routes without a network, so every field behaves as over HTTP. A run of hours
can be interrupted: the output file contains the finished answers, and the same command continues.
"""

import math
import os
import sys
import warnings
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, BinaryIO

import msgspec
import typer

from trouper.config.args import EngineArgs
from trouper.frontends.cli import output
from trouper.frontends.cli.batch.answers_file import AnswersFile, answers_file, cannot
from trouper.frontends.cli.options import expand_options
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine
from trouper.frontends.cli.values import LoraModulesOption
from trouper.frontends.cli.values import lora_modules as read_modules
from trouper.frontends.server.program.batch_records import (
    Answers,
    BatchLine,
    custom_id_key,
    origin_of,
)
from trouper.lora import LoRARequest

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

INFLIGHT = 1024
# Maximum size of a request in bytes, the same as over HTTP.
MAX_LINE = 32 * 2**20
EXIT_ALL_FAILED = 1
# Engine options that change answers.  All others change only the speed.
DECIDING = (
    "revision", "tokenizer", "tokenizer_revision", "hf_overrides", "dtype", "quantization", "seed", "runner",
    "convert", "pooler_config", "generation_config", "override_generation_config", "chat_template",
)  # fmt: skip


@expand_options
def run_batch(
    ctx: typer.Context,
    input_file: Annotated[
        str,
        typer.Option("--input-file", "-i", metavar="FILE", help="File of requests; - is stdin."),
    ],
    output_file: Annotated[
        str,
        typer.Option(
            "--output-file", "-o", metavar="FILE", help="File for the replies; - is stdout."
        ),
    ],
    max_inflight: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of open requests; by default 1024, or twice max-num-seqs if larger.",
            min=1,
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Answer all requests again; answers of an earlier run are kept under another name.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed for requests without one.")] = 0,
    lora_modules: LoraModulesOption = None,
    *,
    engine_args: EngineArgs,
) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    For example: trouper run-batch -i requests.jsonl -o answers.jsonl

    To resume after an interruption, run the same command again; it also repeats failed requests.

    Example of a line: {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f("}}
    """
    adapters = read_modules(lora_modules or [])
    engine_args.enable_lora |= bool(adapters)
    engine_args.seed = seed
    config = resolve_offline(engine_args, "batch")
    if engine_args.max_num_queued_reqs or engine_args.max_num_queued_tokens:
        warnings.warn("max-num-queued-… has no effect on a batch", stacklevel=2)
    limit = max_inflight or max(INFLIGHT, 2 * config.scheduler.max_num_seqs)
    origin = _origin(engine_args, adapters)
    with (
        _source(input_file) as source,
        answers_file(output_file, input_file, origin, restarts=restart) as answers,
    ):
        if isinstance(answers, AnswersFile) and _are_all_answered(source, answers):
            print(f"{answers.num_answers} requests, all answered by earlier runs", file=sys.stderr)
            return
        run = _BatchRun(source, answers, limit, adapters, origin)
        if config.pooler is None:
            output.tell_sampling(config.model, config.model.default_sampling)
        run_engine(config, run.answer)
    if run.have_all_failed:
        raise typer.Exit(EXIT_ALL_FAILED)


@dataclass
class _BatchRun:
    """One run of an engine over the input file; `have_all_failed` is its result."""

    source: BinaryIO
    answers: Answers
    max_inflight: int
    adapters: Sequence[LoRARequest]
    origin: str
    have_all_failed: bool = False

    async def answer(self, engine: "AsyncLLMEngine", _: Interrupts) -> None:
        from trouper.frontends.server.asgi.app import create_app
        from trouper.frontends.server.program.batch_files import BatchFile
        from trouper.frontends.server.program.server import load_adapters
        from trouper.frontends.server.shared.settings import ServerSettings

        await load_adapters(engine, self.adapters)
        # A batch is answered as a whole, so its requests have no queue limit and no deadline.
        settings = ServerSettings(
            max_requests=sys.maxsize,
            max_waiting_tokens=sys.maxsize,
            request_timeout_s=math.inf,
        )
        app = create_app(engine, settings)
        with output.progress(_num_lines(self.source), "requests") as bar:
            note_reply = bar.update
            batch = BatchFile(app, self.max_inflight, note_reply=note_reply, origin=self.origin)
            await batch.answer_all(self.source, self.answers)
        for line in batch.failures.lines():
            output.complain(line)
        kept = f", {batch.num_kept} of them answered by earlier runs" if batch.num_kept else ""
        failed = f"{batch.num_failed} of them failed"
        print(f"{batch.num_lines} requests{kept}, {failed}", file=sys.stderr)
        self.have_all_failed = 0 < batch.num_lines == batch.num_failed


def _origin(engine_args: EngineArgs, adapters: Sequence[LoRARequest]) -> str:
    """Return a digest of the model, its adapters, and the options that change answers."""
    options = [getattr(engine_args, name) for name in DECIDING]
    folders = [(each.lora_name, _real(each.lora_path)) for each in adapters]
    return origin_of(_real(engine_args.model), options, folders)


def _real(path: str | None) -> str | None:
    return os.path.realpath(path) if path is not None and os.path.exists(path) else path


def _are_all_answered(source: BinaryIO, answers: AnswersFile) -> bool:
    """Match saved answers with the input before any weights are loaded.

    Returns whether every request has an answer; the answers are then in the order of the requests.

    Raises:
        TrouperValidationError: a saved answer belongs to another input or another model.
    """
    if not answers.num_saved or not source.seekable():
        # Lines of a pipe can be read only once, so they are matched during the run.
        return False
    begin = source.tell()
    seen: set[bytes] = set()
    positions = array("q")
    num_open = 0
    for line in _lines(source):
        position: int | None = None
        request = _request(line)
        if request is not None and (key := custom_id_key(request.custom_id)) not in seen:
            seen.add(key)
            position = answers.find(request)
        if position is None:
            num_open += 1
        else:
            positions.append(position)
    source.seek(begin)
    answers.check_all_used()
    if num_open == 0:
        for position in positions:
            answers.keep(position)
    return num_open == 0


def _request(line: bytes) -> BatchLine | None:
    try:
        return msgspec.json.decode(line, type=BatchLine)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that are not empty; overlong lines are cut to `MAX_LINE` bytes."""
    is_begin = True
    while line := source.readline(MAX_LINE):
        if is_begin and not line.isspace():
            yield line
        is_begin = line.endswith(b"\n")


def _num_lines(source: BinaryIO) -> int | None:
    """Count the requests of a file for the progress bar.  Returns None for a pipe, which can be read only once."""
    if not output.is_terminal(sys.stderr) or not source.seekable():
        return None
    begin = source.tell()
    num_lines = sum(1 for _ in _lines(source))
    source.seek(begin)
    return num_lines


@contextmanager
def _source(name: str) -> Generator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        # Closed below; an error of the caller's block must not be caught here.
        file = open(name, "rb")  # noqa: SIM115
    except OSError as error:
        raise cannot("be read", error, "input_file", name) from None
    with file:
        yield file
