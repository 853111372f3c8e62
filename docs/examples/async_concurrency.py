import asyncio

from trouper import AsyncLLMEngine, EngineArgs, SamplingParams

engine_args = EngineArgs(model="meta-llama/Llama-2-7b-hf")


async def stream(prompt, sampling_params, request_id):
    async with AsyncLLMEngine.from_engine_args(engine_args) as engine:
        async for output in engine.generate(prompt, sampling_params, request_id):
            # 异步流式输出
            yield output


async def main():
    async for output in stream("Hello, my name is", SamplingParams(max_tokens=50), "request-1"):
        print(output.outputs[0].text)


asyncio.run(main())
