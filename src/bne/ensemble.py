"""What the estimators share: checks, the story of a fit, the prediction calls."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Any, Self

import arviz as az
import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from bne import fits
from bne._files import PathLike
from bne._progress import Progress
from bne.checkpoint import Checkpoint
from bne.checks import BaseModel, Sites, as_frame, read_sites, read_training
from bne.coordinates import CoordinateMap
from bne.diagnostics import Diagnosis, diagnose
from bne.errors import InputError, SamplingWarning
from bne.fitting import fit_steps
from bne.inference import Settings
from bne.posterior import Posterior
from bne.prediction import FieldDraws, PredictiveLaw
from bne.problem import FAST, Inference, Options, Priors, Problem, Strategy
from bne.trend import PriorMean

__all__ = ["Ensemble"]

FloatArray = NDArray[np.float64]
_DIAGNOSED_SITES = 100


class Ensemble(RegressorMixin, BaseEstimator):
    """Common ground of `bne.BNE`, `bne.BAE` and `bne.BMA`, which say what its parameters mean."""

    residual: bool = True
    variance: bool = True
    skewness: bool = True

    def __init__(
        self,
        base_models: BaseModel | Sequence[BaseModel] | None = None,
        coords: Hashable | Sequence[Hashable] | None = None,
        *,
        prior_mean: PriorMean = "zero",
        priors: Priors = "default",
        kernel: str = "matern32",
        gp: str = "auto",
        n_features: int | None = None,
        domain: Any = None,
        crs: Any = None,
        strategy: Strategy = "cut",
        inference: Inference = "mcmc",
        chains: int = 4,
        draws: int = 1000,
        warmup: int = 800,
        thin: int = 3,
        target_accept: float = 0.8,
        random_state: int | np.random.Generator | None = None,
    ) -> None:
        self.base_models = base_models
        self.coords = coords
        self.prior_mean = prior_mean
        self.priors = priors
        self.kernel = kernel
        self.gp = gp
        self.n_features = n_features
        self.domain = domain
        self.crs = crs
        self.strategy = strategy
        self.inference = inference
        self.chains = chains
        self.draws = draws
        self.warmup = warmup
        self.thin = thin
        self.target_accept = target_accept
        self.random_state = random_state

    # ---- Fit

    def fit(
        self,
        X: Any,
        y: ArrayLike,
        *,
        progress: bool = False,
        checkpoint: PathLike | None = None,
    ) -> Self:
        """Fit to a table of sites.

        Parameters
        ----------
        X : table
            DataFrame, mapping of columns, xarray Dataset, or array; one row per observation.
        y : (n,)
            The response.
        progress : bool
            Show progress on stderr.
        checkpoint : path, optional
            File in which progress is kept, and from which an interrupted fit resumes, to the same
            draws. It is deleted at the end.

        Returns
        -------
        Ensemble
            The estimator itself.

        Warns
        -----
        SamplingWarning
            If the draws should not be trusted.
        """
        options, settings, seed = self._options(), self._settings(), _seed(self.random_state)
        sites, values = read_training(X, y, self.coords, self.base_models)
        if sites.coords.shape[1] > 3:
            raise InputError(
                f"there are {sites.coords.shape[1]} coordinates; at most 3 are possible"
            )
        coordinate_map = CoordinateMap.fit(sites.coords, sites.coord_names, self.crs)
        problem = Problem.build(
            options,
            coordinate_map.transform(sites.coords),
            sites.base,
            values,
            self._domain(coordinate_map),
            seed,
        )
        stored = None if checkpoint is None else Checkpoint(checkpoint, problem, settings, seed)
        with Progress(show=progress, steps=list(problem.structures())) as reporter:
            steps = fit_steps(problem, settings, seed, progress=reporter, checkpoint=stored)
        if stored is not None:
            stored.remove()
        validate_data(self, X, skip_check_array=True)
        self._remember(sites, coordinate_map, Posterior(problem, steps, seed), y)
        verdict = self.diagnose()
        if not verdict.ok:
            warnings.warn(verdict.verdict, SamplingWarning, stacklevel=2)
        return self

    def _options(self) -> Options:
        names = Options.__dataclass_fields__
        return Options(**{name: getattr(self, name) for name in names})

    def _settings(self) -> Settings:
        smallest = {"chains": 1, "draws": 1, "warmup": 0, "thin": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise InputError(f"{name}={value!r} must be a whole number, at least {least}")
        if not 0.0 < self.target_accept < 1.0:
            raise InputError(f"target_accept={self.target_accept!r} must be between 0 and 1")
        return Settings(
            chains=int(self.chains),
            draws=int(self.draws),
            warmup=int(self.warmup),
            thin=int(self.thin),
            target_accept=float(self.target_accept),
        )

    def _domain(self, coordinate_map: CoordinateMap) -> FloatArray | None:
        if self.domain is None:
            return None
        names = list(coordinate_map.names)
        sites = read_sites(self.domain, names, names, what="domain")
        return coordinate_map.transform(sites.coords)

    def _remember(
        self, sites: Sites, coordinate_map: CoordinateMap, posterior: Posterior, y: Any
    ) -> None:
        name = getattr(y, "name", None)
        self.coord_names_ = sites.coord_names
        self.base_names_ = sites.base_names
        self.response_name_ = "y" if name is None else name
        self.coordinate_map_ = coordinate_map
        self.index_ = sites.index
        self.gp_ = posterior.problem.approximation.note
        self.seed_ = posterior.seed
        self._posterior = posterior

    # ---- Predict

    def predict(self, X: Any) -> FloatArray:
        r"""Predictive mean (n,) of :math:`\sum_k f_k\omega_k + \delta + \lambda`, in units of y."""
        return np.asarray(self._law(X)[0].mean(), dtype=np.float64)

    def predict_var(self, X: Any) -> pd.Series:
        """Predictive variance (n,), in squared units of y."""
        law, index = self._law(X)
        return pd.Series(np.asarray(law.var()), index=index, name=self.response_name_)

    def predict_quantiles(self, X: Any, alpha: float | Sequence[float] = 0.5) -> pd.DataFrame:
        """Predictive quantiles, in units of y.

        Parameters
        ----------
        X : table of sites
        alpha : float or sequence of float
            Levels between 0 and 1.

        Returns
        -------
        DataFrame
            One row per site, columns (y, level).
        """
        levels = np.atleast_1d(np.asarray(alpha, dtype=np.float64))
        law, index = self._law(X)
        columns = pd.MultiIndex.from_product([[self.response_name_], levels.tolist()])
        return pd.DataFrame(np.asarray(law.ppf(levels)), index=index, columns=columns)

    def predict_interval(self, X: Any, coverage: float | Sequence[float] = 0.9) -> pd.DataFrame:
        """Central predictive intervals, in units of y.

        Parameters
        ----------
        X : table of sites
        coverage : float or sequence of float
            Probabilities of the intervals, between 0 and 1.

        Returns
        -------
        DataFrame
            One row per site, columns (y, coverage, "lower" or "upper").
        """
        shares = np.atleast_1d(np.asarray(coverage, dtype=np.float64))
        if not ((shares > 0.0) & (shares < 1.0)).all():
            raise InputError(f"coverage={coverage!r} must lie between 0 and 1")
        levels = np.column_stack([0.5 * (1.0 - shares), 0.5 * (1.0 + shares)]).ravel()
        law, index = self._law(X)
        columns = pd.MultiIndex.from_product(
            [[self.response_name_], shares.tolist(), ["lower", "upper"]]
        )
        return pd.DataFrame(np.asarray(law.ppf(levels)), index=index, columns=columns)

    def predict_proba(self, X: Any) -> PredictiveLaw:
        """Return the predictive law at sites: its moments, density, quantiles, draws and scores."""
        return self._law(X, labelled=True)[0]

    def summary(
        self,
        X: Any,
        alpha: Sequence[float] = (0.025, 0.5, 0.975),
        threshold: float | None = None,
    ) -> pd.DataFrame:
        """Everything that a map shows, in one pass over the sites.

        Parameters
        ----------
        X : table of sites
        alpha : sequence of float
            Levels of the quantiles.
        threshold : float, optional
            Value whose probability of being exceeded is wanted.

        Returns
        -------
        DataFrame
            One row per site: ``mean``, ``sd``, ``q2.5`` ... (quantiles by per cent),
            ``exceedance``, ``weight_NAME`` and ``weight_sd_NAME`` per base model, ``var_PART`` (see
            `decompose`), and ``outside`` (see `outside`).
        """
        law, index = self._law(X)
        found = law.summary(alpha=alpha, threshold=threshold)
        table: dict[str, Any] = {"mean": found.mean, "sd": found.sd}
        for level, values in zip(alpha, np.asarray(found.quantiles).T, strict=True):
            table[f"q{100 * level:.10g}"] = values
        if found.exceedance is not None:
            table["exceedance"] = found.exceedance
        for name, mean in zip(self.base_names_, found.weight_mean, strict=True):
            table[f"weight_{name}"] = mean
        for name, sd in zip(self.base_names_, found.weight_sd, strict=True):
            table[f"weight_sd_{name}"] = sd
        table |= {f"var_{name}": values for name, values in found.variance.items()}
        table["outside"] = self._beyond(self._sites(X))
        return pd.DataFrame(table, index=index)

    def weights(self, X: Any) -> pd.DataFrame:
        r"""Posterior mean and sd of the weights :math:`\omega_k`.

        Returns
        -------
        DataFrame
            One row per site, columns ("mean" or "sd", base model).
        """
        law, index = self._law(X)
        mean, sd = law.weights()
        columns = pd.MultiIndex.from_product([["mean", "sd"], self.base_names_])
        return pd.DataFrame(np.concatenate([mean, sd]).T, index=index, columns=columns)

    def decompose(self, X: Any) -> pd.DataFrame:
        r"""Parts of the predictive variance, in squared units of y.

        Returns
        -------
        DataFrame
            One row per site. ``total`` = ``aleatoric`` + ``epistemic``; ``aleatoric`` =
            ``gaussian_noise`` :math:`E[\sigma^2s^2]` + ``skewed_noise`` :math:`E[\lambda^2]`;
            ``epistemic`` = ``weights`` + ``residual`` + ``calibration`` + ``covariance``, the
            variances of :math:`\sum f\omega`, :math:`\delta`, :math:`\lambda` and twice their
            covariances.
        """
        law, index = self._law(X)
        return pd.DataFrame(law.decompose()).set_axis(index, axis=0)

    def sample(
        self,
        X: Any,
        n: int = 100,
        *,
        noise: bool = True,
        random_state: int | np.random.Generator | None = None,
    ) -> FloatArray:
        """Coherent joint draws, in units of y.

        Parameters
        ----------
        X : table of sites
        n : int
            Number of draws; each is a surface of one posterior draw.
        noise : bool
            Whether to add noise, as for new observations, or to draw the mean surface.
        random_state : int, Generator or None
            Seed; by default that of the fit.

        Returns
        -------
        ndarray of shape (n, sites)
        """
        if not isinstance(n, int | np.integer) or n < 1:
            raise InputError(f"n={n!r} must be a whole number, at least 1")
        law, _ = self._law(X)
        seed = self.seed_ if random_state is None else random_state
        return np.asarray(law.sample(int(n), random_state=seed, noise=noise))

    def exceedance(self, X: Any, threshold: float) -> pd.Series:
        """Probability (n,) of a new observation above `threshold`, which is in units of y."""
        law, index = self._law(X)
        return pd.Series(
            np.asarray(law.exceedance(float(threshold))), index=index, name="exceedance"
        )

    def outside(self, X: Any) -> pd.Series:
        """Say which sites lie beyond the box of the training sites, where data say little."""
        sites = self._sites(X)
        return pd.Series(self._beyond(sites), index=_index(sites), name="outside")

    # ---- Judge, keep

    def diagnose(self) -> Diagnosis:
        """Say whether the draws can be trusted: R-hat, ESS, divergences, E-BFMI, in words."""
        check_is_fitted(self, "_posterior")
        steps = self._posterior.steps
        picked = self._posterior.picked(_DIAGNOSED_SITES)
        labels = picked if self.index_ is None else self.index_[picked]
        fast = self._posterior.problem.options.inference == "fast"
        return diagnose(
            self._posterior.innovations(_DIAGNOSED_SITES),
            {step: draws.stats for step, draws in steps.items()},
            labels={
                "weights": [list(map(str, self.base_names_)), list(labels)],
                **{name: [list(labels)] for name in ("residual", "log_scale", "log_skew")},
            },
            approximate=FAST if fast else None,
        )

    @property
    def inference_(self) -> str:
        """Where the draws come from, in words: Markov chains, or an approximation."""
        check_is_fitted(self, "_posterior")
        return self._posterior.problem.options.inference_in_words

    @property
    def posterior_(self) -> az.InferenceData:
        """Draws of every step in ArviZ's form, functions at the training sites."""
        check_is_fitted(self, "_posterior")
        return fits.to_inference_data(self._posterior, self.base_names_, self.index_)

    def save(self, path: PathLike) -> None:
        """Write the fit to a NetCDF file, which `bne.load` reads; base models by name only."""
        check_is_fitted(self, "_posterior")
        fits.save(self, path)

    # ---- Inside

    def _sites(self, X: Any) -> Sites:
        check_is_fitted(self, "_posterior")
        if not isinstance(X, pd.DataFrame) and hasattr(self, "n_features_in_"):
            as_frame(X)
            validate_data(self, X, reset=False, skip_check_array=True)
        models = self.base_names_ if self.base_models is None else self.base_models
        return read_sites(X, list(self.coord_names_), models)

    def _law(self, X: Any, *, labelled: bool = False) -> tuple[PredictiveLaw, pd.Index]:
        sites = self._sites(X)
        coords = self.coordinate_map_.transform(sites.coords)
        self._require_inside(coords, _index(sites))

        posterior = self._posterior  # a law stays what it is when the model is fitted again

        def fields(rows: slice) -> FieldDraws:
            return posterior.fields(coords[rows], sites.base[rows])

        index = _index(sites)
        return PredictiveLaw(len(sites), fields, index=index if labelled else None), index

    def _require_inside(self, coords: FloatArray, index: pd.Index) -> None:
        outside = self._posterior.outside(coords)
        if outside.any():
            shown = ", ".join(map(str, index[outside][:5]))
            more = ", ..." if outside.sum() > 5 else ""
            raise InputError(
                f"{int(outside.sum())} site(s), rows {shown}{more}, lie outside the domain that "
                "the model was fitted for; fit again with domain= (--domain) naming the sites "
                "to be predicted"
            )

    def _beyond(self, sites: Sites) -> NDArray[np.bool_]:
        coords = self.coordinate_map_.transform(sites.coords)
        train = self._posterior.problem.coords
        slack = 1e-9 * np.ptp(train, axis=0)
        beyond = (coords < train.min(axis=0) - slack) | (coords > train.max(axis=0) + slack)
        return np.asarray(beyond.any(axis=1))


def _index(sites: Sites) -> pd.Index:
    return pd.RangeIndex(len(sites)) if sites.index is None else sites.index


def _seed(random_state: Any) -> int:
    """Turn a seed, a generator or None into the seed of a fit."""
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**32))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if not isinstance(random_state, int | np.integer) or random_state < 0:
        raise InputError(
            f"random_state={random_state!r} must be a whole number, a numpy Generator or None"
        )
    return int(random_state)
