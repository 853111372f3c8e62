"""A GGUF file on a GPU: its integers are dequantised, so its tokens are those of the CPU in float32."""

import gguf
import pytest

from trouper import SamplingParams

from .conftest import HAS_GPU
from .engines import PROMPTS, open_llm, run, tokens
from .test_architectures import tiny_model
from .test_gguf import converted

pytest.importorskip("triton", reason="no Triton")
pytestmark = [pytest.mark.usefixtures("machines"), pytest.mark.timeout(300)]  # interpreted


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("Q4_1", marks=pytest.mark.slow)])
def test_file_of_integers_gives_tokens_of_cpu(tmp_path, kind, machines):
    model = tiny_model("Llama", {"num_hidden_layers": 4}, tmp_path)
    path = converted(model, tmp_path / "m.gguf", "llama", kind=gguf.GGMLQuantizationType[kind])
    params = SamplingParams(temperature=0, max_tokens=3)
    found = []
    for device in ("cpu", "cuda"):
        with open_llm(str(path), device) as llm:
            found.append(tokens(run(llm, params, PROMPTS[:1])))
    assert found[0] == found[1]
    assert all(machine.num_launched > 0 for machine in machines)
    assert HAS_GPU or len(machines) == 1
