"""Stream the answers to several prompts at once, in one asyncio program."""

import asyncio

from trouper import AsyncLLMEngine, EngineArgs, SamplingParams

# The default is the bundled demo model; EngineArgs(model="Qwen/Qwen3-0.6B") loads a model from the hub.
engine_args = EngineArgs()
prompts = ["Hello, my name is", "The capital of France is"]


async def complete(engine, number, prompt):
    text = ""
    async for output in engine.generate(prompt, SamplingParams(max_tokens=50), f"request-{number}"):
        text = output.outputs[0].text
    print(f"{prompt}{text}\n")


async def main():
    async with AsyncLLMEngine.from_engine_args(engine_args) as engine:
        await asyncio.gather(*(complete(engine, i, prompt) for i, prompt in enumerate(prompts)))


asyncio.run(main())
