"""The accepting side of a proof, in a thread that it blocks."""

from trouper.actors.executor.workers.machines import authentication, channel


def accept(connection, key):
    """Whether the side that has connected has this key; it is told."""
    listening = authentication.ListenerProof(key)
    connection.sendall(listening.greeting)
    answer = authentication.receive_exactly(connection, authentication.ANSWER_BYTES)
    is_right, verdict = listening.judge(answer)
    connection.sendall(verdict)
    return is_right


def receive_message(connection):
    """Its next message."""
    length = channel.length_of(authentication.receive_exactly(connection, channel.LENGTH.size))
    return channel.decode(authentication.receive_exactly(connection, length))
