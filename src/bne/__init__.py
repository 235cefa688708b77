"""Bayesian nonparametric ensembles: spatially adaptive averaging with calibrated uncertainty."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bne.diagnostics import Diagnosis
    from bne.errors import DomainWarning, FitFileError, InputError, InputWarning, SamplingWarning
    from bne.estimators import BAE, BMA, BNE, load
    from bne.noise import EMG
    from bne.prediction import PredictiveLaw

__version__ = "0.1.0"

__all__ = [
    "BAE",
    "BMA",
    "BNE",
    "EMG",
    "Diagnosis",
    "DomainWarning",
    "FitFileError",
    "InputError",
    "InputWarning",
    "PredictiveLaw",
    "SamplingWarning",
    "load",
]

# Public names are imported when first used: `bne --help` should not wait for JAX.
_HOMES = {
    "diagnostics": ("Diagnosis",),
    "errors": ("DomainWarning", "FitFileError", "InputError", "InputWarning", "SamplingWarning"),
    "estimators": ("BAE", "BMA", "BNE", "load"),
    "noise": ("EMG",),
    "prediction": ("PredictiveLaw",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(f"bne.{home}"), name)
            return globals()[name]
    raise AttributeError(f"module 'bne' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
