"""Checkpoints: what a long fit writes down, so that an interrupted one can go on.

A checkpoint is one ``.npz`` file of plain arrays: a fingerprint of the data, the model, the
settings and the seed; the draws of the steps that are done; the state of the sampler in the step
that is not. Transitions depend on the seed and the number of their block alone, so a resumed fit
makes the same draws as an unbroken one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bne._files import PathLike, atomic_path, check_target, first_line
from bne.errors import InputError
from bne.inference import Draws, Settings
from bne.model import Structure
from bne.problem import Problem

__all__ = ["Checkpoint"]

_SECONDS = 5.0
_FORMAT = "bne-checkpoint-1"
Arrays = dict[str, NDArray[Any]]


class Run(Protocol):
    """A sampler at work, which can say where it stands."""

    def state(self) -> Arrays:
        """Return everything that it needs to go on, as plain arrays."""
        ...


class Checkpoint:
    """The checkpoint of one fit.

    Parameters
    ----------
    path : path-like
        File to write, and to resume from where it exists.
    problem, settings, seed
        What the fit is of; a file of anything else is refused.
    """

    def __init__(self, path: PathLike, problem: Problem, settings: Settings, seed: int) -> None:
        self.path = check_target(path)
        self._parts = _parts(problem, settings, seed)
        self._written = time.monotonic()
        self._done: Arrays = {}
        self._state: Arrays = {}
        self._step = ""
        if Path(self.path).exists():
            self._read()

    def draws(self, step: str, structure: Structure) -> Draws | None:
        """Return the draws of a step that was done, if it was."""
        prefix = f"done.{step}."
        found = {k.removeprefix(prefix): v for k, v in self._done.items() if k.startswith(prefix)}
        return unpack_draws(found, structure) if found else None

    def state(self, step: str) -> Arrays | None:
        """Return the state of the sampler in a step that was begun, if it was."""
        return self._state if self._state and self._step == step else None

    def keep(self, step: str, draws: Draws) -> None:
        """Write down that a step is done."""
        self._done |= {f"done.{step}.{k}": v for k, v in pack_draws(draws).items()}
        self._state = {}
        self._write()

    def after_block(self, step: str, sampler: Run) -> None:
        """Write the state of the sampler, now and then."""
        if time.monotonic() - self._written >= _SECONDS:
            self._step, self._state = step, sampler.state()
            self._write()

    def remove(self) -> None:
        """Delete the file, once the fit is done."""
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        arrays = self._done | {f"state.{k}": v for k, v in self._state.items()}
        header = {"format": _FORMAT, "step": self._step, "parts": self._parts}
        with atomic_path(self.path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, header=np.asarray(json.dumps(header)), **arrays)
            file.flush()
            os.fsync(file.fileno())
        self._written = time.monotonic()

    def _read(self) -> None:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                header = json.loads(str(file["header"]))
                arrays = {name: file[name] for name in file.files if name != "header"}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{self.path} is not a checkpoint of bne, or is damaged ({first_line(error)}); "
                "delete it, or name another file"
            ) from None
        if header.get("format") != _FORMAT:
            raise InputError(f"{self.path} is not a checkpoint of this version of bne; delete it")
        known = header["parts"]
        other = [name for name, digest in self._parts.items() if known.get(name) != digest]
        if other:
            raise InputError(
                f"{self.path} is the checkpoint of another fit (other {', '.join(other)}); delete "
                "it, or name another file"
            )
        self._step = header["step"]
        self._done = {k: v for k, v in arrays.items() if k.startswith("done.")}
        self._state = {
            k.removeprefix("state."): v for k, v in arrays.items() if k.startswith("state.")
        }


def pack_draws(draws: Draws) -> Arrays:
    """Draws as named arrays."""
    arrays: Arrays = {"hyper": draws.hyper, "trend": draws.trend}
    if draws.order is not None:
        arrays["order"] = draws.order
    arrays |= {f"gamma.{name}": values for name, values in draws.gamma.items()}
    return arrays | {f"stats.{name}": values for name, values in draws.stats.items()}


def unpack_draws(arrays: Mapping[str, NDArray[Any]], structure: Structure) -> Draws:
    """Draws from what `pack_draws` returned."""

    def part(prefix: str) -> Arrays:
        return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}

    return Draws(
        structure,
        arrays["hyper"],
        arrays["trend"],
        part("gamma."),
        part("stats."),
        arrays.get("order"),
    )


def _parts(problem: Problem, settings: Settings, seed: int) -> dict[str, str]:
    """Digests by what they are of, in the words of a message."""
    data = [problem.coords, problem.base, problem.response]
    model = problem.options.to_dict() | {
        "trend": problem.trend.to_dict(),
        "priors": {name: prior.to_dict() for name, prior in problem.priors.items()},
        "note": problem.approximation.note,
    }
    return {
        "data": _digest(b"".join(np.ascontiguousarray(x).tobytes() for x in data)),
        "model": _digest(json.dumps(model, sort_keys=True).encode()),
        "settings of the sampler": _digest(json.dumps(asdict(settings), sort_keys=True).encode()),
        "seed": str(seed),
        "version of bne": metadata.version("bne"),
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
