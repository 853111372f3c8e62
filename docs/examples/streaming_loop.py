"""Step an engine by hand, and print the text as it comes."""

from trouper import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

# The default is the bundled demo model; EngineArgs(model="Qwen/Qwen3-0.6B") loads a model from the hub.
engine_args = EngineArgs()
engine = LLMEngine.from_engine_args(engine_args)

engine.add_request(
    request_id="request-1",
    prompt="Write a short story about AI:",
    params=SamplingParams(temperature=0.0, max_tokens=100, output_kind=RequestOutputKind.DELTA),
)

while engine.has_unfinished_requests():
    for output in engine.step():
        print(output.outputs[0].text, end="", flush=True)
        if output.finished:
            print(f"\n[finished] {output.request_id}")
