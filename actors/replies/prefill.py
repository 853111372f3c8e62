"""The count of prompt tokens in prefill, which admission reads and the reply slots write."""


class Prefills:
    """Prompt tokens of requests that have no token yet."""

    def __init__(self) -> None:
        self.num_tokens = 0
