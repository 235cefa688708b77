"""Benchmarks against the bare machine and against peers: ``python -m studies.bench``.

`gradient` compares one gradient with the matrix products it needs, `ess` compares samplers of one
model, `grid` times a fit and the prediction of a large grid. Every comparison is a ratio of two
things measured in the same run, on the same cores, one after the other.
"""

from __future__ import annotations

CORES = 2

# The environment of a timed process: read by BLAS, numba and XLA when they are first imported.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}
