"""Names of requests and sequences.

A *request* is what the client sent; a *sequence* is one list of tokens being grown for it.  A request
with `n` completions has the `n` sequences `id, id + 1, … id + n - 1`, so one integer names both.
"""

from typing import NewType

RequestId = NewType("RequestId", int)
SequenceId = NewType("SequenceId", int)
