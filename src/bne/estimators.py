"""The estimators: Bayesian nonparametric ensembles and their reduced forms."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from bne import fits
from bne._files import PathLike
from bne.checks import BaseModel
from bne.ensemble import Ensemble
from bne.errors import FitFileError
from bne.problem import Inference, Priors, Strategy
from bne.trend import PriorMean

__all__ = ["BAE", "BMA", "BNE", "load"]


class BNE(Ensemble):
    r"""Bayesian nonparametric ensemble.

    Combines K base models with weights that vary over the inputs, a residual process for what all
    of them get wrong, and noise whose scale and skewness vary too:

    .. math::
        y(x) = \sum_k f_k(x)\,\omega_k(x) + \delta(x) + \sigma s(x)\,\varepsilon + m, \qquad
        \omega = \mathrm{softmax}(w_1, \ldots, w_K), \quad \varepsilon \sim N(0, 1), \quad
        m \sim \mathrm{Exp}(\mathrm{mean}\ \lambda(x)),

    with Gaussian processes :math:`w_k, \delta, \log s, \log\lambda`. All predictions are averages
    over posterior draws, in the units of y.

    Parameters
    ----------
    base_models : columns, or (name, fitted predictor) pairs, optional
        Predictions of the base models, in the units of y; a predictor's ``predict`` is called on
        the coordinates. By default every column that is neither a coordinate nor y.
    coords : columns, optional
        One to three coordinates. Columns called lon and lat (longitude, latitude, lng) are degrees
        and become kilometres; others keep their units. By default the longitude and latitude
        columns, if there are any, else the first two.
    residual, variance, skewness : bool
        Whether to have :math:`\delta`, *s* and :math:`\lambda`.
    prior_mean : {"zero", "linear", "gam", "linear+gam"}
        Prior mean of :math:`\delta`: nothing, a line in the base models, a smooth trend in the
        coordinates, or both. ``"linear"`` mends base models that are all too flat.
    priors : {"default", "paper"}
        Priors in standard units with length-scales set by the sites; or as printed in the paper,
        in the units of y and of the coordinates, with length-scales between 2 and 10.
    kernel : {"matern32", "matern12", "matern52", "squared_exponential"}
        Covariance of the processes.
    gp : {"auto", "hilbert", "rff", "exact"}
        Representation of the processes; ``gp_`` says which was chosen, and how exact it is.
    n_features : int, optional
        Number of basis functions (``hilbert``: at most; ``rff``: 128 by default).
    domain : table of sites, optional
        The box of these sites and the training sites is where predictions can be asked for. By
        default the box of the training sites, wider by half its width on every side.
    crs : optional
        Coordinate reference system of the coordinates, such as "EPSG:4326".
    strategy : {"cut", "plugin", "joint"}
        How the steps are tied. ``cut``: the weights first, then the residual and the noise given
        each draw of the weights. ``plugin``: given the mean mixture only, whose uncertainty is then
        lost. ``joint``: everything at once, the posterior of the whole model.
    inference : {"mcmc", "fast"}
        Markov chains, or the nested Laplace approximation.
    chains, draws, warmup, thin : int
        Chains, kept draws of each, transitions before the first of them, and per kept draw.
    target_accept : float
        Acceptance rate that the step size aims at; raise it should transitions diverge.
    random_state : int, Generator or None
        Seed of all draws; None takes a fresh one, which ``seed_`` then tells.

    Attributes
    ----------
    posterior_ : arviz.InferenceData
        Draws of every step, at the training sites.
    gp_ : str
        The representation in words.
    inference_ : str
        Where the draws come from, in words: Markov chains, or the approximation.
    seed_ : int
        The seed.

    Examples
    --------
    >>> from bne.simulation import simulate_region
    >>> region = simulate_region(random_state=0)
    >>> model = BNE(region.base_models, region.coords, inference="fast", random_state=0)
    >>> model = model.fit(region.train, region.train["pm25"])
    >>> model.predict(region.sites).shape
    (1600,)
    """

    def __init__(
        self,
        base_models: BaseModel | Sequence[BaseModel] | None = None,
        coords: Hashable | Sequence[Hashable] | None = None,
        *,
        residual: bool = True,
        variance: bool = True,
        skewness: bool = True,
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
        super().__init__(
            base_models=base_models,
            coords=coords,
            prior_mean=prior_mean,
            priors=priors,
            kernel=kernel,
            gp=gp,
            n_features=n_features,
            domain=domain,
            crs=crs,
            strategy=strategy,
            inference=inference,
            chains=chains,
            draws=draws,
            warmup=warmup,
            thin=thin,
            target_accept=target_accept,
            random_state=random_state,
        )
        self.residual = residual
        self.variance = variance
        self.skewness = skewness


class BAE(Ensemble):
    r"""Bayesian additive ensemble: weights and residual, with normal noise of one scale.

    .. math:: y(x) = \sum_k f_k(x)\,\omega_k(x) + \delta(x) + \sigma\varepsilon

    `bne.BNE` with ``variance=False, skewness=False``; its other parameters are the same.
    """

    variance = False
    skewness = False


class BMA(Ensemble):
    r"""Bayesian model averaging with weights that vary over the inputs, and normal noise.

    .. math:: y(x) = \sum_k f_k(x)\,\omega_k(x) + \sigma\varepsilon

    `bne.BNE` with ``residual=False, variance=False, skewness=False``; its other parameters are the
    same.
    """

    residual = False
    variance = False
    skewness = False


_CLASSES: dict[str, type[Ensemble]] = {"BNE": BNE, "BAE": BAE, "BMA": BMA}


def load(path: PathLike) -> Ensemble:
    """Read a fit that `save` wrote.

    Parameters
    ----------
    path : path
        NetCDF file. Nothing in it is executed.

    Returns
    -------
    BNE, BAE or BMA
        Fitted; predicts the same bits as the model that was saved.

    Raises
    ------
    FitFileError
        With a sentence, for a file that is missing, damaged, foreign, or of a newer version.
    """
    stored = fits.read(path)
    if stored.estimator not in _CLASSES:
        raise FitFileError(f"{path} holds a {stored.estimator!r}, which this bne does not know")
    model = _CLASSES[stored.estimator](**stored.parameters)
    for name, value in stored.attributes.items():
        setattr(model, name, value)
    return model
