"""Complete a list of prompts."""

from trouper import LLM, SamplingParams

# The default is the bundled demo model; LLM("Qwen/Qwen3-0.6B") loads a model from the hub.
llm = LLM()

prompts = [
    "Hello, my name is",
    "The capital of France is",
]

sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=50)

outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated: {generated_text!r}")
