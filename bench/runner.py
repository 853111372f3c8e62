"""Run one engine in its own process: read workloads from stdin and write figures to stdout, as lines of JSON.

    python runner.py trouper|vllm|llama.cpp|transformers|transformers-cb    then, on stdin:
    {"model": …, "dtype": …, "max_model_len": …, "max_num_seqs": …, "threads": …, "load_format": …, "adapters": [folder, …], "rank": …,
     "speculation": …, "model_impl": …}
                                                                           -> {"version": …}
    {"prompts": [[1, 2, …], …], "output_len": …}     any number of times  -> {"seconds": …, "num_output_tokens": …}

The script uses only the standard library, because peers run it by its path in environments without trouper. All
engines decode greedily, ignore the end token, and cache no prefixes. For transformers-cb (continuous batching)
`output_len` may be a list with one length for each prompt. Prompts of vLLM and trouper use the adapters alternately.
`speculation` is their `speculative_config`, or the arguments of llama.cpp's prompt lookup, which then runs one prompt
at a time.
"""

import json
import os
import sys
from importlib import import_module
from time import perf_counter
from typing import Any

# vLLM would otherwise use 92 % of the memory.
KV_CACHE_GIB = 4
# Block size of transformers' continuous batching.
CB_PAGE_TOKENS = 256
# llama.cpp's defaults.
LLAMA_BATCH, LLAMA_MICRO_BATCH = 2048, 512


class Offline:
    """The class `LLM` of vLLM or of trouper, depending on the imported module.  Both have the same interface."""

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
            load_format=options["load_format"],
            speculative_config=options.get("speculation"),
            # vLLM also has this option, but only trouper's implementations are compared.
            **({"model_impl": options["model_impl"]} if options.get("model_impl") else {}),
            **self._with_adapters(api, options),
        )

    def _with_adapters(self, api: str, options: dict[str, Any]) -> dict[str, Any]:
        """Create the adapters, and return the engine's options for them."""
        folders = options.get("adapters") or []
        self._adapters: list[Any] = []
        if not folders:
            return {}
        kind = import_module("vllm.lora.request" if api == "vllm" else api).LoRARequest
        self._adapters = [kind(f"adapter-{i}", i, path) for i, path in enumerate(folders, 1)]
        rooms = {"max_loras": len(folders), "max_lora_rank": options["rank"]}
        return {"enable_lora": True, **rooms}

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        params = self._params(temperature=0, max_tokens=output_len, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        chosen = [
            self._adapters[i % len(self._adapters)]
            for i in range(len(asked) if self._adapters else 0)
        ]
        outputs = self._llm.generate(asked, params, use_tqdm=False, lora_request=chosen or None)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class Transformers:
    """`generate` of transformers, with left padding for shorter prompts.

    It processes one batch at a time, as most scripts with transformers do. Padded positions are computed, too.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._torch = import_module("torch")
        self.version, self._model = _transformers_model(options)

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        torch, longest = self._torch, max(map(len, prompts))
        device = self._model.device
        padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            found = self._model.generate(
                padded.to(device),
                attention_mask=mask.to(device),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
        return found[:, longest:].numel()


class ContinuousBatching:
    """Continuous batching of transformers; its manager runs from the first request until the end."""

    def __init__(self, options: dict[str, Any]) -> None:
        module = import_module("transformers")
        self.version, model = _transformers_model(options)
        config = module.ContinuousBatchingConfig(allow_block_sharing=False)
        # By default it uses nearly all memory.
        if model.device.type == "cpu":
            num_tokens = options["max_num_seqs"] * options["max_model_len"]
            config.num_blocks = -(-num_tokens // CB_PAGE_TOKENS) + options["max_num_seqs"]
        self._manager = model.init_continuous_batching(
            generation_config=module.GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=config,
        )
        self._manager.start()

    def generate(self, prompts: list[list[int]], output_len: int | list[int]) -> int:
        lengths = output_len if isinstance(output_len, list) else [output_len] * len(prompts)
        for prompt, length in zip(prompts, lengths, strict=True):
            self._manager.add_request(prompt, max_new_tokens=length)
        num_open, num_made = len(prompts), 0
        while num_open:
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the generation loop of transformers has ended")
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                num_open -= 1
                num_made += len(result.generated_tokens)
        return num_made

    def close(self) -> None:
        self._manager.stop(block=True)


def _transformers_model(options: dict[str, Any]) -> tuple[str, Any]:
    """Load the model, on the GPU if there is one, and return it with the library's version."""
    torch, module = import_module("torch"), import_module("transformers")
    dtype = getattr(torch, options["dtype"])
    loader = module.AutoModelForCausalLM
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        if options["load_format"] == "dummy":
            config = module.AutoConfig.from_pretrained(options["model"])
            model = loader.from_config(config, dtype=dtype)
        else:
            model = loader.from_pretrained(options["model"], dtype=dtype, use_safetensors=True)
    return module.__version__, model.to(device).eval()


class LlamaCpp:
    """llama.cpp through the C interface of llama-cpp-python, with a unified KV cache for each workload.

    Several sequences are decoded together, as its server does. No server is involved.
    """

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
        self._drafts: Any = None
        if options.get("speculation"):
            kind = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
            self._drafts = kind(**options["speculation"])

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
            if self._drafts is not None:
                (prompt,) = prompts
                return self._look_up(context, prompt, output_len)
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
            newest |= dict(self._decode(context, rows[first : first + LLAMA_BATCH]))
        for step in range(output_len - 1):
            rows = [(newest[s], len(p) + step, s, True) for s, p in enumerate(prompts)]
            newest = dict(self._decode(context, rows))
        return len(newest) * output_len

    def _look_up(self, context: Any, prompt: list[int], output_len: int) -> int:
        """Decode with llama.cpp's prompt lookup: verify the drafts in each step, and remove wrong ones from the cache."""
        text, end = list(prompt), len(prompt) + output_len
        rows = [(token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt)]
        found: list[tuple[int, int]] = []
        for first in range(0, len(rows), LLAMA_BATCH):
            found += self._decode(context, rows[first : first + LLAMA_BATCH])
        text.append(found[0][1])
        memory = self._api.llama_get_memory(context)
        while len(text) < end:
            ids = self._numpy.array(text, dtype=self._numpy.intc)
            draft = self._drafts(ids)[: end - len(text) - 1].tolist()
            start = len(text) - 1
            given = enumerate([text[-1], *draft], start)
            drawn = [
                token for _, token in self._decode(context, [(t, i, 0, True) for i, t in given])
            ]
            num_right = 0
            while num_right < len(draft) and draft[num_right] == drawn[num_right]:
                num_right += 1
            text += drawn[: num_right + 1]
            self._api.llama_memory_seq_rm(memory, 0, len(text) - 1, -1)
        return len(text) - len(prompt)

    def _decode(
        self, context: Any, rows: list[tuple[int, int, int, bool]]
    ) -> list[tuple[int, int]]:
        """Return the sequence and the most probable next token of each row with logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        newest: list[tuple[int, int]] = []
        for i, (_, _, sequence, wants) in enumerate(rows):
            if wants:
                logits = self._api.llama_get_logits_ith(context, i)
                logits_V = self._numpy.ctypeslib.as_array(logits, shape=(self._num_logits,))
                newest.append((sequence, int(logits_V.argmax())))
        return newest


ENGINES = {
    "trouper": lambda options: Offline(options, "trouper"),
    "vllm": lambda options: Offline(options, "vllm"),
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
    "transformers-cb": ContinuousBatching,
}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Text that the engine prints must not mix with the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    lines = iter(sys.stdin.readline, "")
    engine: Any = ENGINES[sys.argv[1]](json.loads(next(lines)))
    answer(version=engine.version)
    try:
        for line in lines:
            work = json.loads(line)
            started = perf_counter()
            num_made = engine.generate(work["prompts"], work["output_len"])
            answer(seconds=perf_counter() - started, num_output_tokens=num_made)
    finally:
        if isinstance(engine, ContinuousBatching):
            engine.close()


if __name__ == "__main__":
    main()
