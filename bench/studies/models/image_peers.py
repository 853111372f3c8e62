"""Run the peers of the study of images: transformers in this process, and vLLM's CPU build in its own process."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trouper.bench.studies.models.image_model import QUESTION, ROWS, picture, random_model
from trouper.errors import TrouperError


class Library:
    """A model of transformers with random weights and the shape of a folder, and its image processor."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers as t

        self._torch = torch
        self._model = random_model(t.AutoConfig.from_pretrained(folder))
        self._images: Any = t.SmolVLMImageProcessorPil.from_pretrained(folder)

    def generate(self, ids: list[int], seed: int, num_tokens: int) -> None:
        """Process the picture of this seed, and generate exactly this many tokens."""
        arrays = self._images(picture(seed), return_tensors="pt")
        arrays["pixel_values"] = arrays["pixel_values"].bfloat16()
        counts = {"min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
        with self._torch.inference_mode():
            self._model.generate(
                input_ids=self._torch.tensor([ids]), **arrays, **counts, do_sample=False
            )


# Reads orders [seeds, tokens] from its input, one a line, and answers with seconds and the ids of a prompt.
VLLM_PROGRAM = """
import json, os, sys, time
import numpy as np
from PIL import Image
from vllm import LLM, SamplingParams


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (480, 640, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


if __name__ == "__main__":
    answers = os.fdopen(int(sys.argv[3]), "w", buffering=1)
    llm = LLM(model=sys.argv[1], load_format="dummy", dtype="bfloat16", max_model_len=2048, max_num_seqs=16)
    print("ready", file=answers)
    for line in sys.stdin:
        seeds, num_tokens = json.loads(line)
        given = [{"prompt": sys.argv[2], "multi_modal_data": {"image": picture(i)}} for i in seeds]
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        found = llm.generate(given, params, use_tqdm=False)
        print(json.dumps([time.perf_counter() - begin, len(found[0].prompt_token_ids)]), file=answers)
"""


class VllmProcess:
    """A process of vLLM with a model folder and random weights, stopped between requests.

    Args:
        python: the interpreter of an environment with vLLM.
    """

    def __init__(self, python: str, folder: Path) -> None:
        self._program = folder / "vllm_program.py"
        self._program.write_text(VLLM_PROGRAM)
        reading, writing = os.pipe()
        command = [python, str(self._program), str(folder), ROWS + QUESTION, str(writing)]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ,
        }  # fmt: skip
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=environment,
            pass_fds=[writing],
            start_new_session=True,
            text=True,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def __enter__(self) -> Self:
        self._answer()
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._answers.close()

    def generate(self, seeds: Sequence[int], num_tokens: int) -> tuple[float, int]:
        """Answer simultaneous requests with these pictures. Returns the seconds, and the number of tokens of a prompt."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([list(seeds), num_tokens]) + "\n")
        self._process.stdin.flush()
        seconds, num_prompt_tokens = json.loads(self._answer())
        self._signal(signal.SIGSTOP)
        return seconds, num_prompt_tokens

    def _answer(self) -> str:
        line = self._answers.readline()
        if not line:
            raise TrouperError("vLLM exited early; its messages are above")
        return line

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to vLLM and its workers."""
        os.killpg(self._process.pid, number)
