"""How array programs are compiled that run side by side, each on a thread of its own."""

from __future__ import annotations

from functools import partial

import jax

__all__ = ["LANES", "compiled", "compiled_by_structure"]

LANES = 256  # sites of a program: one block of draws and its accumulators fit the nearest caches

# One thread per program, because programs already run side by side. Wide vectors, where the machine
# has them, halve the time; elsewhere the option does nothing.
compiled = partial(
    jax.jit,
    compiler_options={
        "xla_cpu_multi_thread_eigen": False,
        "xla_cpu_prefer_vector_width": 512,
    },
)

# For the algebra of fits, once per structure; no bit depends on how many cores there are.
compiled_by_structure = partial(
    jax.jit,
    static_argnames=("structure",),
    compiler_options={"xla_cpu_multi_thread_eigen": False},
)
