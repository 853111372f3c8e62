"""Ask a model about an image."""

import sys

from PIL import Image

from trouper import LLM, SamplingParams

image = Image.new("RGB", (64, 48), "red")
question = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": image},
            {"type": "text", "text": "Which colour is this?"},
        ],
    }
]

with LLM(sys.argv[1]) as llm:  # such as HuggingFaceTB/SmolVLM-256M-Instruct
    (result,) = llm.chat(question, SamplingParams(max_tokens=16), use_tqdm=False)
    print(f"{len(result.prompt_token_ids)} tokens with the image:", result.outputs[0].text)
