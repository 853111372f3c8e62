"""Compare a text and an image with the embeddings of a model that sees."""

import sys

from PIL import Image

from trouper import LLM

image = {"type": "image", "image": Image.new("RGB", (64, 48), "red")}

with LLM(sys.argv[1], runner="pooling") as llm:
    content = [image, {"type": "text", "text": "the colour"}]
    (result,) = llm.embed({"messages": [{"role": "user", "content": content}]}, use_tqdm=False)
    print(len(result.outputs.embedding), "numbers")
    (result,) = llm.score("a red picture", {"content": [image]}, use_tqdm=False)
    print(f"similarity {result.outputs.score:.2f}")
