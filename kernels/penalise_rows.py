"""What `repetition.py` does, in one pass over each row and two over the tokens that have occurred in it."""

from trouper.kernels.simd import LANES, Code, Pointer, Value

UNROLLED = 4  # to add takes four cycles


def penalise_rows(code: Code) -> None:
    """Logits, their stride, V, token ids, their stride, rows, ends, penalties, flags, memory, its bytes for a thread."""
    logits, stride, vocab_size, tokens, tokens_stride, *others = code.arguments(11)
    rows, ends, penalties, is_finite, *memory = others
    held = code.pointer(memory[0] + code.thread() * memory[1], "f32")
    for i in code.pieces():
        values = code.pointer(logits, "f32") + i * stride
        flag = code.select(_is_finite(code, values, vocab_size), 1, 0)
        code.pointer(is_finite, "i8")[i] = code.narrowed(flag, "i8")
        ids = code.pointer(tokens, "i64") + code.pointer(rows, "i64")[i] * tokens_stride
        count, penalty = code.pointer(ends, "i64")[i], code.pointer(penalties, "f32")[i]
        with code.when((penalty < 1.0) | (penalty > 1.0)):
            for j in code.loop(0, count):
                with code.when((ids[j] >= 0) & (ids[j] < vocab_size)):
                    x = values[ids[j]]
                    held[j] = code.select(x > 0.0, x / penalty, x * penalty)
            for j in code.loop(0, count):
                with code.when((ids[j] >= 0) & (ids[j] < vocab_size)):
                    values[ids[j]] = held[j]


def _is_finite(code: Code, values: Pointer, length: Value) -> Value:
    """Nothing times 0 is anything but 0."""
    zeros = [code.var(code.lanes(0.0)) for _ in range(UNROLLED)]
    whole = length - length % (UNROLLED * LANES)
    for start in code.loop(0, whole, UNROLLED * LANES):
        for i, zero in enumerate(zeros):
            zero.set(code.fma(values.load(start + i * LANES), code.lanes(0.0), zero))
    rest = code.var(0.0)
    for token in code.loop(whole, length):
        rest.set(rest + values[token] * 0.0)
    for zero in zeros:
        rest.set(rest + code.sum_of(zero))
    return rest.equals(0.0)
