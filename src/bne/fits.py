"""A fit as a file, and in ArviZ's form."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from bne._files import PathLike
from bne.approximation import Approximation
from bne.checkpoint import pack_draws, unpack_draws
from bne.coordinates import CoordinateMap, Standardiser
from bne.errors import FitFileError, InputError
from bne.kernels import Kernel
from bne.posterior import Posterior
from bne.priors import Prior
from bne.problem import Options, Problem
from bne.processes import Fourier, Hilbert, Representation
from bne.site_processes import Dual, Exact, Nodes
from bne.storage import read_fit, write_fit
from bne.trend import Trend

if TYPE_CHECKING:
    from bne.ensemble import Ensemble

__all__ = ["StoredFit", "read", "save", "to_inference_data"]

FloatArray = NDArray[np.float64]
_ALL_SITES = 10**9
_LABELS = {"residual": "delta", "log_scale": "log_s", "log_skew": "log_lambda", "weights": "omega"}


@dataclass(frozen=True)
class StoredFit:
    """What a file holds: class and parameters of the estimator, and its fitted attributes."""

    estimator: str
    parameters: dict[str, Any]
    attributes: dict[str, Any]


def save(model: Ensemble, path: PathLike) -> None:
    """Write a fitted estimator to a NetCDF file."""
    posterior: Posterior = model._posterior
    problem = posterior.problem
    arrays, kind = _pack_representation(problem.approximation.representation)
    groups = {
        "data": _dataset(
            {"coords": problem.coords, "base": problem.base, "response": problem.response}
        ),
        "representation": _dataset(arrays),
    }
    for step, draws in posterior.steps.items():
        groups[f"step_{step}"] = _dataset(pack_draws(draws))
    attrs = {
        "estimator": type(model).__name__,
        "parameters": _plain_parameters(model),
        "names": {
            "coords": _plain_names(model.coord_names_),
            "base_models": _plain_names(model.base_names_),
            "response": _plain_names([model.response_name_])[0],
            "index": None if model.index_ is None else [str(label) for label in model.index_],
            "n_features": getattr(model, "n_features_in_", None),
        },
        "coordinate_map": model.coordinate_map_.to_dict(),
        "options": problem.options.to_dict(),
        "standardiser": problem.standardiser.to_dict(),
        "trend": problem.trend.to_dict(),
        "priors": {name: prior.to_dict() for name, prior in problem.priors.items()},
        "approximation": {
            "kind": problem.approximation.kind,
            "representation": kind,
            "kernel": problem.options.kernel,
            "sizes": problem.approximation.sizes,
            "note": problem.approximation.note,
        },
        "steps": list(posterior.steps),
        "seed": posterior.seed,
    }
    write_fit(path, groups, attrs)


def read(path: PathLike) -> StoredFit:
    """Read what `save` wrote; see `bne.load`."""
    groups, attrs = read_fit(path)
    try:
        return _restore(groups, attrs)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FitFileError(
            f"{path} is damaged or incomplete ({type(error).__name__}: {error}); fit again"
        ) from None


def to_inference_data(
    posterior: Posterior, base_names: Sequence[Hashable], index: pd.Index | None
) -> az.InferenceData:
    """Draws of every step, at the training sites.

    The group ``posterior`` has the last step and the weights: ``omega``, ``delta``, ``log_s``,
    ``log_lambda`` in standard units, and hyperparameters; those of earlier steps carry the name of
    their step. ``sample_stats`` belongs to the last step.
    """
    n = len(posterior.problem.response)
    coords = {
        "site": np.arange(n) if index is None else np.asarray(index),
        "base_model": list(map(str, base_names)),
    }
    last = list(posterior.steps)[-1]
    variables: dict[str, FloatArray] = {}
    dims: dict[str, list[str]] = {}
    for step, values in posterior.at_training_sites(_ALL_SITES).items():
        for name, draws in values.items():
            final = step == last or name == "weights"
            label = _LABELS.get(name, name)
            label = label if final else f"{step}.{label}"
            variables[label] = draws
            if name == "weights":
                dims[label] = ["base_model", "site"]
            elif name in _LABELS:
                dims[label] = ["site"]
    stats = dict(posterior.steps[last].stats)
    stats["acceptance_rate"] = stats.pop("acceptance", np.zeros((0, 0)))
    data: az.InferenceData = az.from_dict(
        posterior=variables,
        sample_stats=stats if stats["acceptance_rate"].size else None,
        coords=coords,
        dims=dims,
        attrs={
            "steps": list(posterior.steps),
            "seed": posterior.seed,
            "inference": posterior.problem.options.inference_in_words,
        },
    )
    return data


def _restore(groups: Mapping[str, xr.Dataset], attrs: Mapping[str, Any]) -> StoredFit:
    options = Options(**attrs["options"])
    about = attrs["approximation"]
    data = _arrays(groups["data"])
    approximation = Approximation(
        about["kind"],
        _unpack_representation(
            about["representation"], _arrays(groups["representation"]), Kernel(about["kernel"])
        ),
        about["sizes"],
        about["note"],
    )
    problem = Problem(
        options=options,
        coords=data["coords"],
        base=data["base"],
        response=data["response"],
        standardiser=Standardiser.from_dict(attrs["standardiser"]),
        trend=Trend.from_dict(attrs["trend"]),
        priors={name: Prior.from_dict(values) for name, values in attrs["priors"].items()},
        approximation=approximation,
    )
    structures = problem.structures()
    steps = {
        step: unpack_draws(_arrays(groups[f"step_{step}"]), structures[step])
        for step in attrs["steps"]
    }
    names = attrs["names"]
    attributes = {
        "coord_names_": tuple(names["coords"]),
        "base_names_": tuple(names["base_models"]),
        "response_name_": names["response"],
        "coordinate_map_": CoordinateMap.from_dict(attrs["coordinate_map"]),
        "index_": None if names["index"] is None else pd.Index(names["index"]),
        "gp_": approximation.note,
        "seed_": int(attrs["seed"]),
        "_posterior": Posterior(problem, steps, int(attrs["seed"])),
    }
    if names["n_features"] is not None:
        attributes["n_features_in_"] = int(names["n_features"])
    return StoredFit(str(attrs["estimator"]), dict(attrs["parameters"]), attributes)


def _plain_parameters(model: Ensemble) -> dict[str, Any]:
    """Parameters that a file can hold: names for base models, no tables, no generators."""
    parameters = dict(model.get_params(deep=False))
    parameters["coords"] = _plain_names(model.coord_names_)
    parameters["base_models"] = _plain_names(model.base_names_)
    parameters["domain"] = None
    parameters["crs"] = model.coordinate_map_.crs
    parameters["random_state"] = model.seed_
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in parameters.items()
    }


def _plain_names(names: Sequence[Hashable]) -> list[str | int]:
    plain = [name.item() if isinstance(name, np.generic) else name for name in names]
    for name in plain:
        if not isinstance(name, str | int):
            raise InputError(f"the column name {name!r} cannot be stored; use text")
    return plain  # type: ignore[return-value]


def _dataset(arrays: Mapping[str, NDArray[Any]]) -> xr.Dataset:
    return xr.Dataset(
        {
            name: (
                [f"{name}_{axis}" for axis in range(np.ndim(values))],
                np.asarray(values).astype(np.int8) if np.asarray(values).dtype == bool else values,
            )
            for name, values in arrays.items()
        }
    )


def _arrays(group: xr.Dataset) -> dict[str, NDArray[Any]]:
    found = {str(name): np.asarray(group[name].values) for name in group.data_vars}
    return {
        name: values.astype(bool) if values.dtype == np.int8 else values
        for name, values in found.items()
    }


_KINDS: dict[str, type[Any]] = {
    "Hilbert": Hilbert,
    "Fourier": Fourier,
    "Exact": Exact,
    "Dual": Dual,
}


def _pack_representation(representation: Representation) -> tuple[dict[str, FloatArray], str]:
    """Arrays of a representation, flat, and the name of its class."""
    arrays: dict[str, FloatArray] = {}
    for name, value in vars(representation).items():
        if isinstance(value, Nodes | Hilbert):
            arrays |= {
                f"{name}.{k}": np.asarray(v) for k, v in vars(value).items() if k != "kernel"
            }
        elif not isinstance(value, Kernel):
            arrays[name] = np.asarray(value)
    return arrays, type(representation).__name__


def _unpack_representation(
    kind: str, arrays: Mapping[str, FloatArray], kernel: Kernel
) -> Representation:
    def part(prefix: str) -> dict[str, FloatArray]:
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}

    plain: dict[str, Any] = {k: v for k, v in arrays.items() if "." not in k}
    if kind in ("Exact", "Dual"):
        plain["nodes"] = Nodes(**part("nodes"))
    if kind == "Dual":
        return Dual(basis=Hilbert(**part("basis"), kernel=kernel), **plain)
    found: Representation = _KINDS[kind](**plain, kernel=kernel)
    return found
