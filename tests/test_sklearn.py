"""scikit-learn's own checks of an estimator, on fits that are as short as they can be."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import bne

SHORT = {"chains": 1, "draws": 4, "warmup": 0, "thin": 1, "random_state": 0}

_A_LAW = "predict_proba returns a predictive law, as skpro's does, where the check wants an array"
EXPECTED_FAILURES = {
    "check_estimators_pickle": _A_LAW,
    "check_fit_idempotent": _A_LAW,
    "check_methods_sample_order_invariance": _A_LAW,
    "check_methods_subset_invariance": _A_LAW,
    "check_regressors_no_decision_function": "regressors of scikit-learn have no predict_proba",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::bne.errors.SamplingWarning"),
    pytest.mark.filterwarnings("ignore::bne.errors.InputWarning"),
]


@parametrize_with_checks([bne.BMA(**SHORT)], expected_failed_checks=lambda _: EXPECTED_FAILURES)
def test_checks_of_the_smallest_model(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [bne.BAE(**SHORT), bne.BNE(**SHORT)], expected_failed_checks=lambda _: EXPECTED_FAILURES
)
def test_checks_of_the_larger_models(estimator, check):
    check(estimator)
