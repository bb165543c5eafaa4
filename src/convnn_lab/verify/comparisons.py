"""Every comparison there is: the operator with these choices, torch's own, and how to draw a case of both."""

from __future__ import annotations

from convnn_lab.verify import operators, patterns
from convnn_lab.verify.agreement import OTHERS, agreement
from convnn_lab.verify.convolutions import convolution, patches, separable
from convnn_lab.verify.hybrids import hybrid
from convnn_lab.verify.multihead import multihead
from convnn_lab.verify.rows import Comparison

COMPARISONS: tuple[Comparison, ...] = (
    Comparison("space, R, uniform", "Conv1d", convolution(1)),
    Comparison("space, R², uniform", "Conv2d", convolution(2)),
    Comparison("space, R³, uniform", "Conv3d", convolution(3)),
    Comparison("… padding 'same'", "Conv, 'same'", convolution(padding="same")),
    Comparison("… reflected", "Conv, reflect", convolution(padding_mode="reflect")),
    Comparison("… replicated", "Conv, replicate", convolution(padding_mode="replicate")),
    Comparison("… circular", "Conv, circular", convolution(padding_mode="circular")),
    Comparison("… kernel in groups", "grouped Conv", convolution(groups=2)),
    Comparison("… kernel by channel", "depthwise Conv", convolution(depthwise=True)),
    Comparison("… then 1x1", "separable Conv", separable),
    Comparison("space, 1, uniform", "1x1 Conv", convolution(kernel_size=1)),
    Comparison("space, patches", "Conv2d on patches", patches),
    Comparison("features, all, softmax", "self-attention", operators.attention),
    Comparison("… a bool mask", "masked attention", operators.masked_attention),
    Comparison("… a float mask", "biased attention", operators.biased_attention),
    Comparison("… a causal mask", "causal attention", operators.causal_attention),
    Comparison("… a window", "local attention", patterns.pattern("local", patterns.local, turns=True)),
    Comparison("… strided", "strided attention", patterns.pattern("sparse", patterns.strided)),
    Comparison("… fixed", "fixed attention", patterns.pattern("sparse", patterns.fixed)),
    Comparison("… BigBird's rule", "BigBird", patterns.pattern("bigbird", patterns.bigbird)),
    Comparison("… around a cell", "neighbourhood", patterns.pattern("neighborhood", patterns.neighborhood)),
    Comparison("… in heads", "multi-head", multihead(masked=False)),
    Comparison("… in heads, masks", "multi-head, masked", multihead(masked=True)),
    Comparison("features, k, softmax", "KVT attention", operators.nearest_attention),
    Comparison("… projected", "projected attention", patterns.layer),
    Comparison("hybrid, ratio 0", "Conv, 1x1", hybrid(0.0)),
    Comparison("hybrid, ratio 1", "k most alike, 1x1", hybrid(1.0)),
    Comparison("hybrid, between", "both, 1x1", hybrid(None)),
    Comparison("any backend, gradient", "reference backend", agreement("nearest"), OTHERS),
    Comparison("… a kernel", "reference, kernel", agreement("kernel"), OTHERS),
    Comparison("… all", "reference, all keys", agreement("all"), OTHERS),
    Comparison("… candidates", "reference, few keys", agreement("candidates"), OTHERS),
)
