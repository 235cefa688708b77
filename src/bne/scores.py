"""Scores of point, interval and sample predictions, and the paper's own metrics by their names.

Scores compare predictions with observed responses and are means over sites. Functions whose name
starts with ``paper_`` reproduce the definitions behind the published tables; several of them
compare with the true mean of a simulation and are no proper scores.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "PAPER_LEVELS",
    "bias",
    "coverage",
    "crps",
    "crps_per_site",
    "interval_score",
    "log_score",
    "mae",
    "paper_calibration",
    "paper_coverage",
    "paper_ece",
    "paper_mse",
    "paper_nll",
    "paper_sharpness",
    "rmse",
]

Array = NDArray[np.float64]

#: The 14 quantile levels of :func:`paper_ece`.
PAPER_LEVELS = (
    *(0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25),
    *(0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.975),
)


def rmse(y: ArrayLike, prediction: ArrayLike) -> float:
    r"""Root mean squared error, :math:`\sqrt{n^{-1} \sum_i (\hat y_i - y_i)^2}`, in units of y.

    Parameters
    ----------
    y, prediction : array-like, shape (n,)
        Observed and predicted responses.
    """
    y, prediction = _vectors(y=y, prediction=prediction)
    return float(np.sqrt(np.mean((prediction - y) ** 2)))


def mae(y: ArrayLike, prediction: ArrayLike) -> float:
    r"""Mean absolute error, :math:`n^{-1} \sum_i |\hat y_i - y_i|`, in units of y.

    Parameters
    ----------
    y, prediction : array-like, shape (n,)
        Observed and predicted responses.
    """
    y, prediction = _vectors(y=y, prediction=prediction)
    return float(np.mean(np.abs(prediction - y)))


def bias(y: ArrayLike, prediction: ArrayLike) -> float:
    r"""Mean error, :math:`n^{-1} \sum_i (\hat y_i - y_i)`; positive when predictions are too high.

    Parameters
    ----------
    y, prediction : array-like, shape (n,)
        Observed and predicted responses.
    """
    y, prediction = _vectors(y=y, prediction=prediction)
    return float(np.mean(prediction - y))


def coverage(y: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> float:
    r"""Share of responses in their interval, :math:`n^{-1} \sum_i 1\{l_i \le y_i \le u_i\}`.

    Parameters
    ----------
    y, lower, upper : array-like, shape (n,)
        Observed responses and ends of their prediction intervals.
    """
    y, lower, upper = _intervals(y, lower, upper)
    return float(np.mean((lower <= y) & (y <= upper)))


def interval_score(y: ArrayLike, lower: ArrayLike, upper: ArrayLike, *, level: float) -> float:
    r"""Interval (Winkler) score, a proper score of central intervals, in units of y.

    .. math:: \frac1n \sum_i (u_i - l_i) + \frac2\alpha (l_i - y_i)_+ + \frac2\alpha (y_i - u_i)_+,
              \qquad \alpha = 1 - \text{level}

    Parameters
    ----------
    y, lower, upper : array-like, shape (n,)
        Observed responses and ends of their prediction intervals.
    level : float
        Nominal coverage of the intervals, between 0 and 1.
    """
    y, lower, upper = _intervals(y, lower, upper)
    alpha = 1 - _probability("level", level)
    outside = np.maximum(lower - y, 0) + np.maximum(y - upper, 0)
    return float(np.mean(upper - lower + 2 / alpha * outside))


def log_score(log_density: ArrayLike) -> float:
    r"""Mean negative log predictive density, :math:`-n^{-1} \sum_i \log p_i(y_i)`, in nats.

    Parameters
    ----------
    log_density : array-like, shape (n,)
        Log predictive density of each observed response.
    """
    (log_density,) = _vectors(log_density=log_density)
    return float(-np.mean(log_density))


def crps(y: ArrayLike, draws: ArrayLike, *, fair: bool = False) -> float:
    """Mean over sites of :func:`crps_per_site`, in units of y.

    Parameters
    ----------
    y : array-like, shape (n,)
        Observed responses.
    draws : array-like, shape (m, n)
        Draws from the predictive law of each response, one row per draw.
    fair : bool
        Which of the two estimates, see :func:`crps_per_site`.
    """
    return float(np.mean(crps_per_site(y, draws, fair=fair)))


def crps_per_site(y: ArrayLike, draws: ArrayLike, *, fair: bool = False) -> Array:
    r"""Continuous ranked probability score of predictive draws at each site.

    .. math:: \frac1m \sum_j |x_j - y| - \frac{1}{2 c} \sum_{j, k} |x_j - x_k|

    With :math:`c = m^2` this is the exact score of the m draws taken as the prediction; as an
    estimate of the score of the law they were drawn from it is too high by a term of order 1/m.
    The fair version has :math:`c = m (m - 1)`, estimates the latter without bias when the draws are
    independent, and can be negative.

    Parameters
    ----------
    y : array-like, shape (n,)
        Observed responses.
    draws : array-like, shape (m, n)
        Draws from the predictive law of each response, one row per draw.
    fair : bool
        Whether to remove the bias due to the finite number of draws.

    Returns
    -------
    array, shape (n,)
        Scores in units of y, smaller is better.
    """
    (y,) = _vectors(y=y)
    draws = _finite("draws", np.asarray(draws, dtype=float))
    if draws.ndim != 2 or draws.shape[1] != len(y):
        raise ValueError(
            f"draws must have one row per draw and one column per response, (m, {len(y)}), "
            f"but their shape is {draws.shape}."
        )
    m = len(draws)
    if m < 1 + fair:
        raise ValueError(f"The {'fair ' if fair else ''}CRPS needs more than {m} draws.")
    ranks = np.arange(1, m + 1)
    # The sum of |x_j - x_k| over all ordered pairs, from the order statistics.
    pairs = 2 * ((2 * ranks - m - 1) @ np.sort(draws, axis=0))
    spread = pairs / (2 * m * (m - 1 if fair else m))
    return np.asarray(np.mean(np.abs(draws - y), axis=0) - spread)


def paper_mse(mean: ArrayLike, true_mean: ArrayLike) -> float:
    r"""Compute the paper's MSE, :math:`n^{-1} \sum_i (m_i - \mu_i)^2 / \mathrm{Var}(\mu)`.

    The published tables take it over the test sites inside the bounding box of the training sites.

    Parameters
    ----------
    mean : array-like, shape (n,)
        Predictive means.
    true_mean : array-like, shape (n,)
        True means of the response, whose variance (divisor n) normalises.
    """
    mean, true_mean = _vectors(mean=mean, true_mean=true_mean)
    variance = np.var(true_mean)
    if variance == 0:
        raise ValueError("The true means are all equal: a normalised MSE is not defined.")
    return float(np.mean((mean - true_mean) ** 2) / variance)


def paper_calibration(mean: ArrayLike, sd: ArrayLike, true_mean: ArrayLike) -> float:
    r"""First part of the paper's NLL, :math:`n^{-1} \sum_i ((m_i - \mu_i) / s_i)^2`.

    Parameters
    ----------
    mean, sd : array-like, shape (n,)
        Predictive means and standard deviations.
    true_mean : array-like, shape (n,)
        True means of the response.
    """
    mean, sd, true_mean = _vectors(mean=mean, sd=sd, true_mean=true_mean)
    return float(np.mean(((mean - true_mean) / _positive("sd", sd)) ** 2))


def paper_sharpness(sd: ArrayLike) -> float:
    r"""Second part of the paper's NLL, :math:`n^{-1} \sum_i \log s_i`.

    Parameters
    ----------
    sd : array-like, shape (n,)
        Predictive standard deviations.
    """
    (sd,) = _vectors(sd=sd)
    return float(np.mean(np.log(_positive("sd", sd))))


def paper_nll(mean: ArrayLike, sd: ArrayLike, true_mean: ArrayLike) -> float:
    r"""Compute the paper's NLL, :math:`n^{-1} \sum_i ((m_i - \mu_i) / s_i)^2 + \log s_i`.

    It is set against the true mean, not against y, and has neither the factor 1/2 nor the constant
    of a Gaussian log density: a law with a vanishing sd around the true mean would score best.
    For a proper score of y see :func:`log_score`.

    Parameters
    ----------
    mean, sd : array-like, shape (n,)
        Predictive means and standard deviations.
    true_mean : array-like, shape (n,)
        True means of the response.
    """
    return paper_calibration(mean, sd, true_mean) + paper_sharpness(sd)


def paper_ece(pit: ArrayLike) -> float:
    r"""Compute the paper's expected calibration error over the 14 :data:`PAPER_LEVELS`.

    .. math:: \frac{1}{14} \sum_q \Bigl( \frac1n \sum_i 1\{y_i < F_i^{-1}(q)\} - q \Bigr)^2

    where :math:`y_i < F_i^{-1}(q)` exactly when :math:`F_i(y_i) < q`.

    Parameters
    ----------
    pit : array-like, shape (n,)
        Predictive distribution function at the observed response, :math:`F_i(y_i)`.
    """
    pit = _pit(pit)
    levels = np.array(PAPER_LEVELS)
    shares = np.mean(pit[:, None] < levels, axis=0)
    return float(np.mean((shares - levels) ** 2))


def paper_coverage(pit: ArrayLike, *, level: float = 0.95) -> float:
    r"""Share of responses between the :math:`(1 \mp \text{level})/2` predictive quantiles.

    Parameters
    ----------
    pit : array-like, shape (n,)
        Predictive distribution function at the observed response, :math:`F_i(y_i)`.
    level : float
        Nominal coverage of the central interval.
    """
    pit = _pit(pit)
    tail = (1 - _probability("level", level)) / 2
    return float(np.mean((tail <= pit) & (pit <= 1 - tail)))


def _vectors(**named: ArrayLike) -> tuple[Array, ...]:
    """Return the arguments as finite one-dimensional arrays of one common, positive length."""
    arrays = {name: np.asarray(value, dtype=float) for name, value in named.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Expected one-dimensional arrays of equal length, got {listed}.")
    if next(iter(shapes.values())) == (0,):
        raise ValueError(f"There is nothing to score: {', '.join(named)} hold no values.")
    return tuple(_finite(name, array) for name, array in arrays.items())


def _finite(name: str, array: Array) -> Array:
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        where = ", ".join(str(i) for i in bad[0])
        raise ValueError(f"{name}: {len(bad)} values are not finite, the first at index {where}.")
    return array


def _intervals(y: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> tuple[Array, Array, Array]:
    y, lower, upper = _vectors(y=y, lower=lower, upper=upper)
    crossed = int(np.sum(lower > upper))
    if crossed:
        raise ValueError(f"The lower end lies above the upper end in {crossed} intervals.")
    return y, lower, upper


def _positive(name: str, array: Array) -> Array:
    if np.any(array <= 0):
        raise ValueError(f"{name}: {int(np.sum(array <= 0))} values are not positive.")
    return array


def _pit(pit: ArrayLike) -> Array:
    (array,) = _vectors(pit=pit)
    if np.any((array < 0) | (array > 1)):
        raise ValueError("pit must hold probabilities, between 0 and 1.")
    return array


def _probability(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, not {value}.")
    return value
