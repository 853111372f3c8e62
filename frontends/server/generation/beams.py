"""Run a beam search for one request.

In each round, every beam of every prompt is a request to the engine for one token.  The prefix cache keeps the beams' common
prefixes, so a round costs about one step.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from trouper.frontends.python.beam_search import BeamSearch, BeamSearchOutput, SearchLimits
from trouper.frontends.server.generation.adapter import ParsedRequest
from trouper.frontends.server.generation.streams import final_outputs
from trouper.frontends.server.http.context import RequestContext
from trouper.frontends.server.service.service import Service
from trouper.outputs import CompletionOutput, RequestOutput
from trouper.params import SamplingParams

if TYPE_CHECKING:
    from trouper.actors.engine.generation import Generation

# Takes a prompt, its parameters, its name within the request, and whether the prompt is the client's own, to which
# the options of tokenization apply.
Make = Callable[[Any, SamplingParams, str, bool], "Generation[RequestOutput]"]


class SearchWork:
    """All searches of one request as one unit of work, for which the admission ticket is held.

    The engine sees a new request in every round, but a place of the gate must be held for the whole search.
    """

    def __init__(self, searches: Sequence[BeamSearch]) -> None:
        self._searches = searches

    @property
    def is_over(self) -> bool:
        return all(search.is_over for search in self._searches)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of the prompts, each counted once because the prefix cache keeps it, and tokens of all rounds."""
        counts = [search.num_tokens for search in self._searches]
        return sum(prompt for prompt, _ in counts), sum(output for _, output in counts)


async def beam_outputs(
    service: Service, context: RequestContext, parsed: ParsedRequest, make: Make
) -> list[RequestOutput]:
    """Return one output for each prompt; its completions are the best beams.

    Every exit aborts the running round.

    Raises:
        Exception: the first failure of a request in a round.
    """
    assert parsed.beams is not None
    params, num_logprobs = parsed.beams
    limits = SearchLimits.of(service.config, service.engine.tokenizer)
    searches = [
        BeamSearch(prompt, params, limits, num_logprobs=num_logprobs) for prompt in parsed.prompts
    ]
    work = SearchWork(searches)
    number = 0
    while not work.is_over:
        running = [i for i, search in enumerate(searches) if not search.is_over]
        asked = [(i, prompt) for i in running for prompt in searches[i].prompts]
        generations = (
            make(prompt, searches[i].step, f"{number}-{j}", number == 0)
            for j, (i, prompt) in enumerate(asked)
        )
        places = [parsed.places[i] for i, _ in asked]
        outputs = iter(await final_outputs(service, context, generations, places, work))
        for i in running:
            search = searches[i]
            search.take([next(outputs) for _ in search.prompts])
        number += 1
    decode = _decoder(service)
    found = await anyio.to_thread.run_sync(
        lambda: [search.best(decode) for search in searches], limiter=service.threads
    )
    return [_output(context, *each) for each in zip(searches, found, strict=True)]


def _decoder(service: Service) -> Callable[[list[int], bool], str]:
    tokenizer = service.engine.tokenizer
    return tokenizer.decode if tokenizer is not None else lambda _ids, _skips: ""


def _output(context: RequestContext, search: BeamSearch, found: BeamSearchOutput) -> RequestOutput:
    """Convert the best beams of a prompt to completions."""
    num_prompt = len(search.prompt_token_ids)
    completions = [
        CompletionOutput(
            index,
            beam.text or "",
            beam.tokens[num_prompt:],
            cumulative_logprob=beam.cum_logprob,
            logprobs=beam.logprobs,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )
        for index, beam in enumerate(found.sequences)
    ]
    return RequestOutput(
        context.id,
        search.prompt_text,
        search.prompt_token_ids,
        None,
        completions,
        finished=True,
    )
