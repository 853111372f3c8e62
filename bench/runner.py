"""One engine in a process of its own: workloads on stdin, figures on stdout, both in lines of JSON.

    python runner.py trouper|vllm|llama.cpp|transformers    then, on stdin:
    {"model": …, "dtype": …, "max_model_len": …, "max_num_seqs": …, "threads": …}     -> {"version": …}
    {"prompts": [[1, 2, …], …], "output_len": …}     any number of times  -> {"seconds": …, "num_output_tokens": …}

Stands alone, on the standard library: peers run it by its path, in environments without trouper.
Everybody decodes greedily, past the end token, and caches no prefix.
"""

import json
import os
import sys
from importlib import import_module
from time import perf_counter
from typing import Any

KV_CACHE_GIB = 4  # vLLM would take 92 % of the memory
LLAMA_BATCH, LLAMA_MICRO_BATCH = 2048, 512  # llama.cpp's defaults


class Offline:
    """`LLM` of vLLM, and of trouper, which has the same names."""

    def __init__(self, options: dict[str, Any], api: str) -> None:
        os.environ.setdefault(f"{api.upper()}_CPU_KVCACHE_SPACE", str(KV_CACHE_GIB))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        module = import_module(api)
        self.version, self._params = module.__version__, module.SamplingParams
        self._llm = module.LLM(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            enable_prefix_caching=False,
            quantization=options.get("quantization"),
        )

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        params = self._params(temperature=0, max_tokens=output_len, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class Transformers:
    """`generate` of transformers; shorter prompts are padded on the left."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._torch = import_module("torch")
        module = import_module("transformers")
        self.version = module.__version__
        self._model = module.AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=getattr(self._torch, options["dtype"]), use_safetensors=True
        ).eval()

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        torch, longest = self._torch, max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            found = self._model.generate(
                padded,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
        return found[:, longest:].numel()


class LlamaCpp:
    """llama.cpp through the C interface of llama-cpp-python; one unified KV cache a workload."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._api, self._numpy = import_module("llama_cpp"), import_module("numpy")
        self.version, self._threads = self._api.__version__, options["threads"]
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(
            options["model"].encode(), self._api.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the file")
        vocabulary = self._api.llama_model_get_vocab(self._model)
        self._num_logits = self._api.llama_vocab_n_tokens(vocabulary)
        self._batch = self._api.llama_batch_init(LLAMA_BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        params = self._api.llama_context_default_params()
        params.n_ctx = sum(map(len, prompts)) + len(prompts) * (output_len + 32)
        params.n_batch, params.n_ubatch = LLAMA_BATCH, LLAMA_MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.n_seq_max, params.kv_unified = len(prompts), True
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        try:
            return self._generate(context, prompts, output_len)
        finally:
            self._api.llama_free(context)

    def _generate(self, context: Any, prompts: list[list[int]], output_len: int) -> int:
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        newest: dict[int, int] = {}
        for first in range(0, len(rows), LLAMA_BATCH):
            newest |= self._decode(context, rows[first : first + LLAMA_BATCH])
        for step in range(output_len - 1):
            rows = [(newest[s], len(p) + step, s, True) for s, p in enumerate(prompts)]
            newest = self._decode(context, rows)
        return len(newest) * output_len

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """The likeliest next token of each sequence whose row wants it."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        newest = {}
        for i, (_, _, sequence, wants) in enumerate(rows):
            if wants:
                logits = self._api.llama_get_logits_ith(context, i)
                newest[sequence] = int(
                    self._numpy.ctypeslib.as_array(logits, shape=(self._num_logits,)).argmax()
                )
        return newest


ENGINES = {
    "trouper": lambda options: Offline(options, "trouper"),
    "vllm": lambda options: Offline(options, "vllm"),
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the engine prints is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    lines = iter(sys.stdin.readline, "")
    engine: Any = ENGINES[sys.argv[1]](json.loads(next(lines)))
    answer(version=engine.version)
    for line in lines:
        work = json.loads(line)
        started = perf_counter()
        num_made = engine.generate(work["prompts"], work["output_len"])
        answer(seconds=perf_counter() - started, num_output_tokens=num_made)


if __name__ == "__main__":
    main()
