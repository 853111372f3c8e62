"""Let an urgent request start before those that wait."""

from trouper import EngineArgs, LLMEngine, SamplingParams

# The default is the bundled demo model; EngineArgs(model="Qwen/Qwen3-0.6B") loads a model from the hub.
engine_args = EngineArgs()
engine = LLMEngine.from_engine_args(engine_args)

sampling_params = SamplingParams(max_tokens=100)

for i in range(5):
    engine.add_request(
        request_id=f"low-priority-{i}",
        prompt=f"Low priority task {i}",
        params=sampling_params,
        priority=0,  # the default
    )

# A larger number goes first.
engine.add_request(
    request_id="high-priority-urgent",
    prompt="URGENT: High priority task",
    params=sampling_params,
    priority=10,
)

while engine.has_unfinished_requests():
    outputs = engine.step()

    for output in outputs:
        if output.finished:
            print(f"finished: {output.request_id}")
