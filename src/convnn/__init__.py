"""Convolution and attention as one operator over nearest neighbours."""

from convnn import backends, functional, recipes, surgery
from convnn.functional import explain
from convnn.inside import record
from convnn.layers import (
    ConvNN1d,
    ConvNN2d,
    ConvNN3d,
    ConvNNAttention,
    HybridConv1d,
    HybridConv2d,
    HybridConv3d,
    LinearAttention,
    MultiheadConvNN,
)
from convnn.neighbors import Neighbors
from convnn.rollout import sparse_rollout
from convnn.surgery import convert, revert

__version__ = "0.1.0.dev0"

__all__ = [
    "ConvNN1d",
    "ConvNN2d",
    "ConvNN3d",
    "ConvNNAttention",
    "HybridConv1d",
    "HybridConv2d",
    "HybridConv3d",
    "LinearAttention",
    "MultiheadConvNN",
    "Neighbors",
    "__version__",
    "backends",
    "convert",
    "explain",
    "functional",
    "recipes",
    "record",
    "revert",
    "sparse_rollout",
    "surgery",
]
