"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from bne.errors import InputError

__all__ = ["PathLike", "atomic_path", "check_target", "existing_file", "first_line"]

PathLike: TypeAlias = "str | os.PathLike[str]"


def check_target(path: PathLike, suffixes: tuple[str, ...] = ()) -> Path:
    """Check that a file could be written here, before the work whose result it will hold.

    Parameters
    ----------
    path
        File to be written.
    suffixes
        Suffixes that are allowed; any, if empty.

    Returns
    -------
    Path
        The file itself, symbolic links followed.

    Raises
    ------
    InputError
        For a directory, a device, a directory that is missing or read-only, or another suffix.
    """
    target = Path(os.path.realpath(Path(path)))
    if suffixes and target.suffix.lower() not in suffixes:
        raise InputError(f"{path}: the output must end in one of {', '.join(suffixes)}")
    if target.is_dir():
        raise InputError(f"{path} is a directory; name a file in it")
    if target.exists() and not target.is_file():
        raise InputError(f"{path} is not a regular file; name another")
    if not target.parent.is_dir():
        raise InputError(f"the directory {target.parent} does not exist; create it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"the directory {target.parent} cannot be written to")
    return target


@contextmanager
def atomic_path(path: PathLike) -> Iterator[Path]:
    """Give a temporary file in the directory of `path`, which replaces it at the end or vanishes.

    Parameters
    ----------
    path
        File that appears only if the block succeeds; until then an older one stays as it is.

    Yields
    ------
    Path
        The temporary file, with the suffix of `path`.
    """
    target = Path(os.path.realpath(Path(path)))
    temporary = target.with_name(f".{target.stem}.{secrets.token_hex(4)}{target.suffix}")
    try:
        yield temporary
        if target.exists():
            os.chmod(temporary, target.stat().st_mode & 0o7777)
        _flush_to_disk(temporary)
        os.replace(temporary, target)
    except RuntimeError as error:  # what the HDF5 library makes of a full disk
        raise OSError(f"could not write {path}: {first_line(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def existing_file(path: PathLike, error: type[InputError]) -> Path:
    """Return the path of a file that can be read; otherwise raise `error` with a sentence."""
    path = Path(path)
    if path.is_dir():
        raise error(f"{path} is a directory, not a file")
    if not path.exists():
        raise error(f"there is no file {path}")
    if not os.access(path, os.R_OK):
        raise error(f"{path} cannot be read: permission denied")
    return path


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _flush_to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
