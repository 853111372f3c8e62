"""Limits that more than one room of the engine keeps: what rendering refuses, a device need not hold."""

# The room of one request on a GPU.  A request that needs more is refused when it is rendered.
MAX_EDITS = 1024  # biased, banned and, until min_tokens, stop tokens
MAX_BAD_WORD = 16  # tokens of a bad word, without its last

# Far above any real load: it turns a runaway caller into a QueueOverflowError, and bounds the channels
# that have room for one message of each open request.
MAX_OPEN_REQUESTS = 2**20
