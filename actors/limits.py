"""Limits that more than one part of the engine keeps."""

# Far above any real load: it turns a runaway caller into a QueueOverflowError, and bounds every inbox.
MAX_OPEN_REQUESTS = 2**20

# The room of one request on a GPU.  A request that needs more is refused when it is rendered.
MAX_EDITS = 1024  # biased, banned and, until min_tokens, stop tokens
MAX_BAD_WORD = 16  # tokens of a bad word, without its last
