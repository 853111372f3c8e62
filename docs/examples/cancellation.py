"""Abort some of the requests that an engine runs."""

from trouper import EngineArgs, LLMEngine, SamplingParams

# The default is the bundled demo model; EngineArgs(model="Qwen/Qwen3-0.6B") loads a model from the hub.
engine_args = EngineArgs()
engine = LLMEngine.from_engine_args(engine_args)

sampling_params = SamplingParams(max_tokens=500)
for i in range(10):
    engine.add_request(
        request_id=f"request-{i}",
        prompt=f"Write a long article about topic {i}:",
        params=sampling_params,
    )

# Let the engine run a few steps, then abort three requests.
for _ in range(5):
    engine.step()

engine.abort_request(["request-3", "request-4", "request-5"])
print("aborted 3 requests")

# The others go on.
while engine.has_unfinished_requests():
    engine.step()
