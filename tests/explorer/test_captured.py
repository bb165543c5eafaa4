"""What is taken out of a model is what its layers compare, and how they choose is said truly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from convnn import ConvNN2d, ConvNNAttention, HybridConv2d, MultiheadConvNN
from convnn.backends import BACKENDS, Backend
from convnn.blend import Blend
from convnn.candidates import grid, random
from convnn.functional import convnn
from convnn.masks import causal, strided, window
from convnn.models.factories import MapAttention
from convnn.neighbors import Neighbors
from convnn.search import Search
from convnn.similarity import Bilinear, Mahalanobis
from convnn.weighting import Weigh, softmax_at
from convnn_lab.explorer.captured import layers
from convnn_lab.explorer.layer import Layer, found

REFERENCE = BACKENDS["reference"]


def on_map(**options: Any) -> Callable[[], nn.Module]:
    return lambda: ConvNN2d(3, 4, options.pop("kernel_size", 3), **options)


def on_tokens(**options: Any) -> Callable[[], nn.Module]:
    return lambda: MapAttention(3, 3, heads=3, attn_head_dim=6, **options)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "cosine": on_map(padding=1, similarity="cosine"),
    "without padding": on_map(padding=1, similarity="euclidean", include_padding=False, k=7),
    "stride": on_map(padding=1, stride=2, similarity="manhattan", weighting="softmax", k=4),
    "blend": on_map(padding=1, blend=0.3, similarity="pearson"),
    "blend of Chebyshev": on_map(blend=Blend(0.6, features="dot"), k=5),
    "dilated": on_map(padding=2, dilation=2, blend=0.4),
    "even window": on_map(kernel_size=2, blend=0.5, k=3),
    "moved inwards": on_map(boundary="shift", blend=0.1),
    "heads": on_map(padding=1, similarity="cosine", projection="linear", qk_dim=6, v_dim=4, heads=2),
    "random": on_map(padding=1, similarity="cosine", candidates=random(20), k=5),
    "grid": on_map(padding=1, similarity="cosine", candidates=grid(16), k=5),
    "drawn by seed": on_map(padding=1, similarity="cosine", candidates=random(20, seed=4), k=5),
    "space in some": on_map(padding=1, k=4),
    "attention": on_tokens(),
    "nearest": on_tokens(k=5, weighting=softmax_at(0.5)),
    "causal": on_tokens(mask=causal, k=5),
    "window": on_tokens(mask=window(3), k=5),
    "strided": on_tokens(mask=strided(4), k=5),
    "candidates of heads": on_tokens(candidates=random(12, per="head"), self_score="one", k=5),
    "bilinear": on_tokens(similarity=Bilinear(6), k=5),
    "Mahalanobis": on_tokens(similarity=Mahalanobis(torch.eye(6)), k=5),
}


class Watching:
    """A backend that keeps what the reference finds."""

    def __init__(self) -> None:
        self.found: list[tuple[Search, Neighbors]] = []
        self.backend = Backend(self.select, REFERENCE.aggregate, lambda *_: None)

    def select(self, search: Search) -> Neighbors:
        near = REFERENCE.select(search)
        self.found.append((search, near))
        return near


def rows(index: Tensor) -> list[list[int]]:
    """Neighbours of each row in the order of their numbers; empty slots first."""
    return index.reshape(-1, index.shape[-1]).sort(-1).values.tolist()


@pytest.mark.parametrize("name", LAYERS)
def test_own_choices_find_a_layers_own_neighbours(name: str) -> None:
    model, image, watching = LAYERS[name]().eval(), torch.randn(1, 3, 6, 9), Watching()
    (layer,) = layers(model, image)
    searching = model.attn if isinstance(model, MapAttention) else model
    kept = searching.backend
    searching.backend = watching.backend  # type: ignore[assignment]
    output = model(image)
    ((search, near),) = watching.found
    searching.backend = kept
    assert layer.notes == ()
    ours, weights = found(layer, layer.own)
    assert rows(ours.index) == rows(near.index)
    weighed = Weigh(searching.weighting)(near.scores, near.filled)  # type: ignore[arg-type]
    torch.testing.assert_close(
        weights.sort(-1).values.reshape(weighed.shape), weighed.sort(-1).values, rtol=1e-4, atol=1e-5
    )
    # Watching changed nothing.
    torch.testing.assert_close(model(image), output, rtol=1e-4, atol=1e-4)
    assert search.query.shape[-2] == layer.map.queries
    assert searching.backend == "auto"


def test_a_hybrid_shows_its_searching_branch_and_a_plain_network_its_windows() -> None:
    mixed = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), HybridConv2d(4, 6, 3, ratio=0.5), HybridConv2d(6, 6, 3, ratio=0.0)
    )
    image = torch.randn(1, 3, 7, 5)
    assert [each.name for each in layers(mixed, image)] == ["1.convnn"]
    assert [each.name for each in layers(mixed, image, ("0", "2"))] == ["0", "2.conv"]
    plain = nn.Sequential(nn.Conv2d(3, 4, (3, 1), padding=(1, 0)), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 2, 2))
    (layer,) = layers(plain, image)
    near, weights = found(layer, layer.own)
    # Among the cells of the padded map, a window of 3 x 1 is three cells below each other.
    expected = [sorted((row + down) * 5 + column for down in range(3)) for row in range(7) for column in range(5)]
    assert rows(near.index) == expected
    assert set(weights.unique().tolist()) == {1.0}
    windows = near.index[0].sort(-1).values
    combined = layer.key[0].mT[:, windows].permute(1, 0, 2).flatten(1) @ plain[0].weight.flatten(1).mT  # type: ignore[operator]
    torch.testing.assert_close(combined.mT.reshape(4, 7, 5) + plain[0].bias[:, None, None], plain[0](image)[0])  # type: ignore[index]


def test_attention_of_timm_shows_queries_and_keys() -> None:
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    attention, kept = model.blocks[1].attn, list[Any]()
    attention.register_forward_hook(lambda _, given, out: kept.append((given[0], out)))
    seen = layers(model, torch.randn(1, 3, 64, 64))
    assert [(each.name, each.heads, each.map.before) for each in seen] == [
        ("blocks.0.attn", 3, 1),
        ("blocks.1.attn", 3, 1),
    ]
    query, key = seen[1].compared()
    tokens, output = kept[0]
    value = attention.qkv(tokens).unflatten(-1, (3, 3, 64))[0, :, 2].transpose(0, 1)
    attended = convnn(query, key, value, k="all").transpose(0, 1).flatten(1)
    torch.testing.assert_close(attention.proj(attended)[None], output, rtol=1e-4, atol=1e-5)


def test_large_maps_are_thinned_and_say_so() -> None:
    model = ConvNN2d(3, 4, 3, padding=1, similarity="cosine", candidates=grid(25)).eval()
    image = torch.randn(1, 3, 12, 20)
    (layer,) = layers(model, image, cells=70)
    assert layer.map.cells == (6, 10)
    assert torch.equal(layer.key[0], image[0, :, ::2, ::2].flatten(1).mT)
    assert "every 2. cell of 12 x 20 is kept" in layer.notes[0]
    assert found(layer, layer.own)[0].index.shape == (1, 60, 9)


class Looks(nn.Module):
    """Attends to more tokens than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = ConvNNAttention(3, 1, k=2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        return self.attn(tokens, torch.cat([tokens, tokens], 1))


def test_what_cannot_be_shown_is_said() -> None:
    image = torch.randn(1, 3, 4, 6)
    with pytest.raises(ValueError, match="found no layer to look at; there are none of ConvNNAttention"):
        layers(nn.Sequential(nn.Conv2d(3, 4, 1)), image)
    with pytest.raises(ValueError, match="no layer to look at named zebra; there are 0"):
        layers(nn.Sequential(nn.Conv2d(3, 4, 3)), image, ("zebra",))
    with pytest.raises(ValueError, match="attn attends to other tokens than its own"):
        layers(Looks(), image)
    biased = MapAttention(3, 3, mask=torch.randn(24, 24))
    assert layers(biased, image)[0].notes == ("adds numbers to its scores that are not shown here",)
    strange = MapAttention(3, 3, similarity=lambda q, k: -(q @ k.mT), weighting=lambda s, f: s * f)
    assert len(layers(strange, image)[0].notes) == 2


def test_torchs_call_is_known_too() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = MultiheadConvNN(6, 2, k=3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x.flatten(2).mT
            return self.attn(tokens, tokens, tokens, need_weights=False)[0]

    (layer,) = layers(Encoder(), torch.randn(1, 6, 2, 5))
    assert isinstance(layer, Layer)
    assert (layer.heads, layer.map.cells, layer.own.k, layer.own.weighting) == (2, (2, 5), 3, "softmax")
