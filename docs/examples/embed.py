"""Run an engine inside your own asyncio or trio program."""

import anyio

from trouper import AsyncLLMEngine, EngineArgs, RequestOutputKind, SamplingParams


async def main() -> None:
    params = SamplingParams(max_tokens=24, output_kind=RequestOutputKind.DELTA)
    async with (
        AsyncLLMEngine.from_engine_args(EngineArgs()) as engine,
        engine.generate("def quicksort(items):", params) as stream,
    ):
        async for output in stream:  # leaving the block at any point aborts the request
            print(output.outputs[0].text, end="", flush=True)


if __name__ == "__main__":
    anyio.run(main, backend="trio")  # or asyncio.run(main())
