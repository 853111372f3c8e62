"""The memory layout of a row's sampling parameters, and the codes that replace a token if none can be drawn.

The sampler on the host writes these rows, and the kernel reads them, so both import this module.
"""

import numpy as np

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),  # 0 is greedy
        ("top_p", np.float32),  # in (0, 1]; 1 is off
        ("log_min_p", np.float32),  # -inf is off
        ("top_k", np.int32),  # off if it is at most 0, or at least the size of the vocabulary
        ("repetition", np.float32),  # 1 is off; 0 is off and skips the test for finite logits
    ]
)
# Indices in a row, in words of 32 bits.
SEED, TEMPERATURE, TOP_P, LOG_MIN_P, TOP_K, REPETITION = 0, 2, 3, 4, 5, 6
ROW_WORDS = ROW.itemsize // 4

# Codes in place of a token: the logits contain NaN or an infinity, or all of them are -inf.
NOT_FINITE, NOTHING_LEFT = -1, -2
