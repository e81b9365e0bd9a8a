"""How far one array is from another. Everything is float64; NaN in gives NaN out."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxq.errors import VerificationError

Pair = tuple[NDArray[np.float64], NDArray[np.float64]]


def mse(ref: ArrayLike, x: ArrayLike) -> float:
    """Mean squared difference; 0 for empty arrays. Raises VerificationError if the shapes differ."""
    a, b = _pair(ref, x)
    return float(np.mean(np.square(_gap(a, b)))) if a.size else 0.0


def max_abs(ref: ArrayLike, x: ArrayLike) -> float:
    """Largest absolute difference; 0 for empty arrays. Raises VerificationError if the shapes differ."""
    a, b = _pair(ref, x)
    return float(np.max(np.abs(_gap(a, b)))) if a.size else 0.0


def sqnr_db(ref: ArrayLike, x: ArrayLike) -> float:
    """Signal to quantization noise, 10 log10(sum ref^2 / sum (ref - x)^2).

    inf for identical arrays (all zero and empty ones too), -inf if only `ref` is all zero.
    Raises VerificationError if the shapes differ.
    """
    a, b = _pair(ref, x)
    noise = float(np.sum(np.square(_gap(a, b))))
    signal = float(np.sum(np.square(a)))
    if noise == 0.0:
        return float("inf")
    with np.errstate(divide="ignore", invalid="ignore"):
        return 10.0 * float(np.log10(signal) - np.log10(noise))


def cosine(ref: ArrayLike, x: ArrayLike) -> float:
    """Cosine of the angle between the flattened arrays, in [-1, 1]; NaN if one holds inf.

    1 if both are all zero (or empty), 0 if one is. Raises VerificationError if the shapes differ.
    """
    a, b = _pair(ref, x)
    # Scaled by the largest value first: the squares of 1e200 and of 1e-200 are not float64 numbers.
    tops = [float(np.max(np.abs(array), initial=0.0)) for array in (a, b)]
    if not np.isfinite(tops).all():
        return float("nan")
    if 0.0 in tops:
        return float(tops == [0.0, 0.0])
    u, v = a.ravel() / tops[0], b.ravel() / tops[1]
    value = float(np.sum(u * v) / np.sqrt(np.sum(u * u) * np.sum(v * v)))
    return min(1.0, max(-1.0, value))


def kl(ref: ArrayLike, x: ArrayLike, *, axis: int = -1, logits: bool = False) -> float:
    """Kullback-Leibler divergence D(ref || x) in nats, over `axis`, averaged over the other axes.

    Arrays hold probabilities or counts (not negative, not all zero along the axis), which are normalised, or logits,
    which go through a softmax. inf where x is 0 and ref is not. Raises VerificationError if the shapes differ or
    something is negative.
    """
    a, b = _pair(ref, x)
    if not a.size:
        return 0.0
    p, q = (_log_softmax(a, axis), _log_softmax(b, axis)) if logits else (_log_share(a, axis), _log_share(b, axis))
    with np.errstate(invalid="ignore"):
        terms = np.where(np.isneginf(p), 0.0, np.exp(p) * (p - q))
    value = float(np.mean(np.sum(terms, axis=axis)))
    return value if np.isnan(value) else max(0.0, value)


def _gap(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return np.asarray(a - b)


def _pair(ref: ArrayLike, x: ArrayLike) -> Pair:
    a, b = np.asarray(ref).astype(np.float64), np.asarray(x).astype(np.float64)
    if a.shape != b.shape:
        raise VerificationError("comparison", f"shapes {a.shape} and {b.shape} differ", "compare the same tensor")
    return a, b


def _log_share(a: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    total = np.sum(a, axis=axis, keepdims=True)
    if (a < 0).any() or (total == 0).any():
        raise VerificationError("KL divergence", "needs values >= 0 that are not all 0", "pass logits=True for logits")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(a) - np.log(total))


def _log_softmax(a: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    shifted = _gap(a, np.max(a, axis=axis, keepdims=True))
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True)))
