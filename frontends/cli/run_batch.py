"""`trouper run-batch`: a file of requests in, a file of answers out."""

import math
import os
import stat
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.adapters import LoraModulesOption
from trouper.frontends.cli.adapters import lora_modules as read_modules
from trouper.frontends.cli.options import expand_options, served_names
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine
from trouper.lora import LoRARequest

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine

INFLIGHT = 1024
PART = ".part"  # suffix of the output file until it is complete


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
        typer.Option(help="Lines under way at once; 1024 or twice max-num-seqs by default.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of requests without one.")] = 0,
    lora_modules: LoraModulesOption = None,
    *,
    engine_args: EngineArgs,
) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    For example: trouper run-batch -i requests.jsonl -o answers.jsonl

    A line: {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f("}}
    """
    adapters = read_modules(lora_modules or [])
    engine_args.enable_lora |= bool(adapters)
    engine_args.seed = seed
    scheduler = resolve_offline(engine_args).scheduler
    if engine_args.max_num_queued_reqs or engine_args.max_num_queued_tokens:
        warnings.warn("a batch is not limited by max-num-queued-…", stacklevel=2)
    limit = max_inflight or max(INFLIGHT, 2 * scheduler.max_num_seqs)
    with _source(input_file) as source, _sink(output_file, input_file) as sink:
        names = served_names(engine_args)
        run_engine(engine_args, partial(_answer, source, sink, limit, names, adapters))


async def _answer(
    source: BinaryIO,
    sink: BinaryIO,
    max_inflight: int,
    names: tuple[str, ...],
    adapters: Sequence[LoRARequest],
    engine: "AsyncLLMEngine",
    _: Interrupts,
) -> None:
    from trouper.frontends.server.app import create_app
    from trouper.frontends.server.batch_files import BatchFile
    from trouper.frontends.server.server import load_adapters
    from trouper.frontends.server.settings import ServerSettings

    await load_adapters(engine, adapters)
    # A batch is answered as a whole, so its requests have no limit on their number and no deadline.
    settings = ServerSettings(
        served_model_names=names, max_requests=sys.maxsize, request_timeout_s=math.inf
    )
    with output.progress(_num_lines(source), "requests") as bar:
        batch = BatchFile(create_app(engine, settings), max_inflight, note_reply=bar.update)
        await batch.answer_all(source, sink)
    print(f"{batch.num_lines} requests, {batch.num_failed} of them failed", file=sys.stderr)


def _num_lines(source: BinaryIO) -> int | None:
    """Count the requests of a file for its progress bar; None where that would read what comes but once."""
    if not output.is_terminal(sys.stderr) or not source.seekable():
        return None
    num_lines = sum(not line.isspace() for line in source)
    source.seek(0)
    return num_lines


@contextmanager
def _source(name: str) -> Generator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115  # closed below, outside of this try
    except OSError as error:
        raise _cannot("be read", error, "input_file", name) from None
    with file:
        yield file


@contextmanager
def _sink(name: str, input_name: str) -> Generator[BinaryIO]:
    """Open a file that takes its name when it is complete; a pipe or device is written directly."""
    if name == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = os.path.realpath(name)
    is_plain = not os.path.exists(path) or stat.S_ISREG(os.stat(path).st_mode)
    if input_name != "-" and is_plain and path == os.path.realpath(input_name):
        raise TrouperValidationError("is the input file", parameter="output_file", value=name)
    part = path + PART if is_plain else path
    try:
        file = open(part, "wb")  # noqa: SIM115  # closed below, outside of this try
    except OSError as error:
        raise _cannot("be written", error, "output_file", name) from None
    try:
        with file:
            yield file
            if is_plain:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        if is_plain and os.path.getsize(part):
            output.complain(f"the answers so far are in {name}{PART}")
        elif is_plain:
            os.unlink(part)
        raise
    if is_plain:
        os.replace(part, path)


def _cannot(verb: str, error: OSError, parameter: str, name: str) -> TrouperValidationError:
    return TrouperValidationError(
        f"cannot {verb}: {error.strerror}", parameter=parameter, value=name
    )
