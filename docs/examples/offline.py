"""Complete many prompts at once in a plain script."""

from trouper import LLM, SamplingParams

prompts = ["def quicksort(items):", "class Stack:", "import os\n"]

with LLM() as llm:  # the demo model; use LLM("folder or hub id") for another
    for result in llm.generate(prompts, SamplingParams(max_tokens=24), use_tqdm=False):
        print(result.prompt + result.outputs[0].text, end="\n\n")
