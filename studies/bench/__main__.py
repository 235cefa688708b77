"""Run the benchmarks: ``python -m studies.bench [--only gradient ess grid] [--quick] [-o DIR]``."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from studies.bench import CORES, ONE_THREAD, ess
from studies.bench.grid import benchmark as benchmark_grid

ALIASES = {
    "a": ("gradient",),
    "b": ("ess",),
    "c": ("grid",),
    "speed": ("gradient", "ess"),
    "gradient": ("gradient",),
    "ess": ("ess",),
    "grid": ("grid",),
}
PACKAGES = ("bne", "jax", "jaxlib", "numpy", "scipy", "numpyro", "pymc", "pytensor", "nutpie")


def main() -> None:
    """Run what was asked for, print tables, write results.json."""
    options = _parse()
    wanted = {part for name in options.only for part in ALIASES[name]}
    options.output.mkdir(parents=True, exist_ok=True)
    target = options.output / "results.json"
    results: dict[str, Any] = {"machine": _machine(), "quick": options.quick}
    if "gradient" in wanted:
        results["gradient"] = _gradient(quick=options.quick)
        _write(target, results)
    if "ess" in wanted:
        print(f"\nSampling step 3 ({CORES} cores each, one contender at a time)")
        print(ess.HEADER)
        results["ess"] = ess.benchmark(
            options.output,
            cap=options.cap,
            quick=options.quick,
            problems=tuple(options.problems),
            contenders=tuple(options.contenders),
            repeats=options.repeats,
        )
        _print_ratios(results["ess"])
        _write(target, results)
    if "grid" in wanted:
        results["grid"] = benchmark_grid(quick=options.quick)
        _write(target, results)
    print(f"\nwritten: {target}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.bench", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(ALIASES),
        default=["a", "b", "c"],
        metavar="NAME",
        help="a = gradient, b = ess, c = grid, speed = a and b (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="minutes: small problems, short runs")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench"), metavar="DIR")
    parser.add_argument(
        "--cap", type=float, default=900.0, help="seconds of sampling allowed to each contender"
    )
    parser.add_argument("--repeats", type=int, default=1, help="seeds per contender and problem")
    parser.add_argument("--problems", nargs="+", choices=ess.PROBLEMS, default=None)
    parser.add_argument(
        "--contenders", nargs="+", choices=ess.CONTENDERS, default=list(ess.CONTENDERS)
    )
    options = parser.parse_args()
    if options.problems is None:
        options.problems = list(ess.PROBLEMS[:1] if options.quick else ess.PROBLEMS)
    return options


def _gradient(*, quick: bool) -> dict[str, Any]:
    """Run benchmark a in a process of its own: threads are settled before the first import."""
    command = [sys.executable, "-m", "studies.bench.gradient"] + (["--quick"] if quick else [])
    done = subprocess.run(
        command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    print("One value-and-gradient of step 3 over the matrix products it needs (one thread)")
    print(
        f"{'problem':9} {'gradient':>10} {'called':>10} {'products':>10} {'ratio':>6}  fastest form"
    )
    for name, entry in found.items():
        print(
            f"{name:9} {entry['gradient_us']:7.1f} us {entry['called_us']:7.1f} us "
            f"{entry['floor_us']:7.1f} us {entry['ratio']:6.2f}  {entry['floor_form']}"
        )
    return found


def _print_ratios(results: dict[str, Any]) -> None:
    print("\nbne's effective draws per second (per processor second) over the competitor's")
    for name, entry in results.items():
        ratios = ", ".join(
            f"{other} {ratio:.1f} ({entry['ratios_cpu'].get(other, float('nan')):.1f})"
            for other, ratio in entry["ratios"].items()
        )
        print(f"{name:9} {ratios or 'no pair to compare'}")
        for pair, gap in entry["agreement"].items():
            print(
                f"          {pair}: posterior means apart by {gap['mean_gap_median']:.3f} sd "
                f"(median), {gap['mean_gap_max']:.2f} sd (most); "
                f"sds in the ratio {gap['sd_ratio_median']:.3f}"
            )


def _machine() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    source = Path("/proc/cpuinfo")
    if source.exists():
        for line in source.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _write(target: Path, results: dict[str, Any]) -> None:
    target.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
