r"""How likely the data are given the hyperparameters of step 2, the residual integrated out.

Given the mixture, the response less the mixture, *r*, is Gaussian. With the effects *C* of the
coefficients *z* (of the residual and its prior mean), in prior sds, over :math:`\sigma`,

.. math:: \log p(r \mid \theta) = -n\log\sigma - \tfrac12\log|A|
          - \tfrac12\bigl(r^Tr/\sigma^2 - b^TA^{-1}b\bigr) + \mathrm{const},
          \qquad A = I + C^TC, \quad b = C^Tr/\sigma,

and :math:`z \mid \theta, r \sim N(A^{-1}b, A^{-1})`. Where the noise is far below the signal the
last difference cancels; with :math:`\hat z = A^{-1}b` it is
:math:`|r/\sigma - C\hat z|^2 + |\hat z|^2`, in which errors of :math:`\hat z` are of second order
and never raise it. `log_evidence` is that; `all_evidence` of many mixtures takes the shorter
way, and is minus infinity where it would lose its digits. Everything here is for JAX to trace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from bne.model import ModelData, Structure, log_prior_sd

__all__ = ["Regression", "all_evidence", "explain", "factorise", "log_evidence", "prior_sd"]

FloatArray = NDArray[np.float64]
_LONGEST = 1e11  # squared length of residuals over sigma beyond which a difference cancels


class Regression(NamedTuple):
    """What the evidence is made of.

    Residuals (S, n), one for each mixture, and their squared lengths (S,). Where no hyperparameter
    changes the columns (n, p + m) of trend and residual, they, and their products with one another
    and with the residuals, (p + m, p + m) and (S, p + m); else None.
    """

    data: ModelData
    residuals: Any
    squares: Any
    columns: Any
    gram: Any
    pulled: Any

    @staticmethod
    def of(structure: Structure, data: ModelData, mixtures: FloatArray) -> Regression:
        """Regression of the response less each of some mixtures (S, n); `data` non-centred."""
        residuals = np.asarray(data.response) - mixtures
        squares = np.sum(residuals**2, axis=1)
        if data.representation.moving:
            return Regression(data, residuals, squares, None, None, None)
        with jax.enable_x64(True):
            columns = np.asarray(_columns(structure, np.zeros(structure.n_hyper), data))
        gram, pulled = columns.T @ columns, residuals @ columns
        return Regression(data, residuals, squares, columns, gram, pulled)

    def some(self, rows: NDArray[np.intp]) -> Regression:
        """Regression of some of the mixtures."""
        pulled = None if self.pulled is None else self.pulled[rows]
        return self._replace(
            residuals=self.residuals[rows], squares=self.squares[rows], pulled=pulled
        )


def prior_sd(structure: Structure, theta: Any, data: ModelData) -> Any:
    """Prior sds (p + m,) of the coefficients of trend and residual."""
    (process,) = structure.processes
    sd = jnp.exp(log_prior_sd(structure, theta, data, process))
    return jnp.concatenate([jnp.ones(structure.n_trend), sd])


def factorise(structure: Structure, theta: Any, regression: Regression) -> Any:
    """Lower triangular factor of A."""
    gram = regression.gram
    if gram is None:
        columns = _columns(structure, theta, regression.data)
        gram = columns.T @ columns
    sd = prior_sd(structure, theta, regression.data) * jnp.exp(-structure.log_sigma(theta))
    return jnp.linalg.cholesky(jnp.eye(len(sd)) + gram * sd * sd[:, None], symmetrize_input=False)


def explain(
    structure: Structure, theta: Any, factor: Any, regression: Regression, rows: Any
) -> Any:
    r"""What the coefficients explain of some of the residuals: :math:`L^{-1}b`, (..., p + m)."""
    if regression.pulled is None:
        pulled = regression.residuals[rows] @ _columns(structure, theta, regression.data)
    else:
        pulled = regression.pulled[rows]
    precision = jnp.exp(-2.0 * structure.log_sigma(theta))
    b = pulled * (prior_sd(structure, theta, regression.data) * precision)
    return jax.scipy.linalg.solve_triangular(factor, b.T, lower=True).T


def log_evidence(
    structure: Structure, theta: Any, factor: Any, explained: Any, regression: Regression, row: Any
) -> Any:
    """Log evidence of one of the mixtures, whose residuals have been explained."""
    columns = regression.columns
    if columns is None:
        columns = _columns(structure, theta, regression.data)
    z = jax.scipy.linalg.solve_triangular(factor, explained, lower=True, trans=1)
    fitted = columns @ (prior_sd(structure, theta, regression.data) * z)
    left = (regression.residuals[row] - fitted) * jnp.exp(-structure.log_sigma(theta))
    value = _normalise(structure, theta, factor, len(left), left @ left + z @ z)
    return jnp.where(jnp.isnan(value), -jnp.inf, value)


def all_evidence(structure: Structure, theta: Any, regression: Regression) -> Any:
    """Log evidence (S,) of every mixture."""
    factor = factorise(structure, theta, regression)
    explained = explain(structure, theta, factor, regression, slice(None))
    whole = regression.squares * jnp.exp(-2.0 * structure.log_sigma(theta))
    left = whole - jnp.sum(explained**2, axis=1)
    n = len(regression.data.response)
    value = _normalise(structure, theta, factor, n, jnp.maximum(left, 0.0))
    return jnp.where((whole > _LONGEST) | jnp.isnan(value), -jnp.inf, value)


def _normalise(structure: Structure, theta: Any, factor: Any, n: int, square: Any) -> Any:
    log_determinant = 2.0 * (n * structure.log_sigma(theta) + jnp.sum(jnp.log(jnp.diag(factor))))
    return -0.5 * (log_determinant + square)


def _columns(structure: Structure, theta: Any, data: ModelData) -> Any:
    """Columns (n, p + m) of the trend and of the residual at unit sd."""
    (process,) = structure.processes
    log_l = structure.log_lengthscale(theta, process.name)
    columns = data.representation.columns(data.features, log_l, process.size)
    return jnp.concatenate([jnp.asarray(data.trend), columns], axis=1)
