"""Every step of the inference is calibrated: given data from its own model, its posterior is right.

The tests are exact for any posterior (see `calibration`). All scalars of a series of runs together
raise a false alarm with probability 1e-5.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy import signal, stats

from bne.approximation import Geometry, choose, default_lengthscales
from bne.inference import Settings
from bne.kernels import Kernel
from bne.model import ModelData, Process, Structure
from bne.priors import half_normal, inverse_gamma_between
from bne.site_processes import Dual
from calibration import Calibration, Problem, calibrate, pit

N_MODELS = 3
STEPS = {
    "step1": ("weights",),
    "step2": ("residual",),
    "step3": ("residual", "log_scale", "log_skew"),
    "step3-without-skew": ("residual", "log_scale"),
    "joint": ("weights", "residual", "log_scale", "log_skew"),
}
SHORT = Settings(chains=4, draws=100, warmup=400, thin=2)
LONG = Settings(chains=4, draws=150, warmup=500, thin=3)
SITES = (2, 12, 21)


@cache
def make_problem(step: str, *, dual: bool = False, necks: bool = False) -> Problem:
    """Twenty-six irregular sites, three base models that differ; all but the response.

    The length-scales have their default priors; lambda is larger than by default, so that the data
    speak of it. Unless `necks` are asked for, half-normal priors that allow a noise near zero,
    where the residual interpolates and chains need long, are replaced where the noise varies.
    """
    x = np.sort(np.random.default_rng(3).uniform(-3.0 * np.pi, 3.0 * np.pi, (26, 1)), axis=0)
    base = np.column_stack([np.sin(x), np.cos(0.5 * x) - 0.5, 0.15 * x + 0.3])
    geometry, kernel = Geometry.of(x), Kernel("matern32")
    lengthscales = default_lengthscales(geometry, kernel)
    chosen = choose("hilbert", kernel, geometry, lengthscales)
    representation, sizes = chosen.representation, chosen.sizes
    if dual:
        basis = getattr(representation, "basis", representation)
        representation = Dual.build(basis, x, 0.3, 60.0)
        sizes = dict.fromkeys(sizes, len(x))
    tame = "log_scale" in STEPS[step] and not necks
    data = ModelData(
        response=np.zeros(len(x)),
        base=base,
        trend=np.zeros((len(x), 0)),
        features=representation.features(x),
        representation=representation,
        priors={
            "sigma": inverse_gamma_between(0.2, 1.5) if tame else half_normal(1.0),
            "amplitude.weights": half_normal(2.0),
            "amplitude.residual": half_normal(1.0),
            "amplitude.log_scale": half_normal(0.5 if tame else 1.0),
            "amplitude.log_skew": half_normal(0.5 if tame else 1.0),
        }
        | {f"lengthscale.{name}": prior for name, prior in lengthscales.items()},
        log_skew_mean=-1.0,
    )
    processes = tuple(
        Process(name, N_MODELS - 1 if name == "weights" else 1, sizes[name]) for name in STEPS[step]
    )
    return Problem(Structure(processes, N_MODELS), data, base.mean(axis=1), SITES)


def assert_calibrated(found: Calibration) -> None:
    assert not found.alarms(), found.summary()


@pytest.mark.parametrize("step", STEPS)
def test_twenty_runs_raise_no_alarm(step):
    assert_calibrated(calibrate(make_problem(step), SHORT, runs=20, seed=11))


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_three_hundred_runs_raise_no_alarm(step):
    assert_calibrated(calibrate(make_problem(step), LONG, runs=300, seed=12))


@pytest.mark.slow
def test_three_hundred_runs_through_values_at_the_sites_raise_no_alarm():
    assert_calibrated(calibrate(make_problem("step3", dual=True), LONG, runs=300, seed=13))


@pytest.mark.slow
def test_three_hundred_runs_under_priors_with_necks_raise_no_alarm():
    assert_calibrated(calibrate(make_problem("step3", necks=True), LONG, runs=300, seed=14))


# The harness itself, on posteriors known in closed form

N_SCALARS = 12
NAMES = tuple(f"theta[{j}]" for j in range(N_SCALARS))


def conjugate(rng, *, runs, sd_factor=1.0, shift=0.0, which=slice(None), correlation=0.0):
    """Calibration of a fake sampler of theta | y, with theta ~ N(0, 1) and y ~ N(theta, 1).

    Its sds are too small by `sd_factor`, its means off by `shift` sds, for the scalars `which`; its
    draws are autoregressive.
    """
    theta = rng.standard_normal((runs, N_SCALARS))
    mean = 0.5 * (theta + rng.standard_normal(theta.shape))
    sd = np.full(N_SCALARS, np.sqrt(0.5))
    factor, offset = np.ones(N_SCALARS), np.zeros(N_SCALARS)
    factor[which], offset[which] = sd_factor, shift
    pits = []
    for truth, centre in zip(theta, mean, strict=True):
        noise = rng.standard_normal((4, 100, N_SCALARS))
        noise[:, 1:] *= np.sqrt(1.0 - correlation**2)
        noise = signal.lfilter([1.0], [1.0, -correlation], noise, axis=1)
        pits.append(pit(truth, centre + sd * (offset + factor * noise), rng))
    nothing = np.zeros(runs)
    score = (theta - mean) / sd
    return Calibration(NAMES, np.array(pits), score, nothing + 1.0, nothing, nothing)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_exact_draws_raise_no_alarm(rng, correlation):
    assert_calibrated(conjugate(rng, runs=300, correlation=correlation))
    assert_calibrated(conjugate(rng, runs=20, correlation=correlation))


def test_p_values_of_exact_draws_are_uniform(rng):
    exact = [
        Calibration(NAMES, rng.uniform(size=(50, N_SCALARS)), *[np.zeros((1, 1))] * 4).p_values()
        for _ in range(200)
    ]
    for kind in ("ranks of theta", "spread of theta"):
        values = [p for found in exact for name, p in found.items() if name.startswith(kind)]
        assert stats.kstest(values, "uniform").pvalue > 1e-5
    together = [found["spread of all"] for found in exact]
    assert np.mean(np.array(together) < 0.05) < 0.15  # 1e-6: at most 0.05 of 200, binomial


def test_over_confidence_of_a_fifth_is_seen_in_all_scalars(rng):
    assert all(conjugate(rng, runs=300, sd_factor=0.8).alarms() for _ in range(5))


def test_over_confidence_and_bias_are_seen_in_a_single_scalar(rng):
    one = slice(4, 5)
    too_narrow = conjugate(rng, runs=300, sd_factor=0.65, which=one).alarms()
    assert "spread of theta[4]" in too_narrow
    too_wide = conjugate(rng, runs=300, sd_factor=1.6, which=one).alarms()
    assert "spread of theta[4]" in too_wide
    assert "ranks of theta[4]" in conjugate(rng, runs=300, shift=0.6, which=one).alarms()
