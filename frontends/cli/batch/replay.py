"""`trouper replay`: compute recorded requests again, and compare their tokens with the record.

In float32 the tokens of a request depend on nothing else, so any difference is a bug. In bfloat16 two candidates with nearly equal
logits may swap, so the report of a difference shows how close their logprobs are.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import msgspec
import typer

from trouper.config.args import EngineArgs
from trouper.config.engine_config import EngineConfig
from trouper.errors import TrouperError, invalid
from trouper.frontends.cli.options import expand_options, is_given
from trouper.frontends.cli.other_programs import check_generates
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine
from trouper.lora import LoRARequest
from trouper.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trouper.frontends.python.async_engine import AsyncLLMEngine
    from trouper.frontends.server.durable.recording import ChoiceRecord, RecordHead, RequestRecord
    from trouper.outputs import Logprob, RequestOutput

# Extension of files with records.
SUFFIX = ".jsonl"
# Maximum number of open requests, whose prompts and answers are in memory.
MAX_OPEN = 64
# Differences to show in full.
MAX_SHOWN = 10
# Number of logprobs to request when a difference is examined.
NUM_CANDIDATES = 20
# Two candidates are a near tie in bfloat16 if their logprobs differ by at most two units in the last place of the larger one.
NEAR_TIE = 2 * 2**-8


@expand_options
def replay(
    ctx: typer.Context,
    records: Annotated[
        Path,
        typer.Argument(metavar="RECORDS", help="Folder of `serve --record`, or one of its files."),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt_token_ids`, for records without content.", metavar="FILE"
        ),
    ] = None,
    line: Annotated[
        int | None, typer.Option(help="Replay only the record in this line of a file.", min=2)
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Run one request after the other.")
    ] = False,
    *,
    engine_args: EngineArgs,
) -> None:
    """Compute recorded requests again, and compare their tokens with the record.

    For example: trouper replay records

    Model and options are those of the recorded server, unless the command line sets others. The exit code is 0 if all tokens are
    equal, 1 if some differ, and 2 if weights, adapters or dtype differ from those of the record.
    """
    files = _files(records, line)
    head = _read_head(files[0])
    args = _recorded_args(ctx, engine_args, head)
    config = resolve_offline(args)
    check_generates(config)
    _check_same(files, config)
    known = {} if prompts is None else _read_prompts(prompts)
    run = _Replay(head, _read(files, line), known, 1 if alone else MAX_OPEN)
    run_engine(config, run.replay_all)
    for text in run.differences[:MAX_SHOWN]:
        print(text)
    for reason, num in run.skipped.items():
        print(f"skipped {num}: {reason}")
    num_differences = len(run.differences)
    print(
        f"{run.num_replayed} requests replayed, {num_differences} difference{'s' * (num_differences != 1)}"
    )
    if run.differences:
        raise typer.Exit(1)
    if not run.num_replayed:
        raise invalid("records", "no request could be replayed", str(records))


def _files(records: Path, line: int | None) -> list[Path]:
    files = sorted(records.glob(f"*{SUFFIX}")) if records.is_dir() else [records]
    if not files or not files[0].is_file():
        raise invalid("records", f"contains no files of records (*{SUFFIX})", str(records))
    if line is not None and len(files) > 1:
        raise invalid("line", "needs a single file of records, not a folder with several", line)
    return files


def _read_head(file: Path) -> "RecordHead":
    from trouper.frontends.server.durable.recording import RecordHead

    try:
        with file.open("rb") as reader:
            return msgspec.json.decode(reader.readline(), type=RecordHead)
    except (OSError, msgspec.MsgspecError) as error:
        raise invalid("records", f"is not a file of `serve --record`: {error}", str(file)) from None


def _recorded_args(ctx: typer.Context, given: EngineArgs, head: "RecordHead") -> EngineArgs:
    """Return the options of the recorded server, overridden by those on the command line."""
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    recorded = {name: value for name, value in head.options.items() if name in known}
    recorded.setdefault("model", head.model)
    recorded.pop("device_worker", None)
    args = EngineArgs(**recorded)
    for name in known:
        if is_given(ctx, name):
            setattr(args, name, getattr(given, name))
    return args


def _check_same(files: list[Path], config: EngineConfig) -> None:
    """Raise TrouperValidationError (exit code 2) if model, dtype or adapters differ from the recorded ones."""
    from trouper.frontends.server.durable.opening import adapter_digest, fingerprint

    mine = fingerprint(config).hex()
    for file in files:
        head = _read_head(file)
        if str(config.dtype) != head.dtype:
            text = f"the records in {file} were computed in {head.dtype}; use --dtype {head.dtype}"
            raise invalid("dtype", text, str(config.dtype))
        if head.fingerprint != mine:
            text = f"differs from the model {head.model} of {file} in weights, tokenizer, template or dtype"
            raise invalid("model", text, str(config.model.path))
        for name, adapter in head.adapters.items():
            try:
                is_same = adapter_digest(adapter.path).hex() == adapter.sha256
            except OSError as error:
                text = f"the adapter {name} of {file} cannot be read: {error.strerror}"
                raise invalid("records", text, adapter.path) from None
            if not is_same:
                text = f"the files of the adapter {name} have changed since {file} was recorded"
                raise invalid("records", text, adapter.path)


def _read(files: list[Path], line: int | None) -> "Iterator[tuple[str, RequestRecord | str]]":
    """Yield the file and line of each record, and the record or the reason why it cannot be read."""
    from trouper.frontends.server.durable.recording import RequestRecord

    for file in files:
        with file.open("rb") as reader:
            for number, text in enumerate(reader, 1):
                if number == 1 or not text.strip() or line not in (None, number):
                    continue
                place = f"{file.name}:{number}"
                try:
                    yield place, msgspec.json.decode(text, type=RequestRecord)
                except msgspec.MsgspecError:
                    yield place, "the line is damaged"


class _PromptLine(msgspec.Struct):
    prompt_token_ids: list[int]


def _read_prompts(file: Path) -> dict[str, list[int]]:
    """Return prompts by the digest of their token ids."""
    from trouper.frontends.server.durable.recording import digest

    try:
        lines = file.read_bytes().splitlines()
        found = [msgspec.json.decode(each, type=_PromptLine) for each in lines if each.strip()]
    except (OSError, msgspec.MsgspecError) as error:
        raise invalid("prompts", f"cannot be read: {error}", str(file)) from None
    return {digest(each.prompt_token_ids): each.prompt_token_ids for each in found}


class _Replay:
    """One run over all records.

    Attributes:
        differences: a message for each request whose tokens differ.
        skipped: the number of skipped records, by reason.
    """

    def __init__(
        self,
        head: "RecordHead",
        records: "Iterator[tuple[str, RequestRecord | str]]",
        prompts: Mapping[str, list[int]],
        max_open: int,
    ) -> None:
        self.num_replayed = 0
        self.differences: list[str] = []
        self.skipped: dict[str, int] = {}
        self._records, self._prompts, self._max_open = records, prompts, max_open
        self._adapters = {
            name: LoRARequest(name, number, files.path)
            for number, (name, files) in enumerate(head.adapters.items(), 1)
        }

    async def replay_all(self, engine: "AsyncLLMEngine", _: Interrupts) -> None:
        # Each task reads its next record after it has finished one, so at most `MAX_OPEN` are in memory.
        async with anyio.create_task_group() as tasks:
            for _number in range(self._max_open):
                tasks.start_soon(self._read_on, engine, name="replay")

    async def _read_on(self, engine: "AsyncLLMEngine") -> None:
        from trouper.frontends.server.durable.recording import RequestRecord

        for place, record in self._records:
            reason = record if isinstance(record, str) else self._obstacle(record)
            if reason is not None:
                self.skipped[reason] = self.skipped.get(reason, 0) + 1
                continue
            assert isinstance(record, RequestRecord)
            await self._replay(engine, place, record)

    def _obstacle(self, record: "RequestRecord") -> str | None:
        """Return why a record cannot be replayed, or None."""
        if record.withheld:
            return f"without {', '.join(record.withheld)}"
        if record.prompt.ids is None and record.prompt.sha256 not in self._prompts:
            return "without the prompt: record with --record-content, or give --prompts FILE"
        return None

    async def _replay(self, engine: "AsyncLLMEngine", place: str, record: "RequestRecord") -> None:
        from trouper.frontends.server.durable.recording import digest

        num_tokens = max(choice.tokens.num for choice in record.outputs)
        try:
            found = await self._generate(engine, record, place, num_tokens)
        except (TrouperError, msgspec.MsgspecError) as error:
            self.differences.append(f"{place} ({record.id}): {error}")
            return
        self.num_replayed += 1
        ids = {each.index: list(each.token_ids) for each in found.outputs}
        for choice in record.outputs:
            mine = ids.get(choice.index, [])[: choice.tokens.num]
            if digest(mine) != choice.tokens.sha256:
                text = await self._explain(engine, place, record, choice, mine)
                self.differences.append(f"{place} ({record.id}): {text}")
                return

    async def _generate(
        self,
        engine: "AsyncLLMEngine",
        record: "RequestRecord",
        name: str,
        num_tokens: int,
        logprobs: int | None = None,
    ) -> "RequestOutput":
        """Compute a request again, up to its recorded length.  Stop strings are not needed for this."""
        from trouper.actors.messages.requests import RequestOptions

        given: dict[str, Any] = {
            **record.params,
            "seed": record.seed,
            "logprobs": logprobs,
            "prompt_logprobs": None,
            # The client may have disconnected before min_tokens.
            "max_tokens": max(num_tokens, record.params.get("min_tokens", 0)),
        }
        params = msgspec.convert(given, SamplingParams, strict=False)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        ids = record.prompt.ids or self._prompts[record.prompt.sha256]
        adapter = None if record.adapter is None else self._adapters[record.adapter]
        options = RequestOptions(lora_request=adapter, reasoning=record.reasoning)
        last: RequestOutput | None = None
        async with engine.engine.generate(
            {"prompt_token_ids": ids}, params, name, options
        ) as found:
            async for each in found:
                last = each
        assert last is not None
        if last.error is not None:
            raise last.error.to_exception()
        return last

    async def _explain(
        self,
        engine: "AsyncLLMEngine",
        place: str,
        record: "RequestRecord",
        choice: "ChoiceRecord",
        mine: list[int],
    ) -> str:
        """Describe the first token that differs, with the logprobs of both candidates."""
        wanted = choice.tokens.ids
        if wanted is None:
            return "the tokens differ; to see where, record with --record-content"
        pairs = zip(mine, wanted, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(wanted)))
        if at >= len(mine):
            return f"the answer ends after {at} tokens instead of {len(wanted)}"
        number = min(NUM_CANDIDATES, engine.config.max_logprobs)
        again = await self._generate(engine, record, f"{place}-again", at + 1, number)
        position = again.outputs[choice.index]
        text = f"token {at} is {mine[at]} instead of {wanted[at]}"
        if list(position.token_ids[:at]) != wanted[:at] or not position.logprobs:
            return f"{text}; another run differs even earlier"
        return text + _gap(position.logprobs[at], mine[at], wanted[at])


def _gap(candidates: "Mapping[int, Logprob]", mine: int, wanted: int) -> str:
    if mine not in candidates or wanted not in candidates:
        return f"; only one of them, or none, is among the {len(candidates)} likeliest"
    a, b = candidates[mine].logprob, candidates[wanted].logprob
    near = ", a near tie" if abs(a - b) <= NEAR_TIE * max(abs(a), abs(b)) else ""
    return f"; logprobs {a:.6f} and {b:.6f}, {abs(a - b):.2g} apart{near}"
