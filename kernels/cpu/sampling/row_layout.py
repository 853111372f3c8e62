"""How the sampling parameters of a row lie in memory, and what a sampled token may say instead of a token."""

import numpy as np

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),  # 0 = greedy
        ("top_p", np.float32),  # in (0, 1]; 1 = off
        ("log_min_p", np.float32),  # -inf = off
        ("top_k", np.int32),  # at most 0, or the size of the vocabulary and more, = off
        (
            "repetition",
            np.float32,
        ),  # 1 = off; 0 = off, and logits that are not finite are not looked for
    ]
)
# Where they are in a row, in words of 32 bits.
SEED, TEMPERATURE, TOP_P, LOG_MIN_P, TOP_K, REPETITION = 0, 2, 3, 4, 5, 6
ROW_WORDS = ROW.itemsize // 4

NOT_FINITE, NOTHING_LEFT = (
    -1,
    -2,
)  # in place of a token: the logits hold NaN or an infinity, or all are -inf
