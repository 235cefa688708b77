"""The errors and warnings that bne raises, so that callers can tell them from everybody else's."""

from __future__ import annotations

__all__ = [
    "DomainWarning",
    "FitFileError",
    "InputError",
    "InputWarning",
    "SamplingWarning",
]


class InputError(ValueError):
    """Bad input: one sentence that says what is wrong and what to do about it."""


class FitFileError(InputError):
    """A file that is not a fit of this package, is damaged, or was written by a newer version."""


class InputWarning(UserWarning):
    """Legal but suspicious input, such as two base models that agree at every site."""


class DomainWarning(UserWarning):
    """Sites outside the domain for which the model was fitted."""


class SamplingWarning(UserWarning):
    """A sampler whose draws should not be trusted as they are."""
