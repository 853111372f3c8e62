"""Wait for a number in memory to grow, awake: to wake a thread that sleeps takes 50 µs, and its core is cold then."""

from trouper.kernels.codegen.builder import Code


def watch(code: Code) -> None:
    """Address of an int64, what it is to exceed, after how many pauses to give up.  As a whole: one piece."""
    address, seen, most = code.arguments(3)
    number, pauses = code.pointer(address, "i64"), code.var(0)
    for _ in code.while_(pauses, most):
        code.pause()
        is_over = code.fetch(number) > seen
        pauses.set(code.select(is_over, most, pauses + 1))
