"""`trouper complete`: completion of prompts by a server."""

from typing import Annotated

import typer

from trouper.frontends.cli.options import DEFAULT_MAX_TOKENS, SamplingOptions, expand_options
from trouper.frontends.cli.remote import CONNECTING, RemoteOptions, RemoteServer, Show
from trouper.frontends.cli.running import Interrupts, run_open
from trouper.frontends.cli.session import CompletionSubject, Session
from trouper.frontends.cli.stats import ASKED, AnswerEnd, StatsOption
from trouper.frontends.cli.terminal import backend, quick_message, terminal_kept


@expand_options
def complete(
    ctx: typer.Context,
    quick: Annotated[
        str | None,
        typer.Option(
            "--quick",
            "-q",
            metavar="PROMPT",
            help="Complete this one prompt, followed by the text on stdin; - is stdin only.",
        ),
    ] = None,
    stats: StatsOption = False,
    *,
    remote: RemoteOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete each line of stdin at an OpenAI-compatible server.

    For example: trouper complete --url http://127.0.0.1:8000 -q "def f("

    At a terminal /help lists the commands. Ctrl-C stops a text or clears the line, Ctrl-D ends.
    """
    prompt = quick_message(quick)

    async def act(server: RemoteServer, interrupts: Interrupts) -> None:
        async def ask(
            prompt: str, sampling: SamplingOptions, wants_counts: bool, show: Show
        ) -> AnswerEnd:
            asked = ASKED if wants_counts else {}
            fields = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling.given(), **asked}
            return await server.complete(fields, prompt, show)

        completions = CompletionSubject(sampling, shows_stats=stats, ask=ask, facts=server.facts)
        if prompt is not None:
            await completions.answer(prompt, interrupts)
        else:
            await Session(completions, interrupts).answer_all("complete")

    with terminal_kept():
        run_open(RemoteServer(remote), act, CONNECTING, backend=backend(quick))
