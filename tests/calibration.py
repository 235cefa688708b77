r"""Simulation-based calibration: does a sampler draw from the posterior that it claims to?

Parameters are drawn from the prior, data from the model given the parameters, draws from the
posterior given the data. For an exact sampler truth and draws are exchangeable, so the randomised
share of independent draws below the truth,

.. math:: u = (\#\{\mathrm{draws} < \mathrm{truth}\} + U)/(L + 1), \qquad U \sim U(0, 1),

is exactly uniform and its normal score :math:`z = \Phi^{-1}(u)` exactly standard normal, whatever
the posterior. Per scalar the ranks are tested by Kolmogorov-Smirnov and the spread by
:math:`\sum z^2 \sim \chi^2`; the sum of :math:`z^2` over all scalars of a run is tested over the
runs, which sees over-confidence that all scalars share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bne import inference, model, starts
from bne._convergence import ess_bulk, rhat
from bne.noise import emg_logpdf, normal_logpdf

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Problem:
    """A structure with everything but the response: `data.response` is replaced in every run."""

    structure: model.Structure
    data: model.ModelData
    mixture: FloatArray
    sites: tuple[int, ...]

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the quantities whose calibration is checked."""
        names = list(self.structure.hyperparameters)
        names += [f"trend[{i}]" for i in range(self.structure.n_trend)]
        for process in self.structure.names:
            if process == "weights":
                models = range(self.structure.n_models - 1)
                names += [f"omega{k}[{site}]" for k in models for site in self.sites]
            else:
                names += [f"{process}[{site}]" for site in self.sites]
        return (*names, "log_likelihood", "log_density")


@dataclass(frozen=True)
class Calibration:
    """What a series of runs left, one row per run.

    Parameters
    ----------
    names : (J,) the scalars.
    pit : (R, J) randomised share of draws below the truth.
    score : (R, J) truth minus posterior mean, over posterior sd.
    worst_rhat, least_ess, divergent : (R,) of the runs.
    """

    names: tuple[str, ...]
    pit: FloatArray
    score: FloatArray
    worst_rhat: FloatArray
    least_ess: FloatArray
    divergent: FloatArray

    def p_values(self) -> dict[str, float]:
        """P-value of every test."""
        z2 = stats.norm.ppf(self.pit) ** 2
        found = {}
        for j, name in enumerate(self.names):
            found[f"ranks of {name}"] = float(stats.kstest(self.pit[:, j], "uniform").pvalue)
            total, runs = z2[:, j].sum(), len(z2)
            tail = min(stats.chi2.cdf(total, runs), stats.chi2.sf(total, runs))
            found[f"spread of {name}"] = float(2.0 * tail)
        found["spread of all"] = _mean_exceeds_one(z2.mean(axis=1))
        return found

    def alarms(self, level: float = 1e-5) -> dict[str, float]:
        """P-values too small for an exact sampler: with probability `level` there are any.

        Half of the level goes to the spread of all scalars together, half to the other tests.
        """
        found = self.p_values()
        each = 0.5 * level / (len(found) - 1)
        limits = {name: 0.5 * level if name == "spread of all" else each for name in found}
        return {name: p for name, p in found.items() if p <= limits[name]}

    def summary(self) -> str:
        """A table to read: per scalar the p-values, and moments that are 0, 1 and 1 if exact."""
        p, z = self.p_values(), stats.norm.ppf(self.pit)
        lines = [
            f"{len(z)} runs: R-hat <= {self.worst_rhat.max():.2f} "
            f"(median {np.median(self.worst_rhat):.3f}), ESS >= {self.least_ess.min():.0f} "
            f"(median {np.median(self.least_ess):.0f}), divergent {self.divergent.mean():.3%} in "
            f"{np.sum(self.divergent > 0)} runs; spread of all p = {p['spread of all']:.2g}",
            f"{'':28s} p ranks p spread  mean z mean z^2  plain z^2",
        ]
        for j, name in enumerate(self.names):
            lines.append(
                f"{name:28s} {p['ranks of ' + name]:7.2g} {p['spread of ' + name]:8.2g} "
                f"{z[:, j].mean():7.2f} {np.mean(z[:, j] ** 2):8.2f} "
                f"{np.mean(self.score[:, j] ** 2):10.2f}"
            )
        return "\n".join(lines)


def calibrate(
    problem: Problem, settings: inference.Settings, *, runs: int, seed: int
) -> Calibration:
    """Simulate and sample `runs` times; run r is the same however many runs there are."""
    rows = [_run(problem, settings, np.random.default_rng([seed, r])) for r in range(runs)]
    return Calibration(problem.scalars, *(np.array(column) for column in zip(*rows, strict=True)))


def simulate(problem: Problem, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """A non-centred position (P,) from the prior and a response (n,) from the model given it."""
    structure = problem.structure
    data = problem.data.non_centred(structure)
    with jax.enable_x64(True):
        position = model.sample_prior(structure, data, rng, 1)[0]
        fields = {k: np.asarray(v) for k, v in _fields(structure, position, data).items()}
    location = problem.mixture
    if "weights" in structure:
        omega = model.softmax_weights(fields["weights"], structure.n_models, np)
        location = np.sum(np.asarray(data.base).T * omega, axis=0)
    location = location + np.asarray(data.trend) @ structure.trend(position)
    if "residual" in structure:
        location = location + fields["residual"][0]
    scale = np.exp(structure.log_sigma(position) + fields.get("log_scale", np.zeros((1, 1)))[0])
    response = location + scale * rng.standard_normal(len(location))
    if "log_skew" in structure:
        mean = np.exp(data.log_skew_mean + fields["log_skew"][0])
        response = response + rng.exponential(mean)
    return position, response


def scalars_of(problem: Problem, data: model.ModelData, positions: FloatArray) -> FloatArray:
    """The checked quantities (N, J) of non-centred positions (N, P)."""
    with jax.enable_x64(True):
        found = _scalars(
            problem.structure,
            positions,
            data.non_centred(problem.structure),
            problem.mixture,
            problem.sites,
        )
    return np.asarray(found)


def positions_of(draws: inference.Draws, data: model.ModelData) -> FloatArray:
    """Non-centred positions (chain * draw, P) of draws."""
    flat = {name: np.asarray(v).reshape(-1, *v.shape[2:]) for name, v in draws.gamma.items()}
    hyper = draws.hyper.reshape(-1, draws.hyper.shape[-1])
    trend = draws.trend.reshape(len(hyper), -1)
    with jax.enable_x64(True):
        data = data.non_centred(draws.structure)
        return np.asarray(_standardise(draws.structure, hyper, trend, flat, data))


def pit(truth: FloatArray, draws: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Randomised share (J,) of the draws (chain, draw, J) below the truth (J,).

    Of every scalar half as many draws are kept, evenly spaced, as were effectively independent.
    """
    flat = draws.reshape(-1, len(truth))
    kept = np.clip(0.5 * ess_bulk(draws), 4, len(flat)).astype(int)
    values = np.empty(len(truth))
    for j, count in enumerate(kept):
        thinned = flat[np.linspace(0, len(flat) - 1, count).round().astype(int), j]
        below, equal = np.sum(thinned < truth[j]), np.sum(thinned == truth[j])
        values[j] = (below + rng.uniform() * (1 + equal)) / (count + 1)
    return values


def _run(
    problem: Problem, settings: inference.Settings, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray, float, float, float]:
    structure = problem.structure
    truth, response = simulate(problem, rng)
    data = replace(problem.data, response=response).non_centred(structure)
    with jax.enable_x64(True):
        start = model.sample_prior(structure, data, rng, settings.chains)
    draws = inference.sample(
        structure,
        data,
        problem.mixture[None],
        starts.overdispersed(start, structure),
        settings,
        int(rng.integers(2**31)),
    )
    values = scalars_of(problem, data, positions_of(draws, data))
    values = values.reshape(settings.chains, settings.draws, -1)
    true = scalars_of(problem, data, truth[None])[0]
    flat = values.reshape(-1, len(true))
    return (
        pit(true, values, rng),
        (true - flat.mean(axis=0)) / flat.std(axis=0),
        float(np.max(rhat(values))),
        float(np.min(ess_bulk(values))),
        float(np.mean(draws.stats.get("diverging", 0.0))),
    )


def _mean_exceeds_one(values: FloatArray) -> float:
    """P-value of Student's test; conservative, as the values are skewed to the right."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return float(stats.t.sf((values.mean() - 1.0) / error, len(values) - 1))


@partial(jax.jit, static_argnames=("structure",))
def _fields(structure, position, data):
    return model.evaluate_fields(structure, position, data)[0]


@partial(jax.jit, static_argnames=("structure",))
def _standardise(structure, hyper, trend, gamma, data):
    def one(hyper, trend, gamma):
        blank = jnp.zeros(structure.dimension - structure.n_hyper - structure.n_trend)
        position = jnp.concatenate([hyper, trend, blank])
        for process in structure.processes:
            log_sd = model.log_prior_sd(structure, position, data, process)
            z = gamma[process.name] * jnp.exp(-log_sd)
            position = position.at[structure.blocks()[process.name]].set(z.ravel())
        return position

    return jax.vmap(one)(hyper, trend, gamma)


@partial(jax.jit, static_argnames=("structure", "sites"))
def _scalars(structure, positions, data, mixture, sites):
    chosen = jnp.array(sites)

    def one(position):
        fields, _ = model.evaluate_fields(structure, position, data)
        found = [position[: structure.n_hyper + structure.n_trend]]
        for name in structure.names:
            field = fields[name]
            if name == "weights":
                field = model.softmax_weights(field, structure.n_models)[:-1]
            found.append(field[:, chosen].ravel())
        log_density = model.log_density(structure, position, data, mixture)
        log_likelihood = _log_likelihood(structure, position, fields, data, mixture)
        return jnp.concatenate([*found, jnp.stack([log_likelihood, log_density])])

    return jax.vmap(one)(positions)


def _log_likelihood(structure, position, fields, data, mixture):
    location = model.mixture_of(structure, fields, data, mixture)
    location = location + data.trend @ structure.trend(position)
    if "residual" in structure:
        location = location + fields["residual"][0]
    log_scale = structure.log_sigma(position) + jnp.zeros(len(data.response))
    if "log_scale" in structure:
        log_scale = log_scale + fields["log_scale"][0]
    if "log_skew" in structure:
        log_skew = data.log_skew_mean + fields["log_skew"][0]
        return jnp.sum(emg_logpdf(data.response - location, log_scale, log_skew))
    return jnp.sum(normal_logpdf(data.response - location, log_scale))
