"""The kernel that replays a recording: the threads of one parallel region run a list of commands in order.

    commands [C, 3]       int64: address of a kernel, address of its arguments, whether all threads run it
    counters [24 + 2 C]   int64, initially zero: index of the current command, number of sleeping threads, number of
                          finished threads, a cache line each; then for each command the number of threads that entered
                          it and the number that left it

A command is finished when no thread is inside it; a thread leaves when it finds no more work items.  So no command
waits for a thread that has not arrived yet, only the end does: a thread that wakes late, or whose core is busy with
another process, joins the others at their current command.  A waiting thread spins about as long as a system call
takes and then sleeps, because spinning longer would keep a busy core from the thread that the others wait for.  The
last thread resets the counters of all arguments, so that the list can run again.

Laws:
  * A thread counts itself as entered before it checks for work items, and starts nothing if there are none.  So no
    thread touches the memory of a finished command.
  * `left` is read before `entered`: if they are equal then they were equal at one moment.

Measured: 281 launches of a decode step of 473 M bfloat16 parameters, one row, in ms.  Two EPYC cores, with a version in
which all threads met after each command:

    pauses before sleep           30    100   300   1000  3000  one launch after the other
    machine idle                  28.3  27.5  26.0  26.1  26.2  31.1
    with two busy loops           33.5        34.9  40.3  53.8  36.4

Two Xeon cores, alternating: 31.5 with meetings, 30.4 without; with one busy loop 70 and 55.
"""

import platform

from trouper.kernels.codegen.builder import KernelBuilder

COMMAND = 3
LINE = 8  # int64 in a cache line
PAUSES = 300
# Linux's number of the system call.
FUTEX = {"x86_64": 202}.get(platform.machine(), 98)
# The operations of a futex, for the threads of this process.
WAIT, WAKE, ALL_THREADS = 128, 129, 2**30


def num_counters(num_commands: int) -> int:
    return 3 * LINE + 2 * num_commands


def replay(code: KernelBuilder, *, is_timed: bool = False) -> None:
    """Write the kernel with the arguments commands, C, counters, and the addresses of omp_get_num_threads and syscall.

    Either address is 0 if the function does not exist.

    Args:
        is_timed: adds the argument times [C + 1]: the cycle counter at the start, and after each command.
    """
    commands, count, counters, get_team_size, syscall, *times = code.arguments(5 + is_timed)
    current = code.pointer(counters, "i64")
    asleep, through = current + LINE, current + 2 * LINE
    i = code.var(code.fetch(current))
    for clock in times:
        with code.when(i.equals(0)):
            code.pointer(clock, "i64")[0] = code.cycles()
    for _ in code.while_(i, count):
        command = code.pointer(commands, "i64") + i * COMMAND
        arguments = code.pointer(command[1], "i64")
        entered = current + (i * 2 + 3 * LINE)
        left, left_address = entered + 1, counters + (i * 2 + (3 * LINE + 1)) * 8
        num_before = code.fetch_add(entered, 1)
        has_items = (command[2] > 0) & (code.fetch(arguments) < arguments[2])
        with code.when(num_before.equals(0) | has_items):
            code.call_at(command[0], command[1])
        code.fetch_add(left, 1)
        with code.when(code.fetch(asleep) > 0):
            code.call_at(syscall, FUTEX, left_address, WAKE, ALL_THREADS, 0, 0, 0)
        missing, pauses = code.var(code.fetch(left) - code.fetch(entered)), code.var(0)
        for _ in code.while_(missing, 0):
            code.pause()
            pauses.set(pauses + 1)
            with code.when(pauses > PAUSES):
                code.fetch_add(asleep, 1)
                seen = code.fetch(left)
                with code.when(
                    seen < code.fetch(entered)
                    # The call returns at once if a thread has left since `seen` was read.
                ):
                    code.call_at(syscall, FUTEX, left_address, WAIT, seen, 0, 0, 0)
                code.fetch_add(asleep, -1)
            missing.set(code.fetch(left) - code.fetch(entered))
        with code.when(num_before.equals(0)):
            # A thread that joins late starts at this command.
            code.fetch_add(current, 1)
            for clock in times:
                code.pointer(clock, "i64")[i + 1] = code.cycles()
        i.set(i + 1)
    team = code.var(1)
    with code.when(get_team_size > 0):
        team.set(code.call_at(get_team_size) & 0xFFFF)
    with code.when(code.fetch_add(through, 1) + 1 >= team):
        for j in code.loop(0, count):
            arguments = code.pointer((code.pointer(commands, "i64") + j * COMMAND)[1], "i64")
            arguments[0], arguments[1] = 0, 0


def timed_replay(code: KernelBuilder) -> None:
    """Write `replay` with one more argument, times.

    It shows where the time of a step goes, including the waits between commands.
    """
    replay(code, is_timed=True)
