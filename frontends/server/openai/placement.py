"""Read which replica a request names, and its session: headers as vLLM has them, or fields of the body."""

from typing import NamedTuple

from trouper.errors import invalid
from trouper.frontends.server.http.context import RequestContext

RANK, SESSION = b"x-data-parallel-rank", b"x-session-id"


class ReplicaWish(NamedTuple):
    """The replica and the session that a request names."""

    data_parallel_rank: int | None
    session_id: str | None


def read_placement(
    context: RequestContext, data_parallel_rank: int | None = None, session_id: str | None = None
) -> ReplicaWish:
    """Read both; a header goes before the field of the body, given here.

    Raises:
        TrouperValidationError: the rank is no number.
    """
    rank, session = context.header(RANK), context.header(SESSION)
    if rank is not None and not (rank.isdigit() and len(rank) < 10):
        raise invalid("X-data-parallel-rank", "must be a number", rank.decode(errors="replace"))
    return ReplicaWish(
        data_parallel_rank if rank is None else int(rank),
        session_id if session is None else session.decode("latin-1"),
    )
