"""The marks of a model's reasoning and a request's budget for it -> `Thinking`.  Pure."""

from trouper.actors.messages.thinking import Thinking
from trouper.actors.rendering.tokenizer import Tokenizer
from trouper.config.output_rules import Marks
from trouper.errors import invalid
from trouper.params import SamplingParams

TAIL_TOKENS = 32  # of a prompt of ids: they hold the mark that it may end with


def thinking_of(
    marks: Marks | None,
    params: SamplingParams,
    prompt: str | None,
    prompt_token_ids: list[int],
    tokenizer: Tokenizer | None,
) -> Thinking | None:
    """Return the reasoning that an output may begin with; None: nothing depends on it.

    Raises:
        TrouperValidationError: there is a budget, and the marks of the reasoning are not known.
    """
    budget = params.thinking_token_budget
    if budget is None and params.structured_outputs is None:
        return None
    if marks is None or tokenizer is None:
        if budget is not None:
            rule = "needs a model whose reasoning is marked (reasoning_config)"
            raise invalid("thinking_token_budget", rule, budget)
        return None
    start, end = (mark.strip() for mark in marks)
    if prompt is None:
        prompt = tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    if prompt.rstrip().endswith(end):  # the template has closed it already
        return None
    start_ids, end_ids = (tuple(tokenizer.encode(mark, False)) for mark in (start, end))
    return Thinking(
        start=start,
        end=end,
        start_ids=start_ids,
        end_ids=end_ids,
        begins_inside=prompt.rstrip().endswith(start),
        budget=budget,
    )
