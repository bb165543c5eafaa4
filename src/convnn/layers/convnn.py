"""ConvNN on maps: the constructor of a convolution, the neighbours of your choice."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from convnn.layers.maps import ConvNNNd


class ConvNN1d(ConvNNNd):
    """:class:`ConvNN2d` on sequences ``(B, C, L)``, with the constructor of :class:`torch.nn.Conv1d`."""

    axes, convolution, pointwise = 1, F.conv1d, nn.Conv1d


class ConvNN2d(ConvNNNd):
    """For every window of a convolution, the k nearest cells of the map, weighed and combined with a learned kernel.

    The constructor is that of :class:`torch.nn.Conv2d`. With nothing else given, nearest is nearest in space, and the
    layer is that convolution, exactly; what makes it another layer is given by name.

    Args:
        similarity: ``"space"``, or a similarity of features as in the operator.
        k: how many neighbours; None for as many as the kernel has taps. Then ``weight`` has the convolution's shape;
            otherwise it is ``(O, C / groups, k)``.
        weighting, selection: as in the operator.
        candidates: as in the operator; ``random`` and ``grid`` of :mod:`convnn.candidates` see the map.
        position: a descriptor that puts places beside the features; its coordinates run from -1 to 1, or are what its
            attribute ``coordinates`` makes.
        blend: a share from 0, nearest in space, to 1, most alike; or a :class:`~convnn.blend.Blend`.
        patch: compare patches of so many cells along every axis.
        mask: as in the operator; query i is output i and key j is cell j of the padded map.
        include_padding: whether cells of the padding can be neighbours.
        projection: ``"linear"`` compares learned projections of ``qk_dim`` channels and combines one of ``v_dim``.
        heads: how many parts of the channels search and are combined apart, before a 1x1 convolution mixes them.
        boundary: ``"pad"``, or ``"shift"`` for windows moved inwards at the border, one for every (stride-th) cell.
        backend: with ``"auto"`` torch's own convolution stands for a search in space; any other name runs the search.

    Shape:
        ``(B, C, H, W)`` or ``(C, H, W)`` to what the convolution gives.

    Example:
        >>> layer = ConvNN2d(3, 8, 3, padding=1)
        >>> x = torch.randn(2, 3, 9, 12)
        >>> torch.equal(layer(x), F.conv2d(x, layer.weight, layer.bias, padding=1))
        True
        >>> ConvNN2d(3, 8, 3, padding=1, similarity="cosine")(x).shape
        torch.Size([2, 8, 9, 12])
    """

    axes, convolution, pointwise = 2, F.conv2d, nn.Conv2d


class ConvNN3d(ConvNNNd):
    """:class:`ConvNN2d` on volumes ``(B, C, D, H, W)``, with the constructor of :class:`torch.nn.Conv3d`."""

    axes, convolution, pointwise = 3, F.conv3d, nn.Conv3d
