"""Check which replica a request names, in an engine of several."""

from trouper.errors import invalid

MAX_SESSION_ID = 256  # characters


def check_place(rank: object, session_id: object, num_replicas: int) -> None:
    """Refuse a replica that does not exist, and what is no name of a session.

    Raises:
        TrouperValidationError: the message names the parameter.
    """
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise invalid("data_parallel_rank", "must be an integer", rank)
        if not 0 <= rank < num_replicas:
            rule = f"must be in [0, {num_replicas - 1}]: data_parallel_size is {num_replicas}"
            raise invalid("data_parallel_rank", rule, rank)
    if session_id is not None and not (
        isinstance(session_id, str) and 0 < len(session_id) <= MAX_SESSION_ID
    ):
        rule = f"must be a string of 1 to {MAX_SESSION_ID} characters"
        raise invalid("session_id", rule, session_id)
