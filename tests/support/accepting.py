"""The accepting side of a proof, in a thread that it blocks."""

from trouper.actors.executor.devices.nodes import channel, proof


def accept(connection, key):
    """Whether the side that has connected has this key; it is told."""
    listening = proof.Listening(key)
    connection.sendall(listening.greeting)
    answer = proof.receive_exactly(connection, proof.ANSWER_BYTES)
    is_right, verdict = listening.judge(answer)
    connection.sendall(verdict)
    return is_right


def receive_message(connection):
    """Its next message."""
    length = channel.length_of(proof.receive_exactly(connection, channel.LENGTH.size))
    return channel.decode(proof.receive_exactly(connection, length))
