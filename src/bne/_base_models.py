"""Base models of the paper's simulated experiments: kernel regressions on points of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import linalg
from scipy.spatial.distance import cdist

__all__ = ["KERNELS", "Array", "Surface", "Variant", "kernel_regression", "train_base_models"]

Array = NDArray[np.float64]
Surface = Callable[[Array], Array]
Kernel = Callable[[Array, Array], Array]
Variant = Literal["as_run", "as_printed"]


def _cubic(a: Array, b: Array) -> Array:
    return np.asarray((1 + a @ b.T) ** 3)


def _arccosine(a: Array, b: Array) -> Array:
    """Arc-cosine kernel of order zero, 1 - angle / pi, of inputs with a constant 1 appended.

    Without the constant the angle between two scalars is 0 or pi and the model a step function.
    """
    a, b = (np.column_stack([z, np.ones(len(z))]) for z in (a, b))
    norms = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=1)
    return np.asarray(1 - np.arccos(np.clip(a @ b.T / norms, -1, 1)) / np.pi)


def _matern52(a: Array, b: Array) -> Array:
    r = np.sqrt(5) * cdist(a, b) / 0.5
    return np.asarray((1 + r + r**2 / 3) * np.exp(-r))


def _exponential(a: Array, b: Array) -> Array:
    """Exponential kernel; the text gives no length-scale, so it is 1."""
    return np.asarray(np.exp(-cdist(a, b)))


def _periodic_exponential(a: Array, b: Array) -> Array:
    """Exponential kernel of length 2 on a circle of period 1: exp(-sum |sin(pi d)| / 4)."""
    lag = np.abs(np.sin(np.pi * (a[:, None, :] - b[None, :, :]))).sum(axis=-1)
    return np.asarray(np.exp(-lag / 4))


# In the published runs each GP starts from noise variance 1 and unit kernel variance and takes a
# hundred steps of 0.001, so that its hyperparameters stay within a tenth or so of these.
_AS_RUN_NOISE_VARIANCE = 1.0
_PENALTIES = np.geomspace(1e-3, 1e2, 26)

KERNELS: dict[str, dict[str, Kernel]] = {
    "as_run": {
        "matern": _matern52,
        "cubic": _cubic,
        "arccosine": _arccosine,
        "periodic": _periodic_exponential,
    },
    "as_printed": {
        "cubic": _cubic,
        "arccosine": _arccosine,
        "exponential": _exponential,
        "matern": _matern52,
    },
}


def train_base_models(base: Variant, x: Array, y: Array) -> dict[str, Surface]:
    """Fit the base models called ``base`` to inputs ``x``, shape (n, d), and responses ``y``."""
    kernels = KERNELS[base]
    penalty = _AS_RUN_NOISE_VARIANCE if base == "as_run" else None
    return {name: kernel_regression(k, x, y, penalty) for name, k in kernels.items()}


def kernel_regression(kernel: Kernel, x: Array, y: Array, penalty: float | None) -> Surface:
    """Kernel ridge regression without intercept, which is a zero-mean GP's posterior mean.

    Without a ``penalty`` the one with the least leave-one-out squared error is taken: the error
    at point i is ``a_i / B_ii`` where ``B = (K + penalty I)^-1`` and ``a = B y``.
    """
    values, Q = linalg.eigh(kernel(x, x))
    projected = Q.T @ y

    def leave_one_out(candidate: float) -> float:
        shrunk = 1 / (values + candidate)
        return float(np.mean((Q @ (shrunk * projected) / (Q**2 @ shrunk)) ** 2))

    if penalty is None:
        penalty = min(_PENALTIES.tolist(), key=leave_one_out)
    coefficients = Q @ (projected / (values + penalty))
    return lambda sites: np.asarray(kernel(sites, x) @ coefficients)
