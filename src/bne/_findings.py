"""What there is to remark about the draws of a step: the checks behind `bne.diagnostics`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bne._convergence import ess_bulk

__all__ = ["Finding", "Measured", "Quantity", "Step", "extreme", "findings_of", "not_finite_text"]

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
Check = Literal["draws", "chains", "effective", "divergences", "energy"]

RHAT_GOOD = 1.01
RHAT_BAD = 1.05  # between the two: usable, as the worst of thousands of scalars often is
RHAT_MODES = 1.1  # from here on, disagreeing weights are looked at for several modes
ESS_GOOD = 400.0
ESS_GOOD_PER_CHAIN = 100.0  # asked of fewer than four chains; more chains share the 400
ESS_USABLE_SHARE = 0.25  # a quarter of the good number still locates a mean to a tenth of its sd
MIN_DRAWS = 100  # per chain; with fewer, R-hat means nothing
DIVERGENCES_GOOD = 1e-3  # share of the transitions
EBFMI_GOOD = 0.3

HYPER = "hyperparameters"
_ENOUGH_WITHIN = 20.0  # effective draws with which one chain knows its own mean
_FAR_APART = 4.0  # distance of two groups of chains, in sds within a chain
_FEW_CHAINS = 6  # chains that a sentence names one by one

_MORE_DRAWS = "take more draws (draws=), so that every chain runs longer"
_MORE_CHAINS = "run at least four chains (chains=4)"
_SMALLER_STEPS = "raise target_accept (to 0.9, then 0.95), so that the sampler takes smaller steps"
_OTHER_SEED = "start again with another seed (random_state=)"
_JOIN_MODES = (
    "more draws will not join the modes: leave out base models that are nearly alike, or run more "
    "chains (chains=8) and report how far their weights differ"
)
_EXTREME_VALUES = "look for extreme values in the data"
_TIGHTER_PRIORS = "should the E-BFMI stay low, give the amplitudes tighter priors"


@dataclass(frozen=True)
class Finding:
    """Something to remark: `where` it was found is put before the text."""

    check: Check
    where: str
    text: str
    remedies: tuple[str, ...]
    bad: bool = True


@dataclass(frozen=True)
class Quantity:
    """Draws (chain, draw, N) of a function at sites, or of the hyperparameters of a step."""

    name: str
    draws: FloatArray
    shape: tuple[int, ...]
    labels: Sequence[Sequence[Hashable]]

    def place(self, index: int) -> str:
        """Name one of the N scalars."""
        names = self.names(index)
        return names[0] if self.name == HYPER else f"{self.name}[{', '.join(names)}]"

    def names(self, index: int) -> list[str]:
        """Labels of one of the N scalars along each axis; its position where there is none."""
        position = [int(i) for i in np.unravel_index(index, self.shape)]
        return [
            str(self.labels[axis][i]) if axis < len(self.labels) else str(i)
            for axis, i in enumerate(position)
        ]


@dataclass(frozen=True)
class Measured:
    """Diagnostics (N,) of a quantity; NaN where draws are fixed or not finite."""

    quantity: Quantity
    rhat: FloatArray
    bulk: FloatArray
    tail: FloatArray
    finite: BoolArray
    fixed: BoolArray
    stuck: BoolArray  # (chain, N)


@dataclass(frozen=True)
class Step:
    """One step: its measured quantities and the statistics of its sampler."""

    name: str
    measured: list[Measured]
    divergences: float
    transitions: int
    energy: FloatArray  # E-BFMI (chain,)
    energy_varies: bool

    @property
    def chains(self) -> int:
        """Number of chains."""
        return int(self.measured[0].quantity.draws.shape[0])

    @property
    def draws(self) -> int:
        """Number of draws of a chain."""
        return int(self.measured[0].quantity.draws.shape[1])

    @property
    def share(self) -> float:
        """Share of the transitions that diverged."""
        return self.divergences / self.transitions if self.transitions else math.nan


def findings_of(step: Step) -> Iterator[Finding]:
    """Everything there is to remark about a step."""
    yield from _not_finite(step)
    yield from _too_little(step)
    stuck = list(_not_moving(step))
    yield from stuck
    if step.draws >= MIN_DRAWS and not stuck:
        modes = _modes(step)
        if modes is not None:
            yield modes
        yield from _disagreement(step, without_weights=modes is not None)
        yield from _few_effective(step, without_weights=modes is not None)
    yield from _trouble(step)


def _not_finite(step: Step) -> Iterator[Finding]:
    for m in step.measured:
        if not m.finite.all():
            count = int(np.sum(~np.isfinite(m.quantity.draws)))
            place = m.quantity.place(int(np.argmin(m.finite)))
            text = not_finite_text(count, place)
            yield Finding("draws", step.name, text, (_EXTREME_VALUES, _OTHER_SEED))


def not_finite_text(count: int, place: str) -> str:
    """How many numbers among the draws are none, and an example."""
    are = "number is" if count == 1 else "numbers are"
    return f"{count:,} {are} NaN or infinite among the draws (such as of {place})"


def _too_little(step: Step) -> Iterator[Finding]:
    if step.chains == 1:
        text = "there is one chain only, so nothing shows whether it has found the whole posterior"
        yield Finding("chains", step.name, text, (_MORE_CHAINS,))
    if step.draws < MIN_DRAWS:
        text = (
            f"{step.draws} draws per chain are too few to judge convergence by "
            f"(at least {MIN_DRAWS} are needed)"
        )
        yield Finding("effective", step.name, text, (_MORE_DRAWS,))


def _not_moving(step: Step) -> Iterator[Finding]:
    remedies = (_OTHER_SEED, _SMALLER_STEPS)
    if all(m.fixed.all() for m in step.measured) and not step.energy_varies:
        text = "the sampler did not move: all its draws are the same"
        yield Finding("chains", step.name, text, remedies)
    for m in step.measured:
        if m.stuck.any():
            chains = np.flatnonzero(m.stuck.any(axis=1))
            place = m.quantity.place(int(np.argmax(m.stuck.any(axis=0))))
            text = f"{_name_chains(chains, step.chains)} got stuck: {place} never changes there"
            yield Finding("chains", step.name, text, remedies)
            return


def _disagreement(step: Step, *, without_weights: bool) -> Iterator[Finding]:
    candidates = [m for m in step.measured if not (without_weights and _is_weights(m))]
    worst, place = extreme([(m, m.rhat) for m in candidates], largest=True)
    if not worst > RHAT_GOOD:
        return
    bad = worst > RHAT_BAD
    text = (
        f"the chains {'disagree' if bad else 'do not quite agree'} about {place} "
        f"(R-hat is {worst:.3f}, and good up to {RHAT_GOOD})"
    )
    remedies = (_MORE_DRAWS, f"should that not help, {_OTHER_SEED}") if bad else (_MORE_DRAWS,)
    yield Finding("chains", step.name, text, remedies, bad)


def _few_effective(step: Step, *, without_weights: bool) -> Iterator[Finding]:
    good = _good_ess(step.chains)
    candidates = [m for m in step.measured if not (without_weights and _is_weights(m))]
    bulk, bulk_place = extreme([(m, m.bulk) for m in candidates], largest=False)
    tail, tail_place = extreme([(m, m.tail) for m in candidates], largest=False)
    least, place, what = min(
        (bulk, bulk_place, "the mean"), (tail, tail_place, "the tails"), key=lambda found: found[0]
    )
    if least < good:
        text = (
            f"for {what} of {place}, the {step.chains * step.draws:,} draws are worth only "
            f"{least:,.0f} independent ones ({good:,.0f} are wanted)"
        )
        bad = least < ESS_USABLE_SHARE * good
        yield Finding("effective", step.name, text, (_MORE_DRAWS,), bad)


def _trouble(step: Step) -> Iterator[Finding]:
    """Divergences and low E-BFMI."""
    if step.share >= DIVERGENCES_GOOD:
        text = (
            f"{step.divergences:,.0f} of {step.transitions:,} transitions diverged "
            f"({step.share:.2%}; fewer than {DIVERGENCES_GOOD:.1%} are harmless), so that the "
            "sampler may have missed the narrow parts of the posterior"
        )
        yield Finding("divergences", step.name, text, (_SMALLER_STEPS,))
    low = np.flatnonzero(step.energy < EBFMI_GOOD)
    if len(low):
        text = (
            f"{_name_chains(low, step.chains)} moved too slowly between regions of high and low "
            f"probability (E-BFMI {np.nanmin(step.energy):.2f}, should be {EBFMI_GOOD} or more), "
            "so that the tails are poorly explored"
        )
        yield Finding("energy", step.name, text, (_MORE_DRAWS, _TIGHTER_PRIORS))


def _good_ess(chains: int) -> float:
    """Effective draws wanted: 400, or 100 per chain of fewer than four."""
    return min(ESS_GOOD, ESS_GOOD_PER_CHAIN * chains)


def extreme(found: list[tuple[Measured, FloatArray]], *, largest: bool) -> tuple[float, str]:
    """The largest or smallest value over quantities, and its place; NaN if there is none."""
    best, place = math.nan, ""
    for measured, values in found:
        if np.isnan(values).all():
            continue
        i = int(np.nanargmax(values) if largest else np.nanargmin(values))
        if math.isnan(best) or (values[i] > best) == largest:
            best, place = float(values[i]), measured.quantity.place(i)
    return best, place


def _is_weights(measured: Measured) -> bool:
    return measured.quantity.name == "weights"


def _modes(step: Step) -> Finding | None:
    """Say which chains favour which base model, where chains settle on different weights."""
    for m in step.measured:
        if _is_weights(m) and (m.rhat > RHAT_MODES).any():
            means = np.mean(m.quantity.draws, axis=1)  # (chain, N)
            spread = np.where(m.rhat > RHAT_MODES, np.ptp(means, axis=0), -1.0)
            worst = int(np.argmax(spread))
            if _settled(m.quantity.draws[..., worst]):
                text = _describe_modes(m.quantity, means, worst)
                return Finding("chains", step.name, text, (_JOIN_MODES,))
    return None


def _settled(draws: FloatArray) -> bool:
    """Whether chains (chain, draw) know their own mean, or lie far apart in groups."""
    within = min(float(ess_bulk(chain[None])) for chain in draws)
    gap = float(np.max(np.diff(np.sort(np.mean(draws, axis=1)))))
    typical = float(np.mean(np.std(draws, axis=1)))
    return within >= _ENOUGH_WITHIN or gap > _FAR_APART * typical


def _describe_modes(quantity: Quantity, means: FloatArray, worst: int) -> str:
    n_models = quantity.shape[0]
    by_model = means.reshape(len(means), n_models, -1)
    rest = by_model.shape[2]
    model, site = divmod(worst, rest)
    at_site = by_model[:, :, site]
    favourite = np.argmax(at_site, axis=1)
    where = ", ".join(quantity.names(worst)[1:])
    intro = (
        "the weights are multimodal, which means that different weights explain the data about as "
        f"well{f' (seen best at site {where})' if where else ''}: "
    )

    def name(k: int) -> str:
        return quantity.names(k * rest)[0]

    if len(np.unique(favourite)) > 1:
        parts = []
        for k in np.unique(favourite):
            chains = np.flatnonzero(favourite == k)
            verb = "favours" if len(chains) == 1 else "favour"
            weight = np.mean(at_site[chains, k])
            parts.append(f"{_name_chains(chains, len(means))} {verb} {name(k)} ({weight:.2f})")
        return intro + ", ".join(parts)
    order = np.argsort(at_site[:, model])
    cut = int(np.argmax(np.diff(at_site[order, model]))) + 1
    parts = []
    for chains in (np.sort(order[:cut]), np.sort(order[cut:])):
        verb = "gives" if len(chains) == 1 else "give"
        weight = np.mean(at_site[chains, model])
        named = _name_chains(chains, len(means))
        parts.append(f"{named} {verb} {name(model)} a weight of {weight:.2f}")
    return intro + ", ".join(parts)


def _name_chains(chains: NDArray[np.intp], total: int) -> str:
    """Chains, counted from one: 'chain 2', 'chains 1, 3', '9 of 32 chains'."""
    if len(chains) > _FEW_CHAINS:
        return f"{len(chains)} of {total} chains"
    return f"chain{'s' * (len(chains) > 1)} {', '.join(str(c + 1) for c in chains)}"
