"""Accept authenticated connections in a thread, for tests of the connecting side."""

from trouper.actors.executor.workers.machines import authentication, channel


def accept(connection, key):
    """Return whether the connecting side has this key, and send it the verdict."""
    listening = authentication.ListenerProof(key)
    connection.sendall(listening.greeting)
    answer = authentication.receive_exactly(connection, authentication.ANSWER_BYTES)
    is_right, verdict = listening.judge(answer)
    connection.sendall(verdict)
    return is_right


def receive_message(connection):
    """Receive the next message of the connection."""
    length = channel.length_of(authentication.receive_exactly(connection, channel.LENGTH.size))
    return channel.decode(authentication.receive_exactly(connection, length))
