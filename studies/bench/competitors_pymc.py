"""The model as a PyMC user would write it, sampled by nutpie (numba) with its default tuning.

`pymc.ExGaussian` is the normal density wherever the mean of the exponential is below a twentieth
of the normal's standard deviation; so its posterior differs slightly from that of the others.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import nutpie
import pymc as pm
import pytensor.tensor as pt

from bne.priors import Prior
from studies.bench.problems import PROCESSES, Problem, Run

CORES = 2


def run(
    problem: Problem,
    seed: int,
    cap: float,
    *,
    chains: int = 4,
    warmup: int | None = None,
    draws: int = 1000,
    exact: bool = False,
) -> Run:
    """Sample the model; `exact` takes Cholesky factors in place of the Hilbert-space basis."""
    begin = time.perf_counter()
    compiled = nutpie.compile_pymc_model(build(problem, exact=exact), backend="numba")
    nutpie.sample(compiled, draws=2, tune=2, chains=1, cores=1, seed=seed + 1, progress_bar=False)
    seconds_compile = time.perf_counter() - begin

    begin, begin_cpu = time.perf_counter(), time.process_time()
    sampler: Any = nutpie.sample(
        compiled,
        draws=draws,
        tune=warmup,
        chains=chains,
        cores=CORES,
        seed=seed,
        save_warmup=False,
        progress_bar=False,
        blocking=False,
    )
    while not _is_finished(sampler) and time.perf_counter() < begin + cap:
        time.sleep(0.05)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    if not _is_finished(sampler):
        return Run({}, seconds, seconds_compile, np.nan, cpu_seconds, finished=False)
    trace = sampler.wait()
    posterior = trace.posterior
    wanted = {name: posterior[name].to_numpy() for name in ("delta", "log_s", "log_lambda")}
    wanted |= {f"log_{name}": np.log(posterior[name].to_numpy()) for name in problem.priors}
    divergences = 1000.0 * float(trace.sample_stats["diverging"].mean())
    return Run(wanted, seconds, seconds_compile, divergences, cpu_seconds)


def _is_finished(sampler: Any) -> bool:
    try:
        return bool(sampler.is_finished)
    except TimeoutError:  # its threads were too busy to answer
        return False


def build(problem: Problem, *, exact: bool = False) -> pm.Model:
    """Step 3 given the mixture, non-centred."""
    with pm.Model() as model:
        sigma = _law(problem.priors, "sigma")
        fields = {name: _field(problem, name, exact) for name in PROCESSES}
        delta = pm.Deterministic("delta", fields["residual"])
        log_s = pm.Deterministic("log_s", fields["log_scale"])
        log_lambda = pm.Deterministic("log_lambda", problem.log_skew_mean + fields["log_skew"])
        pm.ExGaussian(
            "y",
            mu=problem.mixture + delta,
            sigma=sigma * pt.exp(log_s),
            nu=pt.exp(log_lambda),
            observed=problem.response,
        )
    return model


def _field(problem: Problem, name: str, exact: bool) -> Any:
    amplitude = _law(problem.priors, f"amplitude.{name}")
    length = _law(problem.priors, f"lengthscale.{name}")
    covariance = amplitude**2 * pm.gp.cov.Matern32(problem.dim, ls=length)
    if exact:
        return pm.gp.Latent(cov_func=covariance).prior(name, X=problem.coords, jitter=1e-8)
    gp = pm.gp.HSGP(
        m=problem.functions_per_axis(name),
        L=[float(0.5 * period) for period in problem.periods],
        cov_func=covariance,
    )
    return gp.prior(name, X=problem.coords)


def _law(priors: dict[str, Prior], name: str) -> Any:
    prior = priors[name]
    if prior.family == "half_normal":
        return pm.HalfNormal(name, sigma=prior.first)
    if prior.family == "inverse_gamma":
        return pm.InverseGamma(name, alpha=prior.first, beta=prior.second)
    return pm.LogNormal(name, mu=np.log(prior.first), sigma=prior.second)
