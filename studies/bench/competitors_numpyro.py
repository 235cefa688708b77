"""The model as a NumPyro user would write it, sampled by NUTS with its default settings.

The chains are advanced by NumPyro's own kernel, block by block instead of by `MCMC.run`: the
transitions are the same, compilation can be timed by itself and a run that takes too long can be
stopped with the draws it has. Two threads work on two chains at a time, each chain by itself, so
that both cores are used and no chain waits for the longest trajectory of the others, as chains do
with ``vectorised`` (which here keeps to one core).
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr
from numpy.typing import NDArray
from numpyro.contrib.hsgp.approximation import hsgp_matern
from numpyro.infer import NUTS

from bne.noise import emg_logpdf
from bne.priors import Prior
from studies.bench.problems import PROCESSES, Problem, Run

BLOCK = 20
THREADS = 2


def run(
    problem: Problem,
    seed: int,
    cap: float,
    *,
    chains: int = 4,
    warmup: int = 1000,
    draws: int = 1000,
    exact: bool = False,
    stable: bool = False,
    vectorised: bool = False,
) -> Run:
    """Sample the model.

    `exact` takes Cholesky factors in place of the Hilbert-space basis, `stable` bne's own log
    density of the noise in place of the textbook's, which leaves the sampler as the difference.
    """
    numpyro.enable_x64()
    kernel = NUTS(partial(model, problem, exact=exact, stable=stable))
    keys = jax.random.split(jax.random.PRNGKey(seed), chains)
    groups = [keys] if vectorised else list(keys)

    begin = time.perf_counter()
    states = [kernel.init(key, warmup, None, (), {}) for key in groups]

    def advance(state: Any) -> Any:
        def transition(state: Any, _: None) -> Any:
            state = kernel.sample(state, (), {})
            return state, (state.z, state.diverging)

        return jax.lax.scan(transition, state, None, length=BLOCK)

    step = jax.jit(advance).lower(states[0]).compile()
    seconds_compile = time.perf_counter() - begin

    begin, begin_cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(THREADS) as pool:
        sample = partial(_chain, step, warmup=warmup, draws=draws, deadline=begin + cap)
        found = list(pool.map(sample, states))
    spent = time.perf_counter() - begin, seconds_compile, time.process_time() - begin_cpu
    return _collect(problem, kernel, found, draws, spent, vectorised)


def model(problem: Problem, *, exact: bool = False, stable: bool = False) -> None:
    """Step 3 given the mixture, non-centred."""
    law = partial(_law, problem.priors)
    sigma = numpyro.sample("sigma", law("sigma"))
    fields = {}
    for name in PROCESSES:
        amplitude = numpyro.sample(f"amplitude.{name}", law(f"amplitude.{name}"))
        length = numpyro.sample(f"lengthscale.{name}", law(f"lengthscale.{name}"))
        with numpyro.handlers.scope(prefix=name):
            fields[name] = _field(problem, name, amplitude, length, exact)
    delta = numpyro.deterministic("delta", fields["residual"])
    log_s = numpyro.deterministic("log_s", fields["log_scale"])
    log_lambda = numpyro.deterministic("log_lambda", problem.log_skew_mean + fields["log_skew"])
    residual = problem.response - problem.mixture - delta
    if stable:
        log_likelihood = emg_logpdf(residual, jnp.log(sigma) + log_s, log_lambda)
    else:
        log_likelihood = emg_log_prob(residual, sigma * jnp.exp(log_s), jnp.exp(log_lambda))
    numpyro.factor("y", jnp.sum(log_likelihood))


def emg_log_prob(residual: Any, scale: Any, skew: Any) -> Any:
    """Log density of normal plus exponential noise, as the textbook has it."""
    r, rho = residual / scale, scale / skew
    return -jnp.log(skew) + 0.5 * rho**2 - rho * r + log_ndtr(r - rho)


def _field(problem: Problem, name: str, amplitude: Any, length: Any, exact: bool) -> Any:
    if not exact:
        return hsgp_matern(
            x=jnp.asarray(problem.centred),
            nu=1.5,
            alpha=amplitude**2,
            length=length,
            ell=[float(0.5 * period) for period in problem.periods],
            m=problem.functions_per_axis(name),
        )
    gap = problem.coords[:, None] - problem.coords
    t = math.sqrt(3.0) * np.sqrt(np.sum(gap**2, axis=2)) / length
    n = len(problem.coords)
    factor = jnp.linalg.cholesky((1.0 + t) * jnp.exp(-t) + 1e-8 * jnp.eye(n))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([n]).to_event(1))
    return amplitude * (factor @ beta)


def _law(priors: dict[str, Prior], name: str) -> Any:
    prior = priors[name]
    if prior.family == "half_normal":
        return dist.HalfNormal(prior.first)
    if prior.family == "inverse_gamma":
        return dist.InverseGamma(prior.first, prior.second)
    return dist.LogNormal(np.log(prior.first), prior.second)


def _chain(
    step: Any, state: Any, *, warmup: int, draws: int, deadline: float
) -> tuple[list[Any], list[Any]]:
    """Draws and divergences of one chain after warm-up, as far as the time allows."""
    kept, diverging = [], []
    for done in range(0, warmup + draws, BLOCK):
        state, (z, divergent) = jax.block_until_ready(step(state))
        if done >= warmup:
            kept.append(jax.tree.map(np.asarray, z))
            diverging.append(np.asarray(divergent))
        if time.perf_counter() > deadline:
            break
    return kept, diverging


def _collect(
    problem: Problem,
    kernel: NUTS,
    found: list[tuple[list[Any], list[Any]]],
    draws: int,
    spent: tuple[float, float, float],
    vectorised: bool,
) -> Run:
    seconds, seconds_compile, cpu_seconds = spent
    blocks = min(len(kept) for kept, _ in found)
    if blocks == 0:
        return Run({}, seconds, seconds_compile, np.nan, cpu_seconds, finished=False)

    def stack(chains: list[list[NDArray[Any]]]) -> NDArray[Any]:
        joined = np.stack([np.concatenate(chain[:blocks])[:draws] for chain in chains])
        return np.moveaxis(joined[0], 1, 0) if vectorised else joined

    names = found[0][0][0]
    z = {name: stack([[part[name] for part in kept] for kept, _ in found]) for name in names}
    diverging = stack([divergent for _, divergent in found])
    shape = diverging.shape
    flat = {name: jnp.asarray(v.reshape(-1, *v.shape[2:])) for name, v in z.items()}
    constrain = jax.jit(lambda part: jax.lax.map(kernel.postprocess_fn((), {}), part))
    values = {k: np.asarray(v).reshape(*shape, *v.shape[1:]) for k, v in constrain(flat).items()}
    wanted = {name: values[name] for name in ("delta", "log_s", "log_lambda")}
    wanted |= {f"log_{name}": np.log(values[name]) for name in problem.priors}
    divergences = 1000.0 * float(diverging.mean())
    return Run(wanted, seconds, seconds_compile, divergences, cpu_seconds, shape[1] == draws)
