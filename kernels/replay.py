"""Many launches in one: the threads of one parallel region run a list of commands, and meet after each.

    commands [C, 3]   int64: address of a kernel, address of its arguments, is it for all threads
    counters [16]     int64 zeros: how often a thread has arrived; a cache line further, threads asleep

The last thread to arrive sets the counters of the command's arguments back, so that the list can be run
again.  The others ask about as long as a system call takes, then sleep: a thread that spins on keeps a
busy core from the one it waits for.

Measured, two EPYC cores, 281 launches of a decode step of 473 M bfloat16 parameters, one row, ms:

    pauses before sleep           30    100   300   1000  3000  launched one by one
    machine idle                  28.3  27.5  26.0  26.1  26.2  31.1
    two busy loops beside it      33.5        34.9  40.3  53.8  36.4
"""

import platform

from trouper.kernels.simd import Code

COMMAND = 3
LINE = 8  # int64 of a cache line
PAUSES = 300
FUTEX = {"x86_64": 202}.get(platform.machine(), 98)  # Linux's number of the system call
WAIT, WAKE, EVERYBODY = 128, 129, 2**30  # among the threads of this process


def replay(code: Code) -> None:
    """commands, C, counters, addresses of omp_get_num_threads or 0 and of libc's syscall or 0."""
    commands, count, counters, get_team_size, syscall = code.arguments(5)
    arrived = code.pointer(counters, "i64")
    asleep = arrived + LINE
    me, team = code.thread(), code.var(1)
    with code.when(get_team_size > 0):
        team.set(code.call_at(get_team_size) & 0xFFFF)
    goal = code.var(0)
    for i in code.loop(0, count):
        command = code.pointer(commands, "i64") + i * COMMAND
        with code.when((command[2] > 0) | me.equals(0)):
            code.call_at(command[0], command[1])
        goal.set(goal + team)
        seen = code.var(code.fetch_add(arrived, 1) + 1)
        with code.when(seen >= goal):
            arguments = code.pointer(command[1], "i64")
            arguments[0], arguments[1] = 0, 0
            with code.when(code.fetch(asleep) > 0):
                code.call_at(syscall, FUTEX, counters, WAKE, EVERYBODY, 0, 0, 0)
        pauses = code.var(0)
        for _ in code.while_(seen, goal):
            code.pause()
            pauses.set(pauses + 1)
            with code.when(pauses > PAUSES):
                code.fetch_add(asleep, 1)
                seen.set(code.fetch(arrived))
                with code.when(seen < goal):  # returns at once if somebody has arrived since
                    code.call_at(syscall, FUTEX, counters, WAIT, seen, 0, 0, 0)
                code.fetch_add(asleep, -1)
            seen.set(code.fetch(arrived))
