"""Prompt embeddings on their way from the renderer to the device."""

from typing import Literal

import msgspec

EmbedsDtype = Literal["float32", "float16", "bfloat16", "float64"]


class Embeds(msgspec.Struct, frozen=True):
    """A dense matrix [rows, columns] that stands for the embeddings of tokens: row major, little endian."""

    dtype: EmbedsDtype
    num_rows: int
    num_columns: int
    data: memoryview  # the matrix's bytes
    first: int = 0  # position in the prompt of the first row
