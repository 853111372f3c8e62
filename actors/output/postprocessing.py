"""Turn a raw pooling result into the requested form: normalisation, activation, scores.  Pure functions on numpy arrays.

embeddings  matryoshka slice -> L2 norm                     logits  (x - mean) / sigma -> activation
STEP        the rows of the step tokens, the asked columns  MaxSim  Σ over query tokens of the best match
"""

import math

import numpy as np

from trouper.config.checkpoint.pooler import PoolerSpec
from trouper.errors import GenerationError, TrouperValidationError
from trouper.outputs import Array
from trouper.pooling import PoolingParams

# Torch's `normalize` has the same bound.
LEAST_NORM = 1e-12


def finish(
    array: Array,
    params: PoolingParams,
    spec: PoolerSpec,
    prompt_token_ids: tuple[int, ...] = (),
    query: Array | None = None,
    skipped_rows: tuple[int, ...] = (),
) -> Array:
    """Finish a raw result.  Returns a new array.

    Args:
        query: embeddings [query tokens, size].  With it, the result is the score of the document against the query.
        skipped_rows: rows of the document without part in the score.

    Raises:
        GenerationError: the model's result is not finite.
        TrouperValidationError: all tokens of the document are skipped.
    """
    if not _is_finite(array):
        raise GenerationError("the result is not finite", "numerical_error")
    task = params.task or ""
    if task == "token_classify" and spec.tok_pooling_type == "STEP":
        array = _steps(array, params, prompt_token_ids)
    if task.endswith("embed"):
        array = array[..., : params.dimensions]
        array = normalized(array) if params.use_activation else array.copy()
    else:
        array = (array - np.float32(spec.logit_mean)) / np.float32(spec.logit_sigma)
        if params.use_activation:
            array = _activated(array, spec.activation)
    if query is None:
        return array
    if skipped_rows:
        array = np.delete(array, skipped_rows, axis=0)
    if not len(array):
        rule = "no token of this document is scored: the model skips them all"
        raise TrouperValidationError(rule, parameter="prompt")
    return np.array(max_sim(query, array), np.float32)


def _is_finite(array: Array) -> bool:
    """Whether all numbers are finite.  A finite sum of squares shows it quickly; otherwise each number is tested."""
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def normalized(array: Array) -> Array:
    """Scale the last dimension of an array to length 1.

    A row of zeros stays a row of zeros.  Computed in float32, with a minimal norm as in torch.
    """
    squares = np.vecdot(array, array)
    if array.ndim == 1:
        # The same bits in half the time: the rounded root of a float64 equals the root of a float32.
        return array / np.float32(max(math.sqrt(squares), LEAST_NORM))
    return array / np.maximum(np.sqrt(squares)[..., np.newaxis], np.float32(LEAST_NORM))


def max_sim(query: Array, document: Array) -> float:
    """Score a document by late interaction (Khattab and Zaharia 2020).

    Each token of the query counts the similarity of the most similar token of the document; the score is their sum.
    """
    return float((query @ document.T).max(axis=1).sum())


def cosines(first: Array, second: Array) -> Array:
    """Return the cosines [n] of the rows of two arrays [n, size].

    A row of zeros has the cosine 0 with any other row.
    """
    return np.einsum("ns,ns->n", normalized(first), normalized(second))


def _steps(array: Array, params: PoolingParams, prompt_token_ids: tuple[int, ...]) -> Array:
    if params.returned_token_ids:
        array = array[:, params.returned_token_ids]
    if params.step_tag_id is not None:
        array = array[np.array(prompt_token_ids) == params.step_tag_id]
    return array


def _activated(array: Array, activation: str) -> Array:
    match activation:
        case "sigmoid":
            return np.float32(1) / (np.float32(1) + np.exp(-array))
        case "softmax":
            array = np.exp(array - array.max(axis=-1, keepdims=True))
            return array / array.sum(axis=-1, keepdims=True)
        case _:
            return array
