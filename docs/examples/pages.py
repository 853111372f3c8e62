"""Rank pages of a document by a question."""

import sys

from PIL import Image

from trouper import LLM

names = sys.argv[2:]
pages = [Image.open(name).convert("RGB") for name in names]
documents = [{"content": [{"type": "image", "image": page}]} for page in pages]

with LLM(sys.argv[1]) as llm:  # such as vidore/colqwen2-v1.0-hf
    results = llm.score("What was the profit?", documents, use_tqdm=False)
    for name, result in zip(names, results, strict=True):
        print(f"{result.outputs.score:.2f} {name}")
