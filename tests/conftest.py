"""Settings and fixtures of the whole test suite."""

import os
from pathlib import Path

# Before anything imports JAX. Two workers share the machine, so each computes on one thread, and a
# worker keeps the programs it compiled for its own subprocesses and its next run.
_worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
_cache = Path(__file__).resolve().parent.parent / ".pytest_cache" / "jax" / _worker
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402

PM25_FILE = "training51_kmeans6.csv"


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed, fresh for each test."""
    return np.random.default_rng(20240229)


@pytest.fixture(scope="session")
def _pm25_table() -> pd.DataFrame:
    folder = os.environ.get("BNE_DATA_DIR")
    if not folder:
        pytest.skip("the case study needs BNE_DATA_DIR to name the folder of its data")
    path = Path(folder) / PM25_FILE
    if not path.is_file():
        pytest.skip(f"the case study needs {PM25_FILE} in BNE_DATA_DIR ({folder})")
    return pd.read_csv(path)


@pytest.fixture
def pm25(_pm25_table: pd.DataFrame) -> pd.DataFrame:
    """The 51 monitors of the paper's case study; skips the test where they are not at hand."""
    return _pm25_table.copy()
