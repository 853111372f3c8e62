"""Queue requests while the engine sleeps, and run them together."""

import time

from trouper import LLM, EngineArgs, RequestOutput, SamplingParams

# The default is the bundled demo model; EngineArgs(model="Qwen/Qwen3-0.6B") loads a model from the hub.
engine_args = EngineArgs()
prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=32)
lora_requests = None

llm = LLM.from_engine_args(engine_args)
llm.sleep(level=0, mode="abort")
start = time.perf_counter()
try:
    # Nothing is scheduled yet.
    llm.enqueue(
        prompts,
        sampling_params,
        lora_request=lora_requests,
        use_tqdm=True,
    )
finally:
    llm.wake_up(tags=["scheduling"])
outputs = llm.wait_for_completion(output_type=RequestOutput, use_tqdm=True)
end = time.perf_counter()
print(f"{len(outputs)} requests in {end - start:.2f} s")
