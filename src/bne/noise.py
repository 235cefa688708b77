r"""The noise: a normal plus an independent exponential, the EMG family.

.. math:: y = \mu + \sigma\,\varepsilon + m, \qquad \varepsilon \sim N(0, 1),
          \quad m \sim \mathrm{Exp}(\lambda),

with ``loc`` :math:`\mu`, ``scale`` :math:`\sigma > 0` and ``skew`` :math:`\lambda \ge 0`, the
*mean* of the exponential; all three in the units of y. Zero skew is the plain normal. Throughout,

.. math:: r = (y - \mu)/\sigma, \qquad \rho = \sigma/\lambda, \qquad v = \rho - r,

and the density has two exact forms, each free of cancellation on its own side of :math:`v = 0`:

.. math:: f(y) = \frac{\rho}{\sigma}\,\varphi(r)\,\frac{\Phi(-v)}{\varphi(v)}
               = \frac{\rho}{\sigma}\,e^{\rho(\rho/2 - r)}\,\Phi(-v).

Three layers: JAX log densities in log-parameters for the samplers (``emg_logpdf``,
``normal_logpdf``), unvalidated NumPy kernels for prediction (``emg_cdf_pdf`` and its kin; float64,
broadcasting; fastest in blocks of about 1e4 values, whose dozen temporaries stay in the processor's
cache), and the validated class `EMG`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import ArrayLike as NumpyArrayLike
from numpy.typing import NDArray
from scipy import special

from bne._erfcx import cdf_small_rho, half_erfcx, hazard_remainders

__all__ = [
    "EMG",
    "emg_abs_deviation",
    "emg_cdf",
    "emg_cdf_pdf",
    "emg_crps",
    "emg_logcdf",
    "emg_logpdf",
    "emg_logpdf_numpy",
    "emg_ppf",
    "emg_sf",
    "normal_logpdf",
]

FloatArray = NDArray[np.float64]
Numbers = FloatArray | float
RandomState = int | np.random.Generator | np.random.SeedSequence | None

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_INV_SQRT_2 = math.sqrt(0.5)
_INV_SQRT_PI = 1.0 / math.sqrt(math.pi)


# Log densities for the samplers (JAX)


def emg_logpdf(residual: ArrayLike, log_scale: ArrayLike, log_skew: ArrayLike) -> jax.Array:
    r"""Log density of normal-plus-exponential noise, with analytic derivatives.

    With :math:`h(v) = \varphi(v)/\Phi(-v)`, :math:`e = h - v` and :math:`d = 1/e - v`,

    ======================================  ======================  ============================
    derivative of log f                     :math:`v > 0`           :math:`v \le 0`
    ======================================  ======================  ============================
    :math:`\sigma\,\partial_{\rm residual}` :math:`e - r`           :math:`h - \rho`
    :math:`\partial_{\log\sigma}`           :math:`r^2-1+e(d-2r)`   :math:`\rho^2 - (r + \rho) h`
    :math:`\partial_{\log\lambda}`          :math:`e (r - d)`       :math:`\rho(h - v) - 1`
    ======================================  ======================  ============================

    The two columns are equal; each is written where it subtracts no large numbers, so that both
    tails and the normal limit (:math:`\rho \to \infty`: :math:`-r`, :math:`r^2 - 1`,
    :math:`r/\rho`) keep full precision. Value and derivatives share one rational function.

    Parameters
    ----------
    residual : array
        y - loc, in the units of y. Its precision, float32 or float64, is the one worked in.
    log_scale, log_skew : array
        Logarithms of the normal's standard deviation and of the exponential's mean, broadcast
        against `residual` and cast to its precision.

    Returns
    -------
    jax.Array
        Log density in the broadcast shape. Standardised quantities saturate at 1e150 (float64) or
        1e18 (float32), so that values and derivatives stay finite for finite arguments.
    """
    residual = _floating(residual)
    log_scale = jnp.asarray(log_scale, residual.dtype)
    log_skew = jnp.asarray(log_skew, residual.dtype)
    value: jax.Array = _emg_logpdf(residual, log_scale, log_skew)
    return value


def normal_logpdf(residual: ArrayLike, log_scale: ArrayLike) -> jax.Array:
    r"""Log density of normal noise, :math:`-\log\sigma - r^2/2 - \log(2\pi)/2`.

    Parameters
    ----------
    residual : array
        y - loc, in the units of y. Its precision, float32 or float64, is the one worked in.
    log_scale : array
        Logarithm of the standard deviation, broadcast against `residual`.

    Returns
    -------
    jax.Array
        Log density in the broadcast shape.
    """
    residual = _floating(residual)
    log_scale = jnp.asarray(log_scale, residual.dtype)
    value: jax.Array = _normal_logpdf(residual, log_scale)
    return value


def _floating(values: ArrayLike) -> jax.Array:
    array = jnp.asarray(values)
    if array.dtype in (jnp.float32, jnp.float64):
        return array
    return array.astype(jnp.promote_types(array.dtype, jnp.result_type(float)))


def _largest(array: jax.Array) -> float:
    return 1e150 if array.dtype == jnp.float64 else 1e18


def _standardise(residual: jax.Array, log_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = _largest(residual)
    inverse_scale = jnp.minimum(jnp.exp(-log_scale), largest)
    return jnp.clip(residual * inverse_scale, -largest, largest), inverse_scale


@jax.custom_jvp
def _normal_logpdf(residual: jax.Array, log_scale: jax.Array) -> jax.Array:
    r, _ = _standardise(residual, log_scale)
    return -0.5 * r * r - log_scale - _HALF_LOG_2PI


@_normal_logpdf.defjvp
def _normal_logpdf_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    r, inverse_scale = _standardise(*primals)
    slope = -r * inverse_scale * tangents[0] + (r * r - 1.0) * tangents[1]
    return _normal_logpdf(*primals), slope


def _emg_terms(
    residual: jax.Array, log_scale: jax.Array, log_skew: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log density and its derivatives by residual, log_scale and log_skew."""
    r, inverse_scale = _standardise(residual, log_scale)
    rho = jnp.minimum(jnp.exp(log_scale - log_skew), _largest(residual))
    v = rho - r
    body = v > 0.0
    x = jnp.where(body, v, -v)
    e, d = hazard_remainders(x)
    mills = 1.0 / (x + e)

    phi = _INV_SQRT_2PI * jnp.exp(-0.5 * x * x)
    upper = 1.0 - phi * mills
    h = phi / upper

    exponent = jnp.where(body, -0.5 * r * r, rho * (0.5 * rho - r))
    factor = rho * jnp.where(body, _INV_SQRT_2PI * mills, upper)
    tiny = float(np.finfo(factor.dtype).tiny)
    value = exponent - log_scale + jnp.log(jnp.maximum(factor, tiny))

    by_residual = inverse_scale * jnp.where(body, e - r, h - rho)
    by_scale = jnp.where(body, r * r - 1.0 + e * (d - 2.0 * r), rho * rho - (r + rho) * h)
    by_skew = jnp.where(body, e * (r - d), rho * (h + x) - 1.0)
    return value, by_residual, by_scale, by_skew


@jax.custom_jvp
def _emg_logpdf(residual: jax.Array, log_scale: jax.Array, log_skew: jax.Array) -> jax.Array:
    return _emg_terms(residual, log_scale, log_skew)[0]


@_emg_logpdf.defjvp
def _emg_logpdf_jvp(
    primals: tuple[jax.Array, jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    value, *slopes = _emg_terms(*primals)
    return value, slopes[0] * tangents[0] + slopes[1] * tangents[1] + slopes[2] * tangents[2]


# Kernels for prediction (NumPy): no validation, float64, any broadcastable shapes


def _split(
    y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return r, rho, a and g such that skew * density = exp(a) * g."""
    with np.errstate(divide="ignore", over="ignore"):
        r = np.asarray((y - loc) / scale)
        rho = np.minimum(scale / np.asarray(skew), 1e100)
        v = rho - r
        half = half_erfcx(np.abs(v))
        g = np.where(v > 0.0, half, 1.0 - np.exp(-0.5 * v * v) * half)
        a = np.where(v > 0.0, -0.5 * r * r, rho * (0.5 * rho - r))
    return r, rho, a, g


def emg_logpdf_numpy(y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers) -> FloatArray:
    """Log density, the NumPy twin of `emg_logpdf` in natural parameters."""
    _, rho, a, g = _split(y, loc, scale, skew)
    with np.errstate(divide="ignore"):
        value: FloatArray = a + np.log(rho * g) - np.log(scale)
    return value


def emg_cdf_pdf(
    y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers
) -> tuple[FloatArray, FloatArray]:
    r"""Distribution function and density at the price of one.

    :math:`F = \Phi(r) - \lambda f`. The error of F is of the order of 1e-16 in absolute terms;
    where a tiny F must be known to relative precision, use `emg_logcdf`.
    """
    r, rho, a, g = _split(y, loc, scale, skew)
    weight = np.exp(a)
    cdf: FloatArray = np.maximum(special.ndtr(r) - weight * g, 0.0)
    pdf: FloatArray = weight * (rho * g) / scale
    return cdf, pdf


def emg_cdf(y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers) -> FloatArray:
    """Distribution function; see `emg_cdf_pdf`."""
    r, _, a, g = _split(y, loc, scale, skew)
    cdf: FloatArray = np.maximum(special.ndtr(r) - np.exp(a) * g, 0.0)
    return cdf


def emg_sf(y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers) -> FloatArray:
    r"""Survival function :math:`\Phi(-r) + \lambda f`, to full relative precision."""
    r, _, a, g = _split(y, loc, scale, skew)
    sf: FloatArray = np.minimum(special.ndtr(-r) + np.exp(a) * g, 1.0)
    return sf


def emg_logcdf(y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers) -> FloatArray:
    r"""Log distribution function, to about 1e-10 in absolute terms however far left.

    With :math:`M = 1/h`, :math:`F = \varphi(r)\,[M(-r) - M(\rho - r)]` where :math:`r < 0` and
    :math:`1 - \Phi(-r) - \lambda f` elsewhere; for small :math:`\rho`, where both would cancel,
    see `cdf_small_rho`.
    """
    r, rho, a, g = _split(y, loc, scale, skew)
    with np.errstate(divide="ignore", invalid="ignore"):
        b = np.clip(-r, 0.0, 1e100)
        left, right = cdf_small_rho(r, b, rho)
        left = np.where(rho < 1e-4 * np.maximum(b, 1.0), left, half_erfcx(b) - g)
        survival = np.minimum(special.ndtr(-r) + np.exp(a) * g, 1.0)
        right = np.where(rho < 1e-5, np.log(right), np.log1p(-survival))
        value: FloatArray = np.where(r > 0.0, right, a + np.log(left))[()]
    return value


def emg_ppf(p: Numbers, loc: Numbers, scale: Numbers, skew: Numbers) -> FloatArray:
    """Quantile function: loc + scale * z, with z found by Newton's method (see `_newton`)."""
    p, k, _ = np.broadcast_arrays(p, np.asarray(skew) / scale, loc)
    z = np.where(p == 0.0, -np.inf, np.where(p == 1.0, np.inf, np.nan))
    lower = (p > 0.0) & (p < 0.5)
    upper = (p >= 0.5) & (p < 1.0)
    z[lower] = _lower_quantile(p[lower], k[lower])
    z[upper] = _upper_quantile(p[upper], k[upper])
    quantile: FloatArray = loc + scale * z
    return quantile


def _lower_quantile(p: FloatArray, k: FloatArray) -> FloatArray:
    half = 0.5 * p
    start = np.maximum(special.ndtri(p), special.ndtri(half) - k * np.log1p(-half))

    def gap_and_slope(z: FloatArray, p: FloatArray, k: FloatArray) -> tuple[FloatArray, FloatArray]:
        logcdf = emg_logcdf(z, 0.0, 1.0, k)
        return logcdf - np.log(p), np.exp(emg_logpdf_numpy(z, 0.0, 1.0, k) - logcdf)

    return _newton(gap_and_slope, start, p, k)


def _upper_quantile(p: FloatArray, k: FloatArray) -> FloatArray:
    half = 0.5 * (1.0 - p)
    start = -special.ndtri(half) - k * np.log(half)

    def gap_and_slope(z: FloatArray, p: FloatArray, k: FloatArray) -> tuple[FloatArray, FloatArray]:
        r, rho, a, g = _split(z, 0.0, 1.0, k)
        weight = np.exp(a)
        sf = special.ndtr(-r) + weight * g
        return np.log1p(-p) - np.log(sf), weight * (rho * g) / sf

    return _newton(gap_and_slope, start, p, k)


def _newton(
    gap_and_slope: Callable[..., tuple[FloatArray, FloatArray]],
    start: FloatArray,
    p: FloatArray,
    k: FloatArray,
) -> FloatArray:
    """Root of a gap in log probability, from a start known to lie on its steep side.

    log F and log(1 - F) are concave, so the iteration is monotone, and quadratic once the gap is
    below one: a last step taken from a gap under 1e-8 leaves rounding error only.
    """
    z = start
    active = np.arange(z.size)
    for _ in range(100):
        gap, slope = gap_and_slope(z[active], p[active], k[active])
        z[active] -= gap / slope
        active = active[np.abs(gap) > 1e-8]
        if not active.size:
            break
    return z


def emg_abs_deviation(y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers) -> FloatArray:
    r"""Mean absolute deviation E|Y - y| of an EMG variable Y from y.

    .. math:: E|Y - y| = \sigma\,[2\varphi(r) + r(2\Phi(r) - 1)] + \lambda\,[2(1 - F(y)) - 1].

    It also gives the spread between two members of a mixture: the difference of two exponentials is
    one of them with probability :math:`\lambda_i/(\lambda_i + \lambda_j)`, else minus the other, so
    :math:`E|Y_i - Y_j|` is that mean of the deviations from 0 with locs
    :math:`\pm(\mu_i - \mu_j)`, scale :math:`(\sigma_i^2 + \sigma_j^2)^{1/2}` and skews
    :math:`\lambda_i`, :math:`\lambda_j`.
    """
    r, _, a, g = _split(y, loc, scale, skew)
    survival = special.ndtr(-r) + np.exp(a) * g
    folded = 2.0 * _INV_SQRT_2PI * np.exp(-0.5 * r * r) + r * special.erf(r * _INV_SQRT_2)
    deviation: FloatArray = scale * folded + skew * (2.0 * survival - 1.0)
    return deviation


def emg_crps(y: Numbers, loc: Numbers, scale: Numbers, skew: Numbers) -> FloatArray:
    """Continuous ranked probability score; the formula is in `EMG.crps`."""
    with np.errstate(divide="ignore", over="ignore"):
        spread = scale * _INV_SQRT_PI + 0.5 * skew * special.erfcx(scale / np.asarray(skew))
    score: FloatArray = emg_abs_deviation(y, loc, scale, skew) - spread
    return score


# The public class


class EMG:
    r"""Normal plus independent exponential: the law of loc + scale * e + m.

    e is standard normal and m exponential with mean `skew`, so that

    .. math:: f(y) = \frac{1}{\lambda} \exp\Big(\frac{\rho^2}{2} - \rho r\Big)\,\Phi(r - \rho),
              \qquad F(y) = \Phi(r) - \lambda f(y),

    with :math:`r = (y - \mu)/\sigma` and :math:`\rho = \sigma/\lambda`.

    Parameters
    ----------
    loc : array_like
        Mean of the normal part, in the units of y.
    scale : array_like
        Standard deviation of the normal part, positive.
    skew : array_like, default 0
        Mean (and standard deviation) of the exponential part, non-negative; zero is the normal.

    Attributes
    ----------
    loc, scale, skew : ndarray of float64
        As given.
    shape : tuple of int
        Their broadcast shape, against which the argument of every method broadcasts in turn.

    Examples
    --------
    >>> law = EMG(loc=10.0, scale=1.0, skew=2.0)
    >>> float(law.mean()), float(law.var())
    (12.0, 5.0)
    """

    def __init__(
        self, loc: NumpyArrayLike, scale: NumpyArrayLike, skew: NumpyArrayLike = 0.0
    ) -> None:
        self.loc = _numbers("loc", loc)
        self.scale = _numbers("scale", scale)
        self.skew = _numbers("skew", skew)
        _require(np.isfinite(self.loc), "loc must be finite", self.loc)
        proper = np.isfinite(self.scale) & (self.scale > 0.0)
        _require(proper, "scale must be positive and finite", self.scale)
        proper = np.isfinite(self.skew) & (self.skew >= 0.0)
        _require(proper, "skew must be non-negative and finite", self.skew)
        try:
            self.shape = np.broadcast_shapes(self.loc.shape, self.scale.shape, self.skew.shape)
        except ValueError:
            shapes = f"{self.loc.shape}, {self.scale.shape} and {self.skew.shape}"
            message = f"loc, scale and skew have shapes {shapes}, which do not broadcast together."
            raise ValueError(message) from None

    def __repr__(self) -> str:
        """Name the law and its parameters."""
        return f"EMG(loc={self.loc!r}, scale={self.scale!r}, skew={self.skew!r})"

    def logpdf(self, y: NumpyArrayLike) -> FloatArray:
        """Log density at `y`, in -log(units of y)."""
        return emg_logpdf_numpy(_numbers("y", y), self.loc, self.scale, self.skew)

    def pdf(self, y: NumpyArrayLike) -> FloatArray:
        """Density at `y`, in 1 / (units of y)."""
        return emg_cdf_pdf(_numbers("y", y), self.loc, self.scale, self.skew)[1]

    def cdf(self, y: NumpyArrayLike) -> FloatArray:
        """Probability of a value up to `y`."""
        return emg_cdf(_numbers("y", y), self.loc, self.scale, self.skew)

    def sf(self, y: NumpyArrayLike) -> FloatArray:
        """Probability of a value above `y`, to full relative precision."""
        return emg_sf(_numbers("y", y), self.loc, self.scale, self.skew)

    def logcdf(self, y: NumpyArrayLike) -> FloatArray:
        """Logarithm of the probability of a value up to `y`, without underflow."""
        return emg_logcdf(_numbers("y", y), self.loc, self.scale, self.skew)

    def ppf(self, p: NumpyArrayLike) -> FloatArray:
        """Quantile: the value that is exceeded with probability 1 - p.

        Parameters
        ----------
        p : array_like
            Probabilities in [0, 1]; 0 and 1 give minus and plus infinity.

        Returns
        -------
        ndarray
            In the units of y.

        Raises
        ------
        ValueError
            If a probability is outside [0, 1] or not a number.
        """
        levels = _numbers("p", p)
        _require((levels >= 0.0) & (levels <= 1.0), "p must lie between 0 and 1", levels)
        return emg_ppf(levels, self.loc, self.scale, self.skew)

    def mean(self) -> FloatArray:
        """Return the mean, loc + skew."""
        return np.broadcast_to(self.loc + self.skew, self.shape)

    def var(self) -> FloatArray:
        """Return the variance, scale^2 + skew^2."""
        return np.broadcast_to(self.scale**2 + self.skew**2, self.shape)

    def std(self) -> FloatArray:
        """Return the standard deviation, the root of scale^2 + skew^2."""
        return np.broadcast_to(np.hypot(self.scale, self.skew), self.shape)

    def rvs(
        self, size: int | tuple[int, ...] | None = None, random_state: RandomState = None
    ) -> FloatArray:
        """Draw independent values.

        Parameters
        ----------
        size : int or tuple of int, optional
            Shape of the result, to which the parameters broadcast; their own shape by default.
        random_state : int, numpy.random.Generator or numpy.random.SeedSequence, optional
            The same int gives the same draws; a Generator is advanced; None is not reproducible.

        Returns
        -------
        ndarray
            In the units of y.
        """
        shape = self.shape if size is None else tuple(np.atleast_1d(size).tolist())
        try:
            fits = np.broadcast_shapes(shape, self.shape) == shape
        except ValueError:
            fits = False
        if not fits:
            message = f"size {shape} does not fit parameters of shape {self.shape}."
            raise ValueError(message)
        generator = np.random.default_rng(random_state)
        normal = self.loc + self.scale * generator.standard_normal(shape)
        draws: FloatArray = normal + self.skew * generator.standard_exponential(shape)
        return draws

    def crps(self, y: NumpyArrayLike) -> FloatArray:
        r"""Continuous ranked probability score of the law for the outcome `y`; lower is better.

        .. math:: \mathrm{CRPS} &= \int (F(t) - 1\{t \ge y\})^2\,dt \\
                  &= E|Y - y| - \tfrac12 E|Y - Y'| \\
                  &= \sigma\Big[2\varphi(r) + r(2\Phi(r) - 1) - \frac{1}{\sqrt\pi}\Big]
                     + \lambda\Big[2(1 - F(y)) - 1 - \tfrac12\mathrm{erfcx}(\rho)\Big].

        Parameters
        ----------
        y : array_like
            Outcomes.

        Returns
        -------
        ndarray
            In the units of y.
        """
        return emg_crps(_numbers("y", y), self.loc, self.scale, self.skew)


def _numbers(name: str, values: NumpyArrayLike) -> FloatArray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        message = f"{name} must be a number or an array of numbers."
        raise ValueError(message) from None


def _require(proper: NDArray[np.bool_], demand: str, values: FloatArray) -> None:
    wrong = np.flatnonzero(~np.asarray(proper))
    if wrong.size:
        first = f"{np.ravel(values)[wrong[0]]:g}"
        place = f" at position {wrong[0]}" if values.ndim else ""
        count = f" ({wrong.size} of {values.size} values are wrong)" if wrong.size > 1 else ""
        message = f"{demand}; found {first}{place}{count}."
        raise ValueError(message)
