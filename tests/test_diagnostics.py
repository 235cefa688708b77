"""Convergence diagnostics: numbers against ArviZ, verdicts on healthy and on broken draws."""

from __future__ import annotations

import json
import logging
from typing import Any

import arviz
import numpy as np
import pytest
from numpy.typing import NDArray

from bne import diagnostics
from bne.diagnostics import Diagnosis, diagnose

FloatArray = NDArray[np.float64]
Draws = dict[str, dict[str, FloatArray]]

SHAPES = [(2, 4), (2, 5), (3, 11), (5, 8), (4, 100), (4, 101), (8, 333), (1, 201), (4, 1000)]


def autoregressive(
    rng: np.random.Generator, phi: float, shape: tuple[int, ...], start: float = 0.0
) -> FloatArray:
    """Stationary AR(1) chains (chain, draw, ...) with unit variance."""
    innovations = rng.standard_normal(shape) * np.sqrt(1.0 - phi**2)
    chains = np.empty(shape)
    chains[:, 0] = innovations[:, 0] / np.sqrt(1.0 - phi**2)
    for t in range(1, shape[1]):
        chains[:, t] = phi * chains[:, t - 1] + innovations[:, t]
    return chains + start


def assorted_chains(rng: np.random.Generator, phi: float, chains: int, draws: int) -> FloatArray:
    """Scalars that are smooth, tied, apart, and heavy in the tail: (chain, draw, 4)."""
    x = autoregressive(rng, phi, (chains, draws, 4))
    x[..., 1] = np.round(x[..., 1])
    x[..., 2] += np.arange(chains)[:, None]
    x[..., 3] = np.exp(3.0 * x[..., 3])
    return x


class TestAgainstArviz:
    @pytest.mark.parametrize("phi", [-0.5, 0.0, 0.9, 0.99])
    @pytest.mark.parametrize(("chains", "draws"), SHAPES)
    def test_effective_sample_sizes(
        self, phi: float, chains: int, draws: int, rng: np.random.Generator
    ) -> None:
        x = assorted_chains(rng, phi, chains, draws)
        for mine, method in ((diagnostics.ess_bulk, "bulk"), (diagnostics.ess_tail, "tail")):
            theirs = [float(arviz.ess(x[..., i], method=method)) for i in range(4)]
            np.testing.assert_allclose(mine(x), theirs, rtol=1e-9)

    @pytest.mark.parametrize("phi", [-0.5, 0.0, 0.9, 0.99])
    @pytest.mark.parametrize(("chains", "draws"), [s for s in SHAPES if s[0] > 1])
    def test_rhat(self, phi: float, chains: int, draws: int, rng: np.random.Generator) -> None:
        x = assorted_chains(rng, phi, chains, draws)
        with np.errstate(divide="ignore", invalid="ignore"):
            theirs = np.array([float(arviz.rhat(x[..., i])) for i in range(4)])
        # Constant but different chains: rounding makes theirs large, or with numba NaN.
        theirs[(theirs > 1e12) | np.isnan(theirs)] = np.inf
        np.testing.assert_allclose(diagnostics.rhat(x), theirs, rtol=1e-9)

    @pytest.mark.parametrize("phi", [0.0, 0.95])
    @pytest.mark.parametrize(("chains", "draws"), [(1, 50), (4, 501)])
    def test_ebfmi(self, phi: float, chains: int, draws: int, rng: np.random.Generator) -> None:
        energy = autoregressive(rng, phi, (chains, draws), start=300.0)
        np.testing.assert_allclose(diagnostics.ebfmi(energy), arviz.bfmi(energy), rtol=1e-9)

    def test_draws_with_nan_have_no_value_in_both(
        self, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
    ) -> None:
        x = rng.standard_normal((4, 50))
        x[1, 7] = np.nan
        with caplog.at_level(logging.ERROR, logger="arviz"):
            assert np.isnan([arviz.rhat(x), arviz.ess(x)]).all()
        for function in (diagnostics.rhat, diagnostics.ess_bulk, diagnostics.ess_tail):
            assert np.isnan(function(x))


class TestNumbers:
    def test_draws_that_are_infinite_or_too_few_have_no_value(
        self, rng: np.random.Generator
    ) -> None:
        x = rng.standard_normal((4, 50, 3))
        x[2, 3, 1] = np.inf
        for function in (diagnostics.rhat, diagnostics.ess_bulk, diagnostics.ess_tail):
            np.testing.assert_array_equal(np.isnan(function(x)), [False, True, False])
            assert np.isnan(function(x[:, :3])).all()

    def test_any_shape_of_scalars_is_kept(self, rng: np.random.Generator) -> None:
        x = rng.standard_normal((4, 60, 2, 3, 5))
        for function in (diagnostics.rhat, diagnostics.ess_bulk, diagnostics.ess_tail):
            whole = function(x)
            assert whole.shape == (2, 3, 5)
            assert whole[1, 2, 3] == function(x[:, :, 1, 2, 3])
            assert function(x[..., 0]).shape == (2, 3)

    def test_many_scalars_are_as_one_at_a_time(self, rng: np.random.Generator) -> None:
        x = assorted_chains(rng, 0.5, 4, 100).repeat(75, axis=2)
        for function in (diagnostics.rhat, diagnostics.ess_bulk, diagnostics.ess_tail):
            np.testing.assert_array_equal(function(x), function(x[..., ::75]).repeat(75))

    def test_rhat_of_one_chain_is_unknown(self, rng: np.random.Generator) -> None:
        assert np.isnan(diagnostics.rhat(rng.standard_normal((1, 100))))

    def test_rhat_does_not_depend_on_the_scale(self, rng: np.random.Generator) -> None:
        x = autoregressive(rng, 0.5, (4, 200))
        assert diagnostics.rhat(np.exp(x)) == pytest.approx(float(diagnostics.rhat(x)), abs=0.05)
        assert diagnostics.ess_bulk(np.exp(x)) == diagnostics.ess_bulk(x)

    def test_constant_draws_have_no_rhat(self) -> None:
        assert np.isnan(diagnostics.rhat(np.ones((4, 100))))
        assert diagnostics.ess_bulk(np.ones((4, 100))) == 400.0

    def test_chains_that_stay_apart_have_infinite_rhat(self) -> None:
        still = np.repeat(np.arange(4.0)[:, None], 100, axis=1)
        assert diagnostics.rhat(still) == np.inf

    def test_independent_draws_are_all_effective(self, rng: np.random.Generator) -> None:
        ess = diagnostics.ess_bulk(rng.standard_normal((4, 1000, 50)))
        assert 3900.0 < np.median(ess) < 4100.0  # its standard error is about 20

    def test_autocorrelation_costs_what_theory_says(self, rng: np.random.Generator) -> None:
        ess = diagnostics.ess_bulk(autoregressive(rng, 0.8, (4, 2000, 50)))
        assert np.median(ess) == pytest.approx(8000.0 / 9.0, rel=0.1)  # se of the median: 1.5 %

    def test_ebfmi_keeps_a_chain_whose_neighbour_is_broken(self, rng: np.random.Generator) -> None:
        energy = rng.standard_normal((4, 100))
        energy[1], energy[2, 5] = 3.0, np.nan
        np.testing.assert_array_equal(
            np.isnan(diagnostics.ebfmi(energy)), [False, True, True, False]
        )
        assert np.isnan(diagnostics.ebfmi(energy[:, :1])).all()

    @pytest.mark.parametrize("function", [diagnostics.rhat, diagnostics.ebfmi])
    def test_one_axis_is_not_enough(self, function: Any) -> None:
        with pytest.raises(ValueError, match=r"need the axes \(chain, .*got shape \(10,\)"):
            function(np.zeros(10))


def healthy_draws(rng: np.random.Generator, draws: int = 1000, chains: int = 4) -> Draws:
    """Independent draws of two steps: hyperparameters, weights of three models, a residual."""
    shape = (chains, draws)
    scores = rng.standard_normal((*shape, 3, 30))
    weights = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    return {
        "weights": {"sigma": np.exp(rng.standard_normal(shape)), "weights": weights},
        "residual": {
            "lengthscale": rng.gamma(2.0, size=shape),
            "amplitude": rng.standard_normal(shape),
            "residual": rng.standard_normal((*shape, 40)),
        },
    }


def healthy_stats(rng: np.random.Generator, chains: int = 4) -> dict[str, dict[str, Any]]:
    shape = (chains, 1000, 3)
    return {
        step: {"diverging": np.zeros(shape, bool), "energy": rng.standard_normal(shape)}
        for step in ("weights", "residual")
    }


LABELS = {
    "weights": [["pred_av", "pred_gs", "pred_caces"], [f"row{i}" for i in range(30)]],
    "residual": [[f"row{i}" for i in range(40)]],
}


class TestHealthyDraws:
    def test_are_trusted(self, rng: np.random.Generator) -> None:
        found = diagnose(healthy_draws(rng), healthy_stats(rng), labels=LABELS)
        assert found.ok
        assert found.messages == []
        assert found.verdict.startswith("The draws can be trusted: the chains agree (R-hat 1.00")
        assert "effective draws" in found.verdict
        assert "0 of 12,000 transitions" not in found.verdict  # the two steps have twice as many
        assert "0 of 24,000 transitions diverged" in found.verdict
        assert "energies mix well" in found.verdict

    def test_are_trusted_without_statistics_of_a_sampler(self, rng: np.random.Generator) -> None:
        found = diagnose(healthy_draws(rng))
        assert found.ok
        assert "can be trusted" in found.verdict
        assert "diverged" not in found.verdict
        assert "energies" not in found.verdict

    # R-hat > 1.01 of independent draws: chi-square of 7 degrees beyond 77, 6e-14 per scalar.
    @pytest.mark.parametrize("seed", range(20))
    def test_are_never_flagged(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        found = diagnose(healthy_draws(rng), healthy_stats(rng))
        assert found.ok
        assert found.messages == []
        assert (found.table.r_hat < 1.01).all()

    def test_fill_a_row_per_step_and_quantity(self, rng: np.random.Generator) -> None:
        found = diagnose(healthy_draws(rng), healthy_stats(rng), labels=LABELS)
        assert list(found.table.index) == [
            ("weights", "hyperparameters"),
            ("weights", "weights"),
            ("residual", "hyperparameters"),
            ("residual", "residual"),
        ]
        assert (found.table.divergences == 0.0).all()
        assert (found.table.ess_bulk > 3000.0).all()
        assert (found.table.ebfmi > 1.5).all()
        worst = found.table.loc[("weights", "weights"), "worst_at"]
        assert worst.startswith("weights[pred_")
        assert "row" in worst

    def test_may_have_quantities_that_never_change(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["weights"]["weights"] = np.ones((4, 1000, 1, 30))  # a single base model
        draws["residual"]["fixed"] = np.zeros((4, 1000))
        found = diagnose(draws, healthy_stats(rng))
        assert found.ok
        assert found.messages == []
        assert np.isnan(found.table.loc[("weights", "weights"), "r_hat"])

    def test_of_many_short_chains_share_the_effective_draws(self, rng: np.random.Generator) -> None:
        found = diagnose(healthy_draws(rng, draws=200, chains=16), healthy_stats(rng, chains=16))
        assert found.ok
        assert "trusted" in found.verdict

    def test_are_an_argument_that_cannot_be_empty(self) -> None:
        with pytest.raises(ValueError, match="There are no draws to diagnose"):
            diagnose({})
        with pytest.raises(ValueError, match="There are no draws to diagnose"):
            diagnose({"weights": {}})
        with pytest.raises(ValueError, match=r"the first two alike within a step; got .*\(4, 10\)"):
            diagnose({"weights": {"a": np.zeros((4, 10)), "b": np.zeros((4, 11))}})


class TestBrokenDraws:
    def judged(self, draws: Draws, stats: Any = None) -> Diagnosis:
        found = diagnose(draws, stats, labels=LABELS)
        assert not found.ok
        assert found.verdict.startswith("The draws should not be trusted yet.")
        assert all(message in found.verdict for message in found.messages)
        assert "What to do: " in found.verdict
        return found

    def test_one_chain_is_reported(self, rng: np.random.Generator) -> None:
        found = self.judged(healthy_draws(rng, chains=1))
        assert found.messages == [
            "Steps weights, residual: there is one chain only, so nothing shows whether it has "
            "found the whole posterior."
        ]
        assert "run at least four chains (chains=4)" in found.verdict
        assert "chains agree" not in found.verdict

    @pytest.mark.parametrize("count", [1, 3, 20, 99])
    def test_few_draws_are_reported(self, count: int, rng: np.random.Generator) -> None:
        found = self.judged(healthy_draws(rng, draws=count))
        assert f"{count} draws per chain are too few to judge convergence by" in found.messages[0]
        assert "take more draws" in found.verdict
        assert "chains agree" not in found.verdict

    def test_a_stuck_chain_is_reported(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        for values in draws["residual"].values():
            values[2] = values[2, :1]
        found = self.judged(draws)
        assert found.messages == [
            "Step residual: chain 3 got stuck: lengthscale never changes there."
        ]
        assert "start again with another seed" in found.verdict

    def test_a_sampler_that_never_moved_is_reported(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["residual"] = {"sigma": np.full((4, 1000), 0.7), "residual": np.ones((4, 1000, 3))}
        found = self.judged(draws)
        assert found.messages == [
            "Step residual: the sampler did not move: all its draws are the same."
        ]

    def test_chains_apart_are_reported_with_the_place(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["residual"]["residual"][1, :, 17] += 3.0
        found = self.judged(draws)
        assert "the chains disagree about residual[row17] (R-hat is 1." in found.messages[0]
        assert found.table.loc[("residual", "residual"), "worst_at"] == "residual[row17]"
        assert found.table.loc[("residual", "residual"), "r_hat"] > 1.05

    def test_chains_of_other_spread_are_reported(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["residual"]["amplitude"][0] *= 5.0
        found = self.judged(draws)
        assert "the chains disagree about amplitude" in found.messages[0]

    def test_slow_chains_are_reported(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["residual"]["residual"][..., 5] = autoregressive(rng, 0.995, (4, 1000))
        found = self.judged(draws)
        assert any(
            "residual[row5], the 4,000 draws are worth only" in message
            for message in found.messages
        )
        assert "(400 are wanted)" in found.verdict

    def test_somewhat_slow_chains_can_be_used_with_care(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["residual"]["residual"][..., 5] = autoregressive(rng, 0.9, (4, 1000))
        found = diagnose(draws, labels=LABELS)
        assert found.ok
        assert found.verdict.startswith("The draws can be used, with some care.")
        assert "take more draws" in found.verdict

    def test_draws_that_are_no_numbers_are_reported(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["residual"]["residual"][2, 5:8, 11] = np.nan
        draws["residual"]["residual"][2, 0, 12] = -np.inf
        found = self.judged(draws)
        assert found.messages == [
            "Step residual: 4 numbers are NaN or infinite among the draws (such as of "
            "residual[row11])."
        ]
        draws = healthy_draws(rng)
        draws["weights"]["sigma"][0, 0] = np.nan
        assert "1 number is NaN or infinite" in self.judged(draws).messages[0]

    def test_draws_of_nothing_but_nan_are_reported(self) -> None:
        found = self.judged({"residual": {"sigma": np.full((4, 200), np.nan)}})
        assert "800 numbers are NaN or infinite" in found.messages[0]

    def test_divergences_are_reported_from_one_in_a_thousand(
        self, rng: np.random.Generator
    ) -> None:
        draws, stats = healthy_draws(rng), healthy_stats(rng)
        stats["residual"]["diverging"][0, :11, 0] = True
        assert diagnose(draws, stats).messages == []
        stats["residual"]["diverging"][0, :12, 0] = True
        found = self.judged(draws, stats)
        assert "12 of 12,000 transitions diverged (0.10%" in found.messages[0]
        assert "raise target_accept" in found.verdict
        assert found.table.loc[("residual", "residual"), "divergent_share"] == 1e-3
        assert found.table.loc[("weights", "weights"), "divergences"] == 0.0

    def test_low_ebfmi_is_reported(self, rng: np.random.Generator) -> None:
        draws, stats = healthy_draws(rng), healthy_stats(rng)
        stats["weights"]["energy"] = rng.standard_normal((4, 3000))
        stats["weights"]["energy"][1] = autoregressive(rng, 0.95, (1, 3000))[0]
        found = self.judged(draws, stats)
        assert found.messages[0].startswith(
            "Step weights: chain 2 moved too slowly between regions of high and low probability "
            "(E-BFMI 0."
        )
        assert "energies mix well" not in found.verdict

    def test_the_neck_of_a_funnel_is_reported(self, rng: np.random.Generator) -> None:
        """Random-walk Metropolis on Neal's funnel, which no step size suits."""
        chains, kept, thin = 4, 500, 5
        x = np.zeros((chains, 10))
        log_p = _funnel(x)
        draws = np.empty((chains, kept, 10))
        for t in range(kept * thin):
            proposal = x + 0.4 * rng.standard_normal(x.shape)
            proposed = _funnel(proposal)
            accept = np.log(rng.uniform(size=chains)) < proposed - log_p
            x[accept], log_p[accept] = proposal[accept], proposed[accept]
            draws[:, t // thin] = x
        found = self.judged({"funnel": {"log_scale": draws[..., 0], "x": draws[..., 1:]}})
        assert any("chains disagree" in message for message in found.messages)

    def test_several_findings_are_all_told(self, rng: np.random.Generator) -> None:
        draws, stats = healthy_draws(rng), healthy_stats(rng)
        draws["residual"]["amplitude"][0] += 5.0
        stats["weights"]["diverging"][:, :20] = True
        found = self.judged(draws, stats)
        assert len(found.messages) == 3  # apart, few effective draws, divergences
        assert "What holds: energies mix well" in found.verdict


def _funnel(x: FloatArray) -> FloatArray:
    v = x[:, 0]
    return -v * v / 18.0 - 0.5 * np.sum(x[:, 1:] ** 2, axis=1) * np.exp(-v) - 4.5 * v


class TestMultimodalWeights:
    def two_modes(self, rng: np.random.Generator) -> Draws:
        draws = healthy_draws(rng)
        scores = 0.3 * rng.standard_normal((4, 1000, 3, 30))
        scores[[0, 2], :, 1] += 3.0
        scores[[1, 3], :, 2] += 3.0
        draws["weights"]["weights"] = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
        return draws

    def test_are_told_with_the_base_models_by_name(self, rng: np.random.Generator) -> None:
        found = diagnose(self.two_modes(rng), healthy_stats(rng), labels=LABELS)
        assert not found.ok
        assert len(found.messages) == 1
        message = found.messages[0]
        assert message.startswith("Step weights: the weights are multimodal")
        assert "(seen best at site row" in message
        assert "chains 1, 3 favour pred_gs (0.9" in message
        assert "chains 2, 4 favour pred_caces (0.9" in message
        assert "more draws will not join the modes" in found.verdict

    def test_are_told_by_position_without_labels(self, rng: np.random.Generator) -> None:
        found = diagnose(self.two_modes(rng), healthy_stats(rng))
        assert "chains 1, 3 favour 1 (0.9" in found.messages[0]

    def test_with_one_favourite_are_told_by_its_weight(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        scores = 0.1 * rng.standard_normal((4, 1000, 3, 30))
        scores[..., 0, :] += np.array([1.0, 1.0, 1.0, 5.0])[:, None, None]
        draws["weights"]["weights"] = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
        message = diagnose(draws, labels=LABELS).messages[0]
        assert "chains 1, 2, 3 give pred_av a weight of 0.5" in message
        assert "chain 4 gives pred_av a weight of 0.9" in message

    def test_of_chains_that_merely_drift_are_not_claimed(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        scores = autoregressive(rng, 0.998, (4, 1000, 3, 1)).repeat(30, axis=3)
        draws["weights"]["weights"] = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
        found = diagnose(draws, labels=LABELS)
        assert not found.ok
        assert "multimodal" not in found.verdict
        assert "the chains disagree about weights[" in found.verdict


class TestApproximateDraws:
    def test_are_judged_in_words_only(self, rng: np.random.Generator) -> None:
        found = diagnose(healthy_draws(rng, chains=1), approximate="Laplace")
        assert found.ok
        assert "come from an approximation (Laplace)" in found.verdict
        assert "trusted" not in found.verdict
        assert found.table[["r_hat", "ess_bulk", "ebfmi"]].isna().all(axis=None)

    def test_must_be_numbers(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng, chains=1)
        draws["residual"]["residual"][0, 3, 4] = np.nan
        found = diagnose(draws, approximate="Laplace", labels=LABELS)
        assert not found.ok
        assert found.messages[0] == (
            "Step residual: 1 number is NaN or infinite among the draws (such as of "
            "residual[row4])."
        )


class TestPlainValues:
    def test_are_json(self, rng: np.random.Generator) -> None:
        draws = healthy_draws(rng)
        draws["weights"]["weights"] = np.ones((4, 1000, 1, 30))
        for found in (
            diagnose(draws, healthy_stats(rng), labels=LABELS),
            diagnose(draws, labels=LABELS),
            diagnose(healthy_draws(rng, draws=3, chains=1), labels=LABELS),
            diagnose(draws, approximate="Laplace"),
        ):
            values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
            assert values["ok"] is found.ok
            assert values["verdict"] == found.verdict
            assert values["messages"] == found.messages
            assert [row["quantity"] for row in values["table"]] == [
                quantity for _, quantity in found.table.index
            ]

    def test_have_none_where_a_number_is_unknown(self, rng: np.random.Generator) -> None:
        row = diagnose(healthy_draws(rng, chains=1)).to_dict()["table"][0]
        assert row["r_hat"] is None
        assert row["divergences"] is None
        assert row["ess_bulk"] > 500.0
