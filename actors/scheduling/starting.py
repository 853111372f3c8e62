"""Which waiting sequences start in a step: the best first, as long as there is room.

A sequence whose grammar is not compiled is parked until it is.  One whose adapter would be one too many among the running ones waits, and others pass it.  Law: no more than
MAX_PASSES of them do, then none starts before it.  So it starts at the latest when all that were running have ended then.
"""

from trouper.actors.scheduling.sequence_table import SequenceTable
from trouper.actors.scheduling.sequences import Sequence
from trouper.actors.scheduling.step_builder import StepBuilder
from trouper.actors.scheduling.waiting import Queue

MAX_PASSED = 64  # sequences that are set aside in one step
MAX_PASSES = 256  # starts of others that one sequence lets by


def start_waiting(
    table: SequenceTable, builder: StepBuilder, max_num_running: int, *, only_returning: bool
) -> None:
    """Start sequences in their order, until the first that finds no room.

    Args:
        only_returning: start none that never ran.
    """
    passed: list[tuple[Queue, Sequence]] = []
    while builder.budget > 0 and len(table.running) < max_num_running:
        sequence = table.waiting.head(only_returning=only_returning)
        if sequence is None:
            break
        if not table.grammars.is_ready(sequence.request.admit):
            table.waiting.park(sequence)
            continue
        if not table.running.has_adapter_room(sequence):
            if len(passed) >= MAX_PASSED or sequence.num_passed >= MAX_PASSES:
                break
            passed.append(table.waiting.set_aside(sequence))
            continue
        if not table.running.start(sequence, builder):
            break
        table.waiting.discard(sequence)
        table.outputs.add_start(sequence.id)
        for _, other in passed:
            other.num_passed += 1
    for queue, sequence in passed:
        queue.push(sequence)
