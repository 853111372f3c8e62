"""Options and reports shared by the commands of `trouper bench` and the studies."""

import dataclasses
import json
import random
import signal
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output

if TYPE_CHECKING:
    from trouper.actors.rendering.tokenizer import Tokenizer
    from trouper.bench.datasets import SampleRequest

POSITIVE: dict[str, Any] = {"min": 1}


def dataset(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Dataset", **more)


def reporting(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Report", **more)


@dataclasses.dataclass
class DatasetOptions:
    """Options for the requests of a benchmark, with vLLM's names.

    The same options work for offline benchmarks and for a server's clients, so results can be compared.
    """

    dataset_name: Annotated[
        Literal["sharegpt", "random", "prefix_repetition", "edit", "schema"],
        dataset(
            "Source of the requests; sharegpt without --dataset-path means random, edit requests functions with a "
            "changed name, schema requests records in JSON."
        ),
    ] = "sharegpt"
    dataset_path: Annotated[
        str | None, dataset("ShareGPT file with conversations in JSON.", metavar="FILE")
    ] = None
    num_prompts: Annotated[int, dataset("Number of requests to send.", **POSITIVE)] = 1000
    input_len: Annotated[int | None, dataset("Tokens of each random prompt.", **POSITIVE)] = None
    output_len: Annotated[int | None, dataset("Tokens of each output.", **POSITIVE)] = None
    random_input_len: Annotated[
        int | None,
        dataset("Tokens of each random prompt; --input-len or 1024 by default.", **POSITIVE),
    ] = None
    random_output_len: Annotated[
        int | None,
        dataset("Tokens of each random output; --output-len or 128 by default.", **POSITIVE),
    ] = None
    random_range_ratio: Annotated[
        float, dataset("Share by which random lengths vary around the given ones.")
    ] = 0.0
    random_prefix_len: Annotated[
        int, dataset("Tokens of a prefix shared by all random prompts.", min=0)
    ] = 0
    prefix_repetition_prefix_len: Annotated[
        int, dataset("Tokens of each repeated prefix.", min=0)
    ] = 256
    prefix_repetition_suffix_len: Annotated[
        int, dataset("Tokens after each repeated prefix.", **POSITIVE)
    ] = 256
    prefix_repetition_num_prefixes: Annotated[
        int, dataset("Number of different repeated prefixes.", **POSITIVE)
    ] = 10
    prefix_repetition_output_len: Annotated[
        int, dataset("Tokens of each output after a repeated prefix.", **POSITIVE)
    ] = 128
    oversample: Annotated[bool, dataset("Repeat requests if a file has too few.")] = True

    def requests(
        self, tokenizer: "Tokenizer | None", vocabulary: Sequence[int], seed: int, *, texts: bool
    ) -> "list[SampleRequest]":
        """Create the requests, reproducibly from the seed.

        Args:
            tokenizer: required for all datasets of texts, and for `texts`.
            vocabulary: ids for random prompts.
            texts: whether each request needs a text, as chats do.
        """
        requests = self._sampled(tokenizer, vocabulary, random.Random(seed))
        if not texts:
            return requests
        if tokenizer is None:
            raise TrouperValidationError(
                "is required for texts of exact length", parameter="tokenizer"
            )
        return [
            msgspec.structs.replace(
                r, text=r.text or tokenizer.decode(list(r.prompt_token_ids), False)
            )
            for r in requests
        ]

    def _sampled(
        self, tokenizer: "Tokenizer | None", vocabulary: Sequence[int], rng: random.Random
    ) -> "list[SampleRequest]":
        from trouper.bench import datasets

        if self.dataset_name == "prefix_repetition":
            return datasets.prefix_repetition_requests(
                self.num_prompts,
                self.prefix_repetition_prefix_len,
                self.prefix_repetition_suffix_len,
                self.prefix_repetition_num_prefixes,
                self.prefix_repetition_output_len,
                vocabulary,
                rng,
            )
        if self.dataset_name == "sharegpt" and self.dataset_path is not None:
            if tokenizer is None:
                raise TrouperValidationError("is required for ShareGPT", parameter="tokenizer")
            return datasets.sharegpt_requests(
                self.dataset_path,
                self.num_prompts,
                tokenizer.encode,
                rng,
                output_len=self.output_len,
                oversample=self.oversample,
            )
        if self.dataset_name == "edit":
            if tokenizer is None:
                raise TrouperValidationError(
                    "is required for --dataset-name edit", parameter="tokenizer"
                )
            return datasets.edit_requests(
                self.num_prompts,
                tokenizer.encode,
                rng,
                input_len=self.input_len or 400,
                output_len=self.output_len or 128,
            )
        if self.dataset_name == "schema":
            if tokenizer is None:
                raise TrouperValidationError(
                    "is required for --dataset-name schema", parameter="tokenizer"
                )
            return datasets.schema_requests(
                self.num_prompts, tokenizer.encode, rng, output_len=self.output_len or 256
            )
        return datasets.random_requests(
            self.num_prompts,
            self.random_input_len or self.input_len or 1024,
            self.random_output_len or self.output_len or 128,
            vocabulary,
            rng,
            range_ratio=self.random_range_ratio,
            prefix_len=self.random_prefix_len,
        )


@dataclasses.dataclass
class GeometryOptions:
    """Options for the model of a benchmark that depends only on the sizes of weights, not on their values.

    Random weights are as fast as trained ones, so nothing has to be downloaded.
    """

    model: Annotated[
        str,
        typer.Option("--model", "-m", help="Folder, hub id, or a preset with random weights."),
    ] = "qwen3-0.6b"
    load_format: Annotated[
        str, typer.Option(help="auto for a folder; dummy for random weights of a preset.")
    ] = "dummy"
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "bfloat16"

    def args(self) -> EngineArgs:
        """Return arguments for an engine with this model and without a tokenizer.

        Prompts are given as token ids, so no time is spent on tokenizing.
        """
        return EngineArgs(
            model=self.model,
            load_format=self.load_format,
            dtype=self.dtype,
            skip_tokenizer_init=True,
        )


@dataclasses.dataclass
class ReportOptions:
    """Options for the destination and format of the results.

    Every report contains the command, the versions and the machine. Without them a table is printed, made for
    reading.
    """

    output_json: Annotated[str | None, reporting("Write a JSON report.", metavar="FILE")] = None
    as_json: Annotated[bool, reporting("Print the report instead of the table.", "--json")] = False

    def check(self) -> None:
        """Raise TrouperValidationError if the report cannot be written; call it before the measurement.

        A result of an hour of measurement would otherwise be lost at its end.
        """
        from trouper.bench.report import check_writable

        check_writable("output_json", self.output_json)

    def finish(self, ctx: typer.Context, record: dict[str, Any], lines: Iterable[str]) -> None:
        """Print the results, and write them with the command, versions and machine to `--output-json`.

        With `--json` the report itself is printed in place of the lines.
        """
        from trouper.bench import report

        full = {"about": report.about(ctx.obj["arguments"]), **record}
        if self.output_json is not None:
            report.write(self.output_json, full)
        if self.as_json:
            print(json.dumps(full, indent=1))
        else:
            for line in lines:
                print(line)


def tokenizer_of(folder: str | None) -> "tuple[Tokenizer, list[int]]":
    """Return the tokenizer of a folder, and the ids for random prompts (all except added tokens).

    Raises:
        TrouperValidationError: `skip_tokenizer_init` is set, so there is no folder.
    """
    from trouper.actors.rendering.tokenizer import Tokenizer

    if folder is None:
        raise TrouperValidationError(
            "cannot be set, because the benchmark needs a tokenizer",
            parameter="skip_tokenizer_init",
        )
    tokenizer = Tokenizer.load(folder)
    added = tokenizer.added_tokens
    return tokenizer, [i for i in range(tokenizer.vocab_size) if i not in added]


def note(text: str) -> None:
    """Print a line of progress on stderr, if it is a terminal.

    Redirected output thus contains no progress, and stdout contains results only. Each line describes one finished
    part.
    """
    if output.is_terminal(sys.stderr):
        print(text, file=sys.stderr)


@contextmanager
def terminable() -> Generator[None]:
    """Let SIGTERM raise an exception in the block, like Ctrl-C, so that child processes end as well.

    Otherwise a terminated benchmark would leave servers behind.
    """

    def end(number: int, _: object) -> None:
        raise output.Interrupted(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
