/* Calls one kernel, without a C library: stdin is its pieces, its number of arguments, the bytes of its memory, then for each argument whether
   it is a place in that memory and its value, then the memory; stdout is the memory afterwards. */

typedef long i64;

void KERNEL(i64 *arguments);

static char input[1 << 22] __attribute__((aligned(64)));
static char memory[1 << 22] __attribute__((aligned(64)));

static i64 call(i64 number, i64 a, i64 b, i64 c) {
    register i64 x8 __asm__("x8") = number, x0 __asm__("x0") = a;
    register i64 x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
}

void _start(void) {
    i64 found, num_read = 0, arguments[32], *word = (i64 *)input;
    while ((found = call(63, 0, (i64)input + num_read, sizeof input - num_read)) > 0)
        num_read += found;
    i64 num_arguments = word[1], num_bytes = word[2];
    arguments[0] = arguments[1] = 0;
    arguments[2] = word[0];
    for (i64 i = 0; i < num_arguments; i++)
        arguments[3 + i] = word[3 + 2 * i] ? (i64)memory + word[4 + 2 * i] : word[4 + 2 * i];
    volatile char *source = (char *)(word + 3 + 2 * num_arguments);
    for (i64 i = 0; i < num_bytes; i++)
        memory[i] = source[i];
    KERNEL(arguments);
    for (i64 done = 0; done < num_bytes; done += found)
        if ((found = call(64, 1, (i64)memory + done, num_bytes - done)) <= 0)
            break;
    call(94, 0, 0, 0);
}
