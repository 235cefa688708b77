r"""The log densities of the model, written like the equations.

.. math::
    y &= \sum_k f_k\,\omega_k + m_0 + \delta + \sigma s\,\varepsilon + m, \qquad
         \omega = \mathrm{softmax}(w_1, \ldots, w_K), \\
    w_k &\sim GP(0, a_w^2 k), \quad \delta \sim GP(0, a_d^2 k), \quad
    \log s \sim GP(0, \sigma_s^2 k), \quad \log\lambda \sim GP(\mu_\lambda, \sigma_l^2 k),

with :math:`\varepsilon \sim N(0, 1)` and *m* exponential with mean :math:`\lambda`. A `Structure`
says which terms are present, and every step of the inference is one structure of the same density:

========  =======  ========  =====  ====  =============================
step      weights  residual  scale  skew  mixture :math:`\sum f\omega`
========  =======  ========  =====  ====  =============================
1         sampled                         from the sampled weights
2                  sampled                given, one per draw of step 1
3                  sampled   yes    yes   given, one per draw of step 1
joint     sampled  sampled   yes    yes   from the sampled weights
========  =======  ========  =====  ====  =============================

Softmax weights depend only on differences of the :math:`w_k`, so K - 1 orthonormal contrasts *v*
with the same law are sampled: :math:`w = Bv` with :math:`B^TB = I` and columns that sum to zero
gives exactly the prior law of :math:`\omega`.

Coefficients are partially centred: :math:`\gamma = z\,\mathrm{sd}/\rho` with
:math:`z \sim N(0, \rho^2)`, where *sd* is the prior sd of the coefficient under the current
hyperparameters and :math:`\rho^2 = 1 + (\mathrm{sd}/\tau)^2` its spread. Far below the turn
:math:`\tau` the coefficient is non-centred, :math:`\gamma = z\,\mathrm{sd}`; far above it is
centred, :math:`\gamma = z\,\tau`. With :math:`\tau` the sd of what the data alone say about
:math:`\gamma`, the sd of *z* given data and hyperparameters is one whatever the hyperparameters
are: :math:`\mathrm{sd}(\gamma)^{-2} = \mathrm{sd}^{-2} + \tau^{-2} = (\rho/\mathrm{sd})^2`. The
law of :math:`\gamma` does not depend on :math:`\tau`; how easily it is sampled does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from bne.noise import emg_logpdf, normal_logpdf
from bne.priors import Prior
from bne.processes import Representation

__all__ = [
    "MU_LAMBDA",
    "NEVER",
    "Centring",
    "ModelData",
    "Process",
    "Structure",
    "coefficients",
    "evaluate_fields",
    "helmert",
    "information",
    "log_density",
    "log_hyperprior",
    "log_prior_sd",
    "mixture_of",
    "sample_prior",
    "site_laws",
    "softmax_weights",
]

FloatArray = NDArray[np.float64]
MU_LAMBDA = -3.0
NEVER = 100.0  # log of a turn that no prior sd reaches: not centred
PROCESSES = ("weights", "residual", "log_scale", "log_skew")


@dataclass(frozen=True)
class Process:
    """One Gaussian process of the model, or several that share their hyperparameters.

    Parameters
    ----------
    name : {"weights", "residual", "log_scale", "log_skew"}
    copies : int
        Independent copies: K - 1 for the weights, else 1.
    size : int
        Number of coefficients of a copy.
    learned_amplitude : bool
        Whether the amplitude is a parameter; else it is one.
    """

    name: str
    copies: int
    size: int
    learned_amplitude: bool = True


@dataclass(frozen=True)
class Structure:
    """Which terms of the model are present, and where their parameters stand in a position.

    A position is the vector (log sigma; per process log amplitude and log length-scale; trend
    coefficients; coefficients of the processes). Structures are hashable: compiled code is kept
    per structure.
    """

    processes: tuple[Process, ...]
    n_models: int
    n_trend: int = 0

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the hyperparameters, in the order of the position."""
        names = ["log_sigma"]
        for process in self.processes:
            if process.learned_amplitude:
                names.append(f"log_amplitude.{process.name}")
            names.append(f"log_lengthscale.{process.name}")
        return tuple(names)

    @property
    def dimension(self) -> int:
        """Length of a position."""
        return self.n_hyper + self.n_trend + sum(p.copies * p.size for p in self.processes)

    @property
    def n_hyper(self) -> int:
        """Number of hyperparameters."""
        return len(self.hyperparameters)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the processes present."""
        return tuple(p.name for p in self.processes)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def blocks(self) -> dict[str, slice]:
        """Where the coefficients of each process stand in a position."""
        start, found = self.n_hyper + self.n_trend, {}
        for p in self.processes:
            found[p.name] = slice(start, start + p.copies * p.size)
            start += p.copies * p.size
        return found

    def log_sigma(self, position: Any) -> Any:
        """Log of the global noise scale."""
        return position[..., 0]

    def log_amplitude(self, position: Any, name: str) -> Any:
        """Log amplitude of a process; zero where it is fixed at one."""
        key = f"log_amplitude.{name}"
        if key in self.hyperparameters:
            return position[..., self.hyperparameters.index(key)]
        return 0.0 * position[..., 0]

    def log_lengthscale(self, position: Any, name: str) -> Any:
        """Log length-scale of a process."""
        return position[..., self.hyperparameters.index(f"log_lengthscale.{name}")]

    def trend(self, position: Any) -> Any:
        """Standardised coefficients of the prior mean."""
        return position[..., self.n_hyper : self.n_hyper + self.n_trend]

    def standardised(self, position: Any, process: Process) -> Any:
        """Coefficients z (copies, size) of a process."""
        flat = position[..., self.blocks()[process.name]]
        return flat.reshape((*flat.shape[:-1], process.copies, process.size))


class Centring(NamedTuple):
    """Log prior sd at which each coefficient goes over from non-centred to centred."""

    log_turn: Any

    def log_spread(self, log_sd: Any, xp: Any = jnp) -> Any:
        """Log prior sd of z, where that of the coefficient is `log_sd`."""
        return 0.5 * xp.logaddexp(0.0, 2.0 * (log_sd - self.log_turn))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelData:
    """Everything that a log density is conditional on.

    Parameters
    ----------
    response : (n,)
    base : (n, K) predictions of the base models, in the units of the response.
    trend : (n, p) columns of the prior mean, times the prior sds of their coefficients.
    features : features of the sites under `representation`.
    representation : the representation that all processes share.
    priors : per hyperparameter of the structures, without the prefix ``log_``.
    centring : per process.
    log_skew_mean : prior mean of log lambda.
    """

    response: Any
    base: Any
    trend: Any
    features: Any
    representation: Representation
    priors: dict[str, Prior]
    centring: dict[str, Centring] = field(default_factory=dict)
    log_skew_mean: Any = MU_LAMBDA

    def non_centred(self, structure: Structure) -> ModelData:
        """Return a copy in which every coefficient is non-centred."""
        zero = {p.name: Centring(np.full(p.size, NEVER)) for p in structure.processes}
        return replace(self, centring=zero)


def helmert(n: int) -> FloatArray:
    """Orthonormal contrasts (n, n - 1): columns of unit length that sum to zero."""
    basis = np.zeros((n, n - 1))
    for j in range(1, n):
        basis[:j, j - 1] = 1.0
        basis[j, j - 1] = -j
        basis[:, j - 1] /= np.sqrt(j * (j + 1.0))
    return basis


def softmax_weights(contrasts: Any, n_models: int, xp: Any = jnp) -> Any:
    """Weights omega (K, ...) of contrast fields (K - 1, ...)."""
    scores = xp.tensordot(xp.asarray(helmert(n_models), dtype=contrasts.dtype), contrasts, 1)
    exponentials = xp.exp(scores - xp.max(scores, axis=0))
    return exponentials / xp.sum(exponentials, axis=0)


def log_prior_sd(structure: Structure, position: Any, data: ModelData, process: Process) -> Any:
    """Log prior sd (size,) of the coefficients of a process, given the hyperparameters."""
    per_unit = data.representation.log_sd(
        structure.log_lengthscale(position, process.name), process.size
    )
    return structure.log_amplitude(position, process.name) + per_unit


def coefficients(
    structure: Structure, position: Any, data: ModelData, process: Process
) -> tuple[Any, Any]:
    """Coefficients gamma (copies, size) and the log density of z given the hyperparameters."""
    log_sd = log_prior_sd(structure, position, data, process)
    z = structure.standardised(position, process)
    return _scaled(z, log_sd, data.centring[process.name].log_turn)


def _scaled(z: Any, log_sd: Any, log_turn: Any) -> tuple[Any, Any]:
    r"""Return gamma = z sd / rho and the log density of z, for :math:`\rho^2 = 1 + (sd/\tau)^2`."""
    square = 1.0 + jnp.exp(2.0 * (log_sd - log_turn))
    shrunk = z / jnp.sqrt(square)
    log_density_z = -0.5 * jnp.sum(shrunk * shrunk + jnp.log(square))
    return shrunk * jnp.exp(log_sd), log_density_z


def _rows(structure: Structure, position: Any, data: ModelData) -> tuple[Any, Any, Any]:
    """Coefficients (J, m) of all copies, their log length-scales (J,), and the log prior.

    Where all have the same size, one operation does for all.
    """
    kinds = [p for p in structure.processes for _ in range(p.copies)]
    log_l = jnp.stack([structure.log_lengthscale(position, p.name) for p in kinds])
    width = data.representation.n_coefficients
    if all(p.size == width for p in kinds):
        log_a = jnp.stack([structure.log_amplitude(position, p.name) for p in kinds])
        log_sd = log_a[:, None] + jax.vmap(lambda u: data.representation.log_sd(u, width))(log_l)
        z = position[structure.n_hyper + structure.n_trend :].reshape(-1, width)
        turns = jnp.stack([data.centring[p.name].log_turn for p in kinds])
        gamma, log_prior = _scaled(z, log_sd, turns)
        return gamma, log_l, log_prior
    found = [coefficients(structure, position, data, p) for p in structure.processes]
    rows = [jnp.pad(gamma, ((0, 0), (0, width - gamma.shape[1]))) for gamma, _ in found]
    return jnp.concatenate(rows), log_l, sum(term for _, term in found)


def evaluate_fields(
    structure: Structure, position: Any, data: ModelData
) -> tuple[dict[str, Any], Any]:
    """Fields of every process at the sites (copies, n), and the log prior of the coefficients."""
    if not structure.processes:
        return {}, jnp.zeros((), position.dtype)
    gamma, log_l, log_prior = _rows(structure, position, data)
    sizes = tuple(p.size for p in structure.processes for _ in range(p.copies))
    values = data.representation.evaluate(data.features, log_l, gamma, sizes)
    parts = jnp.split(values, np.cumsum([p.copies for p in structure.processes])[:-1])
    return dict(zip(structure.names, parts, strict=True)), log_prior


def mixture_of(structure: Structure, fields: dict[str, Any], data: ModelData, given: Any) -> Any:
    r"""Return :math:`\sum_k f_k\omega_k`, from sampled weights or as given."""
    if "weights" not in structure:
        return given
    omega = softmax_weights(fields["weights"], structure.n_models)
    return jnp.sum(data.base.T * omega, axis=0)


def log_density(structure: Structure, position: Any, data: ModelData, mixture: Any) -> Any:
    """Log posterior density of a position, up to a constant.

    Parameters
    ----------
    structure : Structure
        Which terms are present.
    position : (dimension,)
    data : ModelData
    mixture : (n,)
        The mixture at the sites; not used where the structure samples the weights.
    """
    (location, log_scale, log_skew), log_prior = site_laws(structure, position, data, mixture)
    residual = data.response - location
    if "log_skew" in structure:
        log_likelihood = jnp.sum(emg_logpdf(residual, log_scale, log_skew))
    else:
        log_likelihood = jnp.sum(normal_logpdf(residual, log_scale))
    return log_likelihood + log_prior + log_hyperprior(structure, position, data)


def site_laws(
    structure: Structure, position: Any, data: ModelData, mixture: Any
) -> tuple[tuple[Any, Any, Any], Any]:
    r"""Location, :math:`\log\sigma s` and :math:`\log\lambda` (n,) at the sites.

    And the log prior density of everything but the hyperparameters. Without skewness the third is
    its prior mean.
    """
    fields, log_prior = evaluate_fields(structure, position, data)
    location = mixture_of(structure, fields, data, mixture)
    if structure.n_trend:
        beta = structure.trend(position)
        location = location + data.trend @ beta
        log_prior = log_prior - 0.5 * jnp.sum(beta**2)
    if "residual" in structure:
        location = location + fields["residual"][0]
    log_scale = structure.log_sigma(position) + jnp.zeros(len(data.response), position.dtype)
    if "log_scale" in structure:
        log_scale = log_scale + fields["log_scale"][0]
    log_skew = data.log_skew_mean + jnp.zeros_like(log_scale)
    if "log_skew" in structure:
        log_skew = log_skew + fields["log_skew"][0]
    return (location, log_scale, log_skew), log_prior


def log_hyperprior(structure: Structure, position: Any, data: ModelData) -> Any:
    """Log prior density of the hyperparameters of a position, up to a constant."""
    return sum(
        data.priors[name.removeprefix("log_")].log_density(position[i])
        for i, name in enumerate(structure.hyperparameters)
    )


def information(log_scale: Any, log_skew: Any, skewed: bool) -> tuple[Any, Any, Any]:
    r"""Fisher information (n,) of every site about mean, log scale and log skewness.

    As if the noise were normal with the variance :math:`v = \sigma^2 s^2 + \lambda^2`:
    :math:`1/v`, :math:`2(\sigma^2s^2/v)^2`, and :math:`\lambda^2/v + 2(\lambda^2/v)^2`, as
    :math:`\lambda` also moves the mean.
    """
    normal = jnp.exp(2.0 * log_scale)
    exponential = jnp.exp(2.0 * log_skew) if skewed else 0.0 * normal
    variance = normal + exponential
    share = exponential / variance
    return 1.0 / variance, 2.0 * (normal / variance) ** 2, share + 2.0 * share**2


def sample_prior(
    structure: Structure, data: ModelData, rng: np.random.Generator, size: int
) -> FloatArray:
    """Draw `size` positions (size, dimension) from the prior, in the given centring."""
    hyper = [
        data.priors[name.removeprefix("log_")].sample_log(rng, size)
        for name in structure.hyperparameters
    ]
    rest = rng.standard_normal((size, structure.dimension - structure.n_hyper))
    positions = np.concatenate([np.stack(hyper, axis=1), rest], axis=1)
    for process in structure.processes:
        for position in positions:
            log_sd = log_prior_sd(structure, position, data, process)
            spread = np.exp(np.asarray(data.centring[process.name].log_spread(log_sd)))
            position[structure.blocks()[process.name]] *= np.tile(spread, process.copies)
    return positions
