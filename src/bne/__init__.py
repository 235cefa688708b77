"""Bayesian nonparametric ensembles: spatially adaptive averaging with calibrated uncertainty."""

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
