"""Layers that stand where a convolution or an attention stood."""

from convnn.layers.attention import ConvNNAttention
from convnn.layers.cache import Cache
from convnn.layers.convnn import ConvNN1d, ConvNN2d, ConvNN3d
from convnn.layers.hybrid import HybridConv1d, HybridConv2d, HybridConv3d
from convnn.layers.linear import LinearAttention
from convnn.layers.multihead import MultiheadConvNN

__all__ = [
    "Cache",
    "ConvNN1d",
    "ConvNN2d",
    "ConvNN3d",
    "ConvNNAttention",
    "HybridConv1d",
    "HybridConv2d",
    "HybridConv3d",
    "LinearAttention",
    "MultiheadConvNN",
]
