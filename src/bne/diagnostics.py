"""Whether the draws of a fit can be trusted, in numbers and in words.

`diagnose` takes the draws of every step and the statistics of its sampler, and returns a
`Diagnosis`: a verdict for people, a table for the curious. It knows nothing of estimators.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from bne._convergence import ebfmi, ess_bulk, ess_tail, rhat
from bne._findings import (
    DIVERGENCES_GOOD,
    EBFMI_GOOD,
    ESS_GOOD,
    ESS_GOOD_PER_CHAIN,
    ESS_USABLE_SHARE,
    HYPER,
    MIN_DRAWS,
    RHAT_BAD,
    RHAT_GOOD,
    RHAT_MODES,
    Check,
    Finding,
    Measured,
    Quantity,
    Step,
    extreme,
    findings_of,
    not_finite_text,
)

__all__ = [
    "DIVERGENCES_GOOD",
    "EBFMI_GOOD",
    "ESS_GOOD",
    "ESS_GOOD_PER_CHAIN",
    "ESS_USABLE_SHARE",
    "MIN_DRAWS",
    "RHAT_BAD",
    "RHAT_GOOD",
    "RHAT_MODES",
    "Diagnosis",
    "diagnose",
    "ebfmi",
    "ess_bulk",
    "ess_tail",
    "rhat",
]

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Labels = Mapping[str, Sequence[Sequence[Hashable]]]

_NOT_APPLICABLE = {
    "r_hat": math.nan,
    "ess_bulk": math.nan,
    "ess_tail": math.nan,
    "worst_at": "",
    "divergences": math.nan,
    "divergent_share": math.nan,
    "ebfmi": math.nan,
}
_CONSTANT = 1e-13  # range over size below which draws are constant but for rounding


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What the draws of a fit are worth.

    Attributes
    ----------
    ok : bool
        Whether the draws can be used. False asks for another run.
    verdict : str
        What holds, what does not, and what to do about it.
    table : DataFrame
        One row per step and quantity (all hyperparameters of a step share one): the worst R-hat,
        the smallest bulk and tail effective sample sizes, where the worst is, and, the same for the
        whole step, the number of divergences, their share of the transitions and the smallest
        E-BFMI. NaN marks what cannot be computed or does not apply.
    messages : list of str
        One sentence per finding; empty if there is nothing to remark.
    """

    ok: bool
    verdict: str
    table: pd.DataFrame
    messages: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, the rows of the table among them; None for NaN."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "messages": list(self.messages),
            "table": [
                {key: _plain(value) for key, value in row.items()}
                for row in self.table.reset_index().to_dict("records")
            ],
        }


def diagnose(
    draws: Mapping[str, Mapping[str, ArrayLike]],
    stats: Mapping[str, Mapping[str, ArrayLike]] | None = None,
    *,
    labels: Labels | None = None,
    approximate: str | None = None,
) -> Diagnosis:
    """Judge the draws of a fit.

    Takes about a millisecond per scalar of four chains of a thousand draws: give the functions at
    some hundred sites, not at every cell of a map.

    Parameters
    ----------
    draws : mapping of step to mapping of quantity to array (chain, draw, *shape)
        Hyperparameters have no further axes. The quantity called "weights" has the base models on
        its first further axis.
    stats : mapping of step to mapping of statistic to array (chain, transition, ...)
        "diverging" (bool) and "energy", each optional. Others are ignored.
    labels : mapping of quantity to one sequence of labels per further axis
        E.g. ``{"weights": [base_models, rows], "residual": [rows]}``; positions where missing.
    approximate : str, optional
        Name of the approximation that the draws come from, in place of Markov chains.

    Returns
    -------
    Diagnosis
    """
    if not draws or not all(draws.values()):
        raise ValueError("There are no draws to diagnose.")
    if approximate is not None:
        return _of_approximation(draws, labels or {}, approximate)
    steps = [
        _measure_step(name, quantities, (stats or {}).get(name, {}), labels or {})
        for name, quantities in draws.items()
    ]
    findings = _merge([finding for step in steps for finding in findings_of(step)])
    return Diagnosis(
        ok=not any(finding.bad for finding in findings),
        verdict=_verdict(steps, findings),
        table=_table(steps),
        messages=[_sentence(finding) for finding in findings],
    )


def _measure_step(
    name: str, draws: Mapping[str, ArrayLike], stats: Mapping[str, ArrayLike], labels: Labels
) -> Step:
    diverging = np.asarray(stats.get("diverging", np.zeros((0, 0))), dtype=bool)
    energy = np.asarray(stats.get("energy", np.zeros((0, 0))), dtype=np.float64)
    energy = energy.reshape(len(energy), -1 if energy.size else 0)
    return Step(
        name,
        [_measure(quantity) for quantity in _quantities(draws, labels)],
        float(diverging.sum()) if diverging.size else math.nan,
        int(diverging.size),
        ebfmi(energy),
        bool(energy.size) and not _is_constant(energy[..., None]).any(),
    )


def _quantities(draws: Mapping[str, ArrayLike], labels: Labels) -> Iterator[Quantity]:
    """The hyperparameters of a step as one quantity, then its functions."""
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in draws.items()}
    if len({values.shape[:2] for values in arrays.values()}) > 1 or any(
        values.ndim < 2 or values.size == 0 for values in arrays.values()
    ):
        raise ValueError(
            "Draws need the axes (chain, draw, ...), the first two alike within a step; got "
            f"{ {name: values.shape for name, values in arrays.items()} }."
        )
    scalars = {name: values for name, values in arrays.items() if values.ndim == 2}
    if scalars:
        stacked = np.stack(list(scalars.values()), axis=2)
        yield Quantity(HYPER, stacked, (len(scalars),), [list(scalars)])
    for name, values in arrays.items():
        if values.ndim > 2:
            shape = values.shape[2:]
            flat = values.reshape(*values.shape[:2], -1)
            yield Quantity(name, flat, shape, labels.get(name, ()))


def _measure(quantity: Quantity) -> Measured:
    x = quantity.draws
    finite: BoolArray = np.asarray(np.isfinite(x).all(axis=(0, 1)))
    constant = _is_constant(np.where(finite, x, 0.0))
    fixed = finite & _is_constant(np.where(finite, x, 0.0).reshape(1, -1, x.shape[2]))[0]
    known = finite & ~fixed
    stuck: BoolArray = constant & known

    def at_known(values: FloatArray) -> FloatArray:
        result = np.full(len(known), np.nan)
        result[known] = values
        return result

    moving = x[..., known]
    return Measured(
        quantity,
        at_known(rhat(moving)),
        at_known(ess_bulk(moving)),
        at_known(ess_tail(moving)),
        finite,
        fixed,
        stuck,
    )


def _is_constant(x: FloatArray) -> BoolArray:
    """Whether a chain does not move, (chain, N)."""
    still = np.ptp(x, axis=1) <= _CONSTANT * np.max(np.abs(x), axis=1)
    return np.asarray(still, dtype=np.bool_)


def _merge(findings: list[Finding]) -> list[Finding]:
    """Put findings that say the same of several steps into one."""
    merged: dict[tuple[str, str], Finding] = {}
    for f in findings:
        key = (f.check, f.text)
        where = f"{merged[key].where}, {f.where}" if key in merged else f.where
        merged[key] = replace(f, where=where)
    return sorted(merged.values(), key=lambda f: not f.bad)


def _sentence(finding: Finding) -> str:
    step = "Steps" if ", " in finding.where else "Step"
    return f"{step} {finding.where}: {finding.text}."


def _verdict(steps: list[Step], findings: list[Finding]) -> str:
    holds = _what_holds(steps, {finding.check for finding in findings})
    if not findings:
        return f"The draws can be trusted: {holds or 'nothing in them is uncertain'}."
    if any(finding.bad for finding in findings):
        parts = ["The draws should not be trusted yet."]
    else:
        parts = ["The draws can be used, with some care."]
    parts += [_sentence(finding) for finding in findings]
    remedies = dict.fromkeys(remedy for finding in findings for remedy in finding.remedies)
    parts.append(f"What to do: {'; '.join(remedies)}.")
    if holds:
        parts.append(f"What holds: {holds}.")
    return " ".join(parts)


def _what_holds(steps: list[Step], broken: set[Check]) -> str:
    """The checks that were made and passed in every step."""
    measured = [m for step in steps for m in step.measured]
    r_hat, _ = extreme([(m, m.rhat) for m in measured], largest=True)
    least, _ = extreme([(m, v) for m in measured for v in (m.bulk, m.tail)], largest=False)
    diverged = sum(step.divergences for step in steps if step.transitions)
    transitions = sum(step.transitions for step in steps)
    energies = np.concatenate([step.energy for step in steps])
    enough = min(step.draws for step in steps) >= MIN_DRAWS
    parts = []
    if "chains" not in broken and enough and not math.isnan(r_hat):
        parts.append(f"the chains agree (R-hat {r_hat:.3f} at most)")
    if "effective" not in broken and "chains" not in broken and not math.isnan(least):
        parts.append(f"all quantities have at least {least:,.0f} effective draws")
    if "divergences" not in broken and transitions:
        parts.append(f"{diverged:,.0f} of {transitions:,} transitions diverged")
    if "energy" not in broken and np.isfinite(energies).any():
        parts.append(f"energies mix well (E-BFMI {np.nanmin(energies):.2f} at least)")
    return ", ".join(parts)


def _table(steps: list[Step]) -> pd.DataFrame:
    rows = [_row(step, measured) for step in steps for measured in step.measured]
    return pd.DataFrame(rows).set_index(["step", "quantity"])


def _row(step: Step, m: Measured) -> dict[str, Any]:
    r_hat, at = extreme([(m, m.rhat)], largest=True)
    bulk, bulk_at = extreme([(m, m.bulk)], largest=False)
    tail, _ = extreme([(m, m.tail)], largest=False)
    finite = step.energy[np.isfinite(step.energy)]
    return _NOT_APPLICABLE | {
        "step": step.name,
        "quantity": m.quantity.name,
        "r_hat": r_hat,
        "ess_bulk": bulk,
        "ess_tail": tail,
        "worst_at": at or bulk_at,
        "divergences": step.divergences,
        "divergent_share": step.share,
        "ebfmi": float(np.min(finite)) if len(finite) else math.nan,
    }


def _of_approximation(
    draws: Mapping[str, Mapping[str, ArrayLike]], labels: Labels, name: str
) -> Diagnosis:
    """Judge draws that no chain made: they can only be finite or not."""
    rows, findings = [], []
    for step, arrays in draws.items():
        for q in _quantities(arrays, labels):
            rows.append({"step": step, "quantity": q.name, **_NOT_APPLICABLE})
            finite = np.isfinite(q.draws)
            if not finite.all():
                place = q.place(int(np.argmin(finite.all(axis=(0, 1)))))
                text = not_finite_text(int(np.sum(~finite)), place)
                findings.append(Finding("draws", step, text, ()))
    said = [_sentence(finding) for finding in findings]
    said.append(
        f"The draws come from an approximation ({name}), to which convergence diagnostics do not "
        "apply. How far it is from the posterior, only a fit by sampling shows."
    )
    table = pd.DataFrame(rows).set_index(["step", "quantity"])
    return Diagnosis(ok=not findings, verdict=" ".join(said), table=table, messages=said)


def _plain(value: Any) -> Any:
    """A value that JSON has."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
