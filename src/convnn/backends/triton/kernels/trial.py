"""The smallest kernel, to see whether there is a driver and a compiler."""

import triton
import triton.language as tl


@triton.jit
def trial(X):
    """Store a number."""
    tl.store(X, tl.program_id(0))
