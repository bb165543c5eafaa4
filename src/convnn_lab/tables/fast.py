"""The fused kernel against the plain one: time, memory and agreement of a single layer on an H100.

What is printed is in the configuration, under keys that begin with ``printed_``: milliseconds, megabytes, and largest
absolute differences.
"""

from __future__ import annotations

from typing import Any

from convnn_lab.tables.record import Row, Table


def _layer(batch: int, **more: Any) -> dict[str, Any]:
    shape = {"batch": batch, "tokens": 197, "width": 768, "heads": 12}
    return {"layer": "convnn", "kernel": "depthwise", "k": 8, "candidates": "all"} | shape | more


_NEIGHBOURS = "The caption says 8 neighbours, the text 9."
_EXACT = (
    "No difference at all forwards is impossible against the listing that the thesis prints, which permutes the"
    " neighbours; it holds against one that does not."
)

FAST_SPEED = Table(
    "fast-speed",
    "Fast-ConvNN: time and memory",
    (
        Row(
            "Original",
            "none",
            _layer(
                32,
                printed_forward_ms="4.92",
                printed_backward_ms="9.29",
                printed_forward_mb="795.01",
                printed_backward_mb="904.88",
            ),
            note=_NEIGHBOURS,
        ),
        Row(
            "Triton",
            "none",
            _layer(
                32,
                fused=True,
                printed_forward_ms="4.24",
                printed_backward_ms="6.84",
                printed_forward_mb="341.95",
                printed_backward_mb="657.54",
                printed_forward_faster="1.16",
                printed_backward_faster="1.36",
                printed_forward_smaller="2.32",
                printed_backward_smaller="1.38",
            ),
            note=_NEIGHBOURS,
        ),
    ),
)
FAST_CORRECTNESS = Table(
    "fast-correctness",
    "Fast-ConvNN: agreement with the plain implementation",
    (
        Row(
            "Triton",
            "none",
            _layer(
                4,
                fused=True,
                printed_forward_difference="0.0e-7",
                printed_input_gradient_difference="1.5e-7",
                printed_kernel_gradient_difference="2.86e-6",
                printed_query_gradient_difference="2.62e-6",
            ),
            note=_EXACT,
        ),
    ),
)
