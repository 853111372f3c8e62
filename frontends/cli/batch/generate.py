"""`trouper generate`: complete prompts from the command line, a file or a pipe.

One prompt streams as text, like in a conversation; many prompts become records in the order of the prompts. All run
through one engine, so they are batched.
"""

import sys
from contextlib import ExitStack
from functools import partial
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from msgspec.structs import asdict

from trouper.config.args import EngineArgs
from trouper.frontends.cli import output
from trouper.frontends.cli.batch.prompt_run import BulkRun, Outcomes
from trouper.frontends.cli.batch.prompts import Prompt, PromptFileOptions, PromptSource
from trouper.frontends.cli.batch.results import (
    Columns,
    OutputFileOption,
    ResultWriter,
    check_output,
    results_file,
)
from trouper.frontends.cli.options import SamplingOptions, expand_options
from trouper.frontends.cli.other_programs import check_generates, check_texts
from trouper.frontends.cli.running import (
    Interrupts,
    resolve_offline,
    run_engine,
    size_for_one_prompt,
)
from trouper.frontends.cli.values import (
    AudioOption,
    ImageOption,
    LoraOption,
    chosen_adapter,
    media_files,
)
from trouper.lora import LoRARequest
from trouper.outputs import RequestOutput
from trouper.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from tqdm import tqdm

    from trouper.actors.engine.generation import Generation
    from trouper.frontends.python.async_engine import AsyncLLMEngine

COLUMNS: Columns = {
    "line": "int", "prompt": "text", "outputs": "outputs", "num_prompt_tokens": "int", "num_cached_tokens": "int",
    "num_tokens": "int", "first_token_s": "float", "total_s": "float", "error": "text",
}  # fmt: skip


@expand_options
def generate(
    ctx: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT", show_default=False, help="Text for the model to continue."
        ),
    ] = None,
    n: Annotated[int, typer.Option(help="Number of completions for each prompt.")] = 1,
    stream: Annotated[
        bool | None,
        typer.Option(help="Print text as it is generated; on by default for one completion."),
    ] = None,
    image: ImageOption = None,
    audio: AudioOption = None,
    lora: LoraOption = None,
    echo: Annotated[bool, typer.Option(help="Print the prompt before its completion.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON for each prompt.")
    ] = False,
    stats: Annotated[
        bool | None,
        typer.Option(help="Print tokens and times on stderr; on by default at a terminal."),
    ] = None,
    output_file: OutputFileOption = None,
    *,
    source: PromptFileOptions,
    sampling: SamplingOptions,
    engine_args: EngineArgs,
) -> None:
    """Complete one or more prompts.

    Without PROMPT, all of stdin is one prompt. A failed prompt is reported, and the others continue. With --image or
    --audio, each prompt must have the model's placeholder, such as <image>, once for each file; `chat` needs none.
    """
    check_texts(prompts, engine_args.model, "generate", "PROMPT")
    check_output(output_file, COLUMNS, source.prompt_file)
    media = {"image": media_files(image), "audio": media_files(audio, "--audio")}
    media = {modality: list(files) for modality, files in media.items() if files}
    if sampling.seed is not None:
        engine_args.seed = sampling.seed
    with PromptSource(prompts, source, "PROMPT") as given:
        is_single, are_records = given.is_single, as_json or output_file is not None
        if stream is None:
            stream = is_single and n == 1 and not are_records
        if stream and (n > 1 or are_records):
            rule = "requires n = 1, and cannot be combined with --json or --output-file"
            raise typer.BadParameter(rule, param_hint="--stream")
        if is_single:
            size_for_one_prompt(engine_args, n)
        adapter = chosen_adapter(lora, engine_args)
        config = resolve_offline(engine_args)
        check_generates(config)
        model = config.model
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = sampling.params(model.default_sampling, n=n, output_kind=kind)
        output.tell_sampling(model, asdict(params))
        outcomes, figures = Outcomes("prompts", is_single=is_single), _Figures()
        with ExitStack() as stack:
            if are_records:
                file = stack.enter_context(results_file(output_file, COLUMNS))
                printer = _RecordPrinter(file)
            else:
                printer = _TextPrinter(echo, params)
            completing = _Completing(given, params, media, adapter, printer, outcomes, figures)
            run_engine(config, completing.run_all)
    if stats or (stats is None and (given.is_from_file or output.is_terminal(sys.stderr))):
        print(figures, file=sys.stderr)
    outcomes.check()


class _Completing:
    """Completes all prompts and prints their results in the order of the prompts."""

    def __init__(
        self,
        prompts: PromptSource,
        params: SamplingParams,
        media: dict[str, list[bytes]],
        adapter: LoRARequest | None,
        printer: "_TextPrinter | _RecordPrinter",
        outcomes: Outcomes,
        figures: "_Figures",
    ) -> None:
        self._prompts = prompts
        self._params = params
        self._media = media
        self._adapter = adapter
        self._printer = printer
        self._outcomes = outcomes
        self._figures = figures
        self._numbers = count()

    async def run_all(self, engine: "AsyncLLMEngine", _: Interrupts) -> None:
        self._figures.note_ready()
        # A bar would mix with streamed text on the same line.
        is_wanted = self._params.output_kind is RequestOutputKind.FINAL_ONLY
        total = self._prompts.count() if output.is_terminal(sys.stderr) else None
        with output.progress(total, "prompts", is_wanted=is_wanted) as bar:
            open_one = partial(self._open_one, engine)
            finish = partial(self._finish, bar)
            run = BulkRun(self._prompts, open_one, finish, self._note_failure)
            await run.answer_all(engine, bar)

    def _open_one(self, engine: "AsyncLLMEngine", asked: Prompt) -> "Generation[RequestOutput]":
        number = str(next(self._numbers))
        prompt: Any = asked.text
        if self._media:
            prompt = {"prompt": asked.text, "multi_modal_data": self._media}
        return engine.generate(prompt, self._params, number, lora_request=self._adapter)

    async def _finish(
        self, bar: "tqdm[NoReturn]", prompt: Prompt, generation: "Generation[RequestOutput]"
    ) -> None:
        num_tokens = 0
        async for result in generation:
            self._figures.note_output(result)
            num_tokens += sum(len(completion.token_ids) for completion in result.outputs)
            with output.printing_beside(bar):
                self._printer.show(prompt, result)
            if result.error is not None:
                raise result.error.to_exception()
            if result.finished:
                self._outcomes.succeed(len(result.prompt_token_ids), num_tokens)

    def _note_failure(self, prompt: Prompt, error: Exception) -> None:
        message = self._outcomes.fail(prompt, error)
        self._printer.show_error(prompt, message)


class _TextPrinter:
    """Prints prompts and completions as text, with a blank line between two results."""

    def __init__(self, echo: bool, params: SamplingParams) -> None:
        self._echo = echo
        self._params = params
        self._begun: Prompt | None = None

    def show(self, prompt: Prompt, result: RequestOutput) -> None:
        """Print new text; several completions of a prompt follow each other, each after the prompt.

        With one prompt the text appears as the model generates it; the prompt itself is printed first, if wanted.
        """
        for completion in sorted(result.outputs, key=lambda completion: completion.index):
            if self._begun is not prompt or completion.index > 0:
                if self._begun is prompt:
                    print()
                self._begin(prompt)
            print(completion.text, end="", flush=True)
        if result.finished and result.error is None:
            print(flush=True)
            # Text usually ends at max_tokens, but an incomplete JSON object is useless, so explain it.
            is_cut = any(completion.finish_reason == "length" for completion in result.outputs)
            if is_cut and self._params.structured_outputs is not None:
                output.note(
                    f"[cut at {self._params.max_tokens} tokens, before the end of the structure; see --max-tokens]"
                )

    def show_error(self, prompt: Prompt, message: str) -> None:
        """End the line of an interrupted text; the error itself is printed on stderr."""
        if self._begun is prompt:
            print()

    def _begin(self, prompt: Prompt) -> None:
        if self._begun is not None:
            print()
        self._begun = prompt
        print(prompt.text if self._echo else "", end="", flush=True)


class _RecordPrinter:
    """Writes one record for each prompt."""

    def __init__(self, file: ResultWriter) -> None:
        self._file = file

    def show(self, prompt: Prompt, result: RequestOutput) -> None:
        if result.error is None:
            self._file.write({**prompt.place(), **_as_json(prompt.text or "", result)})

    def show_error(self, prompt: Prompt, message: str) -> None:
        self._file.write({**prompt.place(), "prompt": prompt.text, "error": message})


class _Figures:
    """Counts the tokens and times of a run, for the last line on stderr."""

    def __init__(self) -> None:
        self._started = perf_counter()
        self._ready = self._first_text = self._ended = self._started
        self._num_prompt_tokens = self._num_tokens = 0

    def note_ready(self) -> None:
        self._ready = perf_counter()

    def note_output(self, result: RequestOutput) -> None:
        self._ended = perf_counter()
        if self._num_tokens == 0:
            self._first_text = self._ended
        self._num_tokens += sum(len(completion.token_ids) for completion in result.outputs)
        if result.finished:
            self._num_prompt_tokens += len(result.prompt_token_ids)

    def __str__(self) -> str:
        seconds = max(self._ended - self._ready, 1e-9)
        return (
            f"{self._num_tokens} tokens from {self._num_prompt_tokens} in {seconds:.2f} s "
            f"({self._num_tokens / seconds:.0f} tok/s); first text after "
            f"{1000 * (self._first_text - self._ready):.0f} ms; "
            f"engine ready after {self._ready - self._started:.1f} s"
        )


def _as_json(prompt: str, result: RequestOutput) -> dict[str, Any]:
    completions = sorted(result.outputs, key=lambda completion: completion.index)
    metrics = result.metrics
    return {
        "prompt": prompt,
        "outputs": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in completions
        ],
        "num_prompt_tokens": len(result.prompt_token_ids),
        "num_cached_tokens": result.num_cached_tokens,
        "num_tokens": sum(len(completion.token_ids) for completion in completions),
        "first_token_s": metrics and metrics.time_to_first_token_s,
        "total_s": metrics and metrics.e2e_s,
    }
