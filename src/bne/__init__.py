"""Bayesian nonparametric ensembles: spatially adaptive averaging with calibrated uncertainty."""

__version__ = "0.1.0"
