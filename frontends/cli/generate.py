"""`trouper generate`: complete prompts from the command line, a file or a pipe."""

import json
import sys
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from trouper.config.args import EngineArgs
from trouper.errors import TrouperValidationError
from trouper.frontends.cli import output
from trouper.frontends.cli.adapters import LoraOption, chosen_adapter
from trouper.frontends.cli.options import SamplingOptions, expand_options
from trouper.frontends.cli.prompts import read_prompts
from trouper.frontends.cli.running import Interrupts, resolve_offline, run_engine
from trouper.lora import LoRARequest
from trouper.outputs import RequestOutput
from trouper.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from tqdm import tqdm

    from trouper.actors.engine.generation import Generation
    from trouper.frontends.python.async_engine import AsyncLLMEngine


@expand_options
def generate(
    ctx: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", show_default=False, help="Text that the model continues."),
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with one prompt per line; - is stdin.")
    ] = None,
    n: Annotated[int, typer.Option(help="Number of completions for each prompt.")] = 1,
    stream: Annotated[
        bool | None,
        typer.Option(help="Print text as it comes; on by default for one completion."),
    ] = None,
    lora: LoraOption = None,
    echo: Annotated[bool, typer.Option(help="Print the prompt before its text.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per prompt.")
    ] = False,
    stats: Annotated[
        bool | None,
        typer.Option(help="Print tokens and times on stderr; on by default at a terminal."),
    ] = None,
    *,
    sampling: SamplingOptions,
    engine_args: EngineArgs,
) -> None:
    """Complete one or more prompts.

    Without PROMPT the whole of stdin is one prompt.
    """
    texts = read_prompts(prompts, prompt_file)
    if stream is None:
        stream = len(texts) == n == 1 and not as_json
    if stream and (n > 1 or as_json):
        raise typer.BadParameter("needs n = 1 and no --json", param_hint="--stream")
    if sampling.seed is not None:
        engine_args.seed = sampling.seed
    adapter = chosen_adapter(lora, engine_args)
    model = resolve_offline(engine_args).model
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    params = sampling.params(model.default_sampling, n=n, output_kind=kind)
    printer = _JsonPrinter() if as_json else _TextPrinter(echo)
    figures = _Figures()
    run_engine(engine_args, partial(_complete, texts, params, adapter, printer, figures))
    if stats or (stats is None and output.is_terminal(sys.stderr)):
        print(figures, file=sys.stderr)


class _TextPrinter:
    """Printer of prompts and texts, with a blank line between two results."""

    def __init__(self, echo: bool) -> None:
        self._echo = echo
        self._is_first = True

    def begin(self, prompt: str) -> None:
        if not self._is_first:
            print()
        self._is_first = False
        print(prompt if self._echo else "", end="", flush=True)

    def show(self, prompt: str, result: RequestOutput) -> None:
        """Print what is new; several completions come one after the other, each with its prompt."""
        for completion in sorted(result.outputs, key=lambda completion: completion.index):
            if completion.index > 0:
                print()
                self.begin(prompt)
            print(completion.text, end="", flush=True)

    def end(self) -> None:
        print()


class _JsonPrinter:
    """Printer of one line of JSON per prompt."""

    def begin(self, prompt: str) -> None:
        pass

    def show(self, prompt: str, result: RequestOutput) -> None:
        print(json.dumps(_as_json(prompt, result), ensure_ascii=False), flush=True)

    def end(self) -> None:
        pass


class _Figures:
    """The tokens and times of a run, for the last line on stderr."""

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


async def _complete(
    prompts: list[str],
    params: SamplingParams,
    adapter: LoRARequest | None,
    printer: _TextPrinter | _JsonPrinter,
    figures: _Figures,
    engine: "AsyncLLMEngine",
    _: Interrupts,
) -> None:
    """Run all prompts at once and show the results in their order.

    Outputs that come out of order wait in their request's reply slot.
    """
    figures.note_ready()
    is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY  # pieces of lines leave no place
    generations = [
        engine.generate(prompt, params, str(i), lora_request=adapter)
        for i, prompt in enumerate(prompts)
    ]
    try:
        for generation in generations:
            await generation.prepare()
            generation.open()
        with output.progress(len(prompts), "prompts", is_wanted=is_whole) as bar:
            pairs = zip(prompts, generations, strict=True)
            for number, (prompt, generation) in enumerate(pairs, 1):
                try:
                    await _show(prompt, generation, printer, figures, bar)
                except TrouperValidationError as error:
                    if len(prompts) > 1:
                        error.message = f"prompt {number}: {error.message}"
                    raise
                bar.update()
    finally:
        for generation in generations:
            generation.close()


async def _show(
    prompt: str,
    generation: "Generation[RequestOutput]",
    printer: _TextPrinter | _JsonPrinter,
    figures: _Figures,
    bar: "tqdm[NoReturn]",
) -> None:
    is_begun = False
    async for result in generation:
        figures.note_output(result)
        with output.printing_beside(bar):
            if not is_begun:
                printer.begin(prompt)
                is_begun = True
            printer.show(prompt, result)
            if result.finished and result.error is None:
                printer.end()
        if result.error is not None:
            raise result.error.to_exception()


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
