"""An engine whose generations say what a test wrote down, so that every byte of a reply is known."""

from trouper.outputs import CompletionOutput, Logprob, RequestOutput


class ScriptedEngine:
    """A running `AsyncLLMEngine`, and its `engine`, that renders, counts and describes itself, but answers from `script`.

    `script` makes the outputs of the prompt with this number, from its sampling parameters; an exception
    among them is raised in its place.  `asked` holds the prompts, parameters and options of `generate`.
    """

    def __init__(self, engine, script):
        self.engine = self
        self._engine = engine.engine
        self._script = script
        self.asked = []
        self.expected = None  # first tokens

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, prompt, params, request_id, options=None):
        self.asked.append((prompt, params, options))
        outputs = self._script(len(self.asked) - 1, params)
        return ScriptedGeneration(request_id, outputs, self.expected)


class ScriptedGeneration:
    """What the server uses of a `Generation`."""

    is_over = True
    num_tokens = (3, 4)

    def __init__(self, request_id, outputs, expected=None):
        self._expected = expected
        self.request_id = request_id
        self._outputs = list(outputs)

    async def prepare(self):
        pass

    def open(self):
        pass

    def close(self):
        self._outputs.clear()

    async def submit(self):
        if self._outputs and isinstance(self._outputs[0], Exception):
            raise self._outputs[0]

    async def expected(self):
        return self._expected

    def next_nowait(self):
        return None

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._outputs:
            raise StopAsyncIteration
        output = self._outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output


def logprobs(*token_ids):
    """One position for each: the token itself, and a rival that is likelier."""
    return [
        {
            id: Logprob(-1.5 - id / 100, 2, f"t{id}"),
            id + 1: Logprob(-0.25, 1, f"ü{id}"),
            id + 2: Logprob(float("-inf"), 3, None),
        }
        for id in token_ids
    ]


def output(*completions, number=0, is_last=False, **fields):
    fields = {"prompt": f"prompt {number} ", "prompt_token_ids": [40, 41 + number], **fields}
    fields.setdefault("prompt_logprobs", None)
    return RequestOutput("r", outputs=list(completions), finished=is_last, **fields)


def completion(
    text, *token_ids, index=0, with_logprobs=False, finish_reason=None, stop_reason=None
):
    return CompletionOutput(
        index,
        text,
        list(token_ids),
        logprobs=logprobs(*token_ids) if with_logprobs else None,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
    )
