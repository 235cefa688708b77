"""Commands and their options; nothing that a command needs is imported here, so help is quick."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn, TypeVar

__all__ = ["MODELS", "build_parser"]

Number = TypeVar("Number", int, float)

# What --model means: the class, and the switches of the full model.
MODELS: dict[str, tuple[str, dict[str, bool]]] = {
    "bne": ("BNE", {}),
    "bne-variance": ("BNE", {"skewness": False}),
    "bae": ("BAE", {}),
    "bma": ("BMA", {}),
}

_FIT_EXAMPLE = """example:
  bne fit train.csv --y aqs --coords lon,lat --base-models pred_av,pred_gs,pred_caces -o fit.nc

TRAIN has one row per monitor: its coordinates, the response, and the prediction of each base
model there. Columns called lon and lat are degrees; distances are then in kilometres. Other
coordinates keep their units."""

_PREDICT_EXAMPLE = """example:
  bne predict fit.nc grid.csv -o predictions.csv --quantiles 0.05,0.5,0.95 --threshold 12

OUT has one row per site of SITES:
  its coordinates
  mean, sd      of the predictive distribution
  q5, q50, ...  its quantiles
  exceedance    probability of a value above the threshold
  weight_NAME   mean weight of each base model; weight_sd_NAME its sd
  var_NAME      parts of the variance; they sum to var_total
  outside       whether the site lies beyond the range of the training sites
  draw_0, ...   joint draws, with --draws (in .nc, the variable draws)"""

_DIAGNOSE_EXAMPLE = """example:
  bne diagnose fit.nc

Prints whether the draws can be trusted, and the quantities with the worst R-hat and the fewest
effective draws."""

_DEMO_EXAMPLE = """example:
  bne demo -o demo

Simulates PM2.5 readings in a synthetic region, fits the full model to them, and writes tables,
maps and a report."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each command leaves its function in ``run``.

    Returns
    -------
    argparse.ArgumentParser
    """
    parser = _Parser(
        prog="bne",
        description="Bayesian nonparametric ensembles: combine the predictions of several models "
        "in space, with their uncertainty.",
        epilog="example:\n  bne demo -o demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_fit(commands)
    _add_predict(commands)
    _add_diagnose(commands)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        from importlib import metadata

        sys.stdout.write(f"bne {metadata.version('bne')}\n")
        raise SystemExit(0)


def _add_command(commands: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def run(arguments: argparse.Namespace) -> None:
        import_module(f"bne.cli._{name}").run(arguments)

    command.set_defaults(run=run)
    command.add_argument(
        "--json", action="store_true", help="print the result as JSON, for machines"
    )
    return command


def _add_demo(commands: Any) -> None:
    command = _add_command(
        commands, "demo", "fit, compare, map and report on simulated data", _DEMO_EXAMPLE
    )
    command.add_argument(
        "-o", "--output", default="demo", metavar="DIR", help="directory to write to (demo)"
    )
    _add_sampling(command)


def _add_fit(commands: Any) -> None:
    command = _add_command(commands, "fit", "fit a model to a table of sites", _FIT_EXAMPLE)
    add = command.add_argument
    add("train", metavar="TRAIN", help="table of training sites: .csv, .parquet or .nc")
    add("--y", required=True, metavar="COLUMN", help="the response")
    add("--coords", required=True, type=_names, metavar="A,B", help="one to three coordinates")
    add(
        "--base-models",
        required=True,
        type=_names,
        metavar="A,B,...",
        help="predictions of the base models",
    )
    add("-o", "--output", required=True, metavar="FIT", help="file to write, .nc")
    add("--model", choices=MODELS, default="bne", help="full, or reduced (%(default)s)")
    add(
        "--prior-mean",
        choices=("zero", "linear", "gam", "linear+gam"),
        default="zero",
        help="prior mean of the residual process (%(default)s)",
    )
    add(
        "--priors",
        choices=("default", "paper"),
        default="default",
        help="which priors (%(default)s)",
    )
    add(
        "--kernel",
        choices=("matern12", "matern32", "matern52", "squared_exponential"),
        default="matern32",
        help="covariance of the processes (%(default)s)",
    )
    add(
        "--gp",
        choices=("auto", "hilbert", "rff", "exact"),
        default="auto",
        help="representation (%(default)s)",
    )
    add(
        "--strategy",
        choices=("cut", "plugin", "joint"),
        default="cut",
        help="how the steps are tied (%(default)s)",
    )
    add(
        "--inference",
        choices=("mcmc", "fast"),
        default="mcmc",
        help="sampling, or an approximation (%(default)s)",
    )
    add(
        "--target-accept",
        type=_share,
        default=0.8,
        metavar="P",
        help="acceptance that the step size aims at; raise it should transitions diverge "
        "(%(default)s)",
    )
    add("--crs", help="coordinate reference system, such as EPSG:5070")
    add(
        "--domain",
        metavar="SITES",
        help="table of sites that will be predicted; its coordinates set the domain",
    )
    add("--checkpoint", metavar="FILE", help="save progress here, and resume from it if it exists")
    add("--drop-missing", action="store_true", help="leave out rows with missing values")
    _add_sampling(command)


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--chains", type=_positive, default=4, metavar="N", help="chains (%(default)s)"
    )
    command.add_argument(
        "--draws",
        type=_positive,
        default=1000,
        metavar="N",
        help="kept draws per chain (%(default)s)",
    )
    command.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="fixes the draws (%(default)s)"
    )


def _add_predict(commands: Any) -> None:
    command = _add_command(commands, "predict", "predict at a table of sites", _PREDICT_EXAMPLE)
    add = command.add_argument
    add("fit", metavar="FIT", help="fit written by bne fit")
    add("sites", metavar="SITES", help="table with the coordinates and base models of the fit")
    add("-o", "--output", required=True, metavar="OUT", help="file to write: .csv, .parquet or .nc")
    add(
        "--quantiles",
        type=_quantiles,
        default=(0.025, 0.5, 0.975),
        metavar="Q,...",
        help="levels between 0 and 1 (0.025,0.5,0.975)",
    )
    add("--draws", type=_positive, metavar="N", help="add N joint draws of the response (none)")
    add("--threshold", type=_number, metavar="Y", help="add the probability of exceeding Y")
    add("--seed", type=_seed, default=0, metavar="N", help="fixes the joint draws (%(default)s)")
    add("--drop-missing", action="store_true", help="leave out rows with missing values")


def _add_diagnose(commands: Any) -> None:
    command = _add_command(
        commands, "diagnose", "say whether the draws of a fit can be trusted", _DIAGNOSE_EXAMPLE
    )
    command.add_argument("fit", metavar="FIT", help="fit written by bne fit")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of column names such as a,b,c")
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise argparse.ArgumentTypeError(f"{text!r} names {min(repeated)!r} more than once")
    return names


def _quantiles(text: str) -> tuple[float, ...]:
    levels = sorted(
        {
            _parse(float, part, text, "a list of levels such as 0.025,0.5")
            for part in text.split(",")
        }
    )
    if not all(0 < level < 1 for level in levels):
        raise argparse.ArgumentTypeError(f"{text!r} has levels that are not between 0 and 1")
    return tuple(levels)


def _number(text: str) -> float:
    value = _parse(float, text, text, "a number")
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _share(text: str) -> float:
    value = _parse(float, text, text, "a number")
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def _positive(text: str) -> int:
    value = _parse(int, text, text, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _seed(text: str) -> int:
    value = _parse(int, text, text, "a whole number")
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 4294967295")
    return value


def _parse(kind: Callable[[str], Number], part: str, text: str, what: str) -> Number:
    try:
        return kind(part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
