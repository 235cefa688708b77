r"""Rational approximation behind the EMG density: the normal hazard and its remainder.

Everything the density of a normal plus an exponential needs of the error function is, for
:math:`x \ge 0`, a function of one smooth positive quantity,

.. math:: d(x) = \frac{1}{h(x) - x} - x, \qquad h(x) = \frac{\varphi(x)}{\Phi(-x)},

the second remainder of the continued fraction :math:`h = x + 1/(x + 2/(x + 3/(x + \dots)))`.
It falls from :math:`\sqrt{\pi/2}` at zero to :math:`2/x` at infinity. From it, by additions and
divisions of positive numbers only,

.. math:: e = h - x = \frac{1}{x + d}, \qquad 1 - x e = d e, \qquad
          \sqrt{\pi/2}\,\mathrm{erfcx}(x/\sqrt 2) = \frac{1}{h} = \frac{1}{x + e},

so that no difference of nearly equal numbers is ever taken, however large :math:`x`. With
:math:`s = 1/(x + 5)` and :math:`t = 1 - 10 s \in [-1, 1)`, :math:`d = s\,P(t)/Q(t)`. The
coefficients are minimax fits (linearised least squares, Lawson weights, 50 digits, 160 Chebyshev
nodes in :math:`t`); their largest relative errors are 2.5e-16 (degree 10) and 2.0e-8 (degree 5).
"""

from __future__ import annotations

import math
from typing import TypeVar

import jax
import numpy as np
from numpy.typing import NDArray
from scipy import special

_INV_SQRT_2 = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)

# Lowest degree first.
_NUMERATOR_64 = (
    3.6181624128808854,
    -0.8583075554911869,
    4.255634211842536,
    -1.0219484487352508,
    1.779386529196659,
    -0.39083161181551757,
    0.2997473404855795,
    -0.05220922803897437,
    0.01688305505309367,
    -0.0017247828838914587,
    0.00013958891650378522,
)
_DENOMINATOR_64 = (
    1.0,
    0.42129400719353355,
    1.2343264932869384,
    0.3810812819330859,
    0.5487181882461194,
    0.11497991768090736,
    0.10203289015755926,
    0.012533328112887649,
    0.007039993967458037,
    0.0003472888596257989,
    0.00011236626710172435,
)
_NUMERATOR_32 = (
    3.618162463948483,
    0.4084105359381469,
    1.8392326394046916,
    -0.1256051691149157,
    0.14306147975882064,
    -0.015908347535979375,
)
_DENOMINATOR_32 = (
    1.0,
    0.7713936739056032,
    0.7970204812282722,
    0.26407393080124514,
    0.09537442328359214,
    0.005814350876374393,
)


Array = TypeVar("Array", jax.Array, NDArray[np.float64])


def _horner(coefficients: tuple[float, ...], t: Array) -> Array:
    total = coefficients[-1] * t + coefficients[-2]
    for coefficient in coefficients[-3::-1]:
        total = total * t + coefficient
    return total


def hazard_remainders(x: Array) -> tuple[Array, Array]:
    """Remainders ``e = h(x) - x`` and ``d = 1/e - x`` of the normal hazard ``h``.

    Parameters
    ----------
    x : jax.Array or numpy.ndarray
        Non-negative, float32 or float64.

    Returns
    -------
    e, d : same type as `x`
        Same shape and dtype as `x`, accurate to a few units in the last place for all `x`.
    """
    double = x.dtype == np.float64
    s = 1.0 / (x + 5.0)
    t = 1.0 - 10.0 * s
    numerator = s * _horner(_NUMERATOR_64 if double else _NUMERATOR_32, t)
    denominator = _horner(_DENOMINATOR_64 if double else _DENOMINATOR_32, t)
    e = denominator / (x * denominator + numerator)
    return e, numerator / denominator


def half_erfcx(v: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Phi(-v) exp(v^2 / 2), that is erfcx(v / sqrt(2)) / 2, in NumPy."""
    half: NDArray[np.float64] = 0.5 * special.erfcx(v * _INV_SQRT_2)
    return half


def cdf_small_rho(
    r: NDArray[np.float64], b: NDArray[np.float64], rho: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Leading terms of F in rho: F exp(r^2 / 2) where r = -b < 0, and F where r > 0.

    .. math:: M(b) - M(b + \rho) &= \rho M e\,[1 - \rho d/2 + \rho^2 (2 - b d)/6 - \dots] \\
              F &= \Phi(r - \rho)\,(1 - e^{\rho(\rho/2 - r)}) + \rho\,\varphi(r - \rho/2) + \dots
    """
    with np.errstate(over="ignore", invalid="ignore"):
        e, d = hazard_remainders(b)
        bend = 1.0 - 0.5 * rho * d + rho * rho * (2.0 - b * d) / 6.0
        left = _INV_SQRT_2PI * rho * e / (b + e) * bend
        bump = _INV_SQRT_2PI * np.exp(-0.5 * (r - 0.5 * rho) ** 2)
        right = rho * bump - special.ndtr(r - rho) * np.expm1(rho * (0.5 * rho - r))
    return left, right
