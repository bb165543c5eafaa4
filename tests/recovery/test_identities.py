"""What the thesis says of its choices, as equalities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from convnn.descriptor import between, concatenated, coordinates, pixels, scaled_concat
from convnn.functional import convnn, nearest
from convnn.relative import RelativeBias
from convnn.similarity import Bilinear, Mahalanobis, chebyshev, cosine, dot, euclidean, manhattan, minkowski, pearson
from convnn.weighting import softmax_at
from tests.definition.test_operator import randn


def test_distance_between_normalised_vectors_ranks_as_cosine() -> None:
    query, key = (F.normalize(randn(*size), dim=-1) for size in ((20, 12), (30, 12)))
    by_angle = nearest(query, key, k=7, similarity="cosine")
    for similarity in ("euclidean", "sqeuclidean"):
        assert torch.equal(nearest(query, key, k=7, similarity=similarity).index, by_angle.index)
    square = nearest(query, key, k=7, similarity="sqeuclidean").scores
    torch.testing.assert_close(square, 2 * (by_angle.scores - 1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("channels", [3, 12])
def test_minkowski_has_manhattan_euclidean_and_chebyshev_in_it(channels: int) -> None:
    query, key = randn(4, channels), randn(6, channels)
    difference = (query[:, None] - key).abs()
    torch.testing.assert_close(minkowski(1)(query, key), -difference.sum(-1))
    torch.testing.assert_close(minkowski(2)(query, key), -difference.square().sum(-1).sqrt())
    torch.testing.assert_close(minkowski(float("inf"))(query, key), -difference.amax(-1))
    large = 500.0 if channels == 3 else 60.0
    for p, limit, tolerance in ((1 + 1e-9, manhattan, 1e-6), (2 + 1e-9, euclidean, 1e-6), (large, chebyshev, 5e-2)):
        torch.testing.assert_close(minkowski(p)(query, key), limit(query, key), rtol=tolerance, atol=tolerance)


def test_mahalanobis_without_correlation_is_euclidean_and_knows_no_units() -> None:
    query, key, data = randn(4, 5), randn(6, 5), randn(200, 5)
    eye = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(Mahalanobis(eye)(query, key), euclidean(query, key))
    units = randn(5, 5) + 3 * eye
    plain = Mahalanobis.fit(data, shrinkage=0.0)(query, key)
    torch.testing.assert_close(Mahalanobis.fit(data @ units, shrinkage=0.0)(query @ units, key @ units), plain)


def test_pearson_is_the_cosine_of_centred_vectors() -> None:
    query, key = randn(4, 5), randn(6, 5)
    centred = cosine(query - query.mean(-1, keepdim=True), key - key.mean(-1, keepdim=True))
    torch.testing.assert_close(pearson(query, key), centred)
    torch.testing.assert_close(pearson(3 * query + 7, 0.2 * key - 1), centred)
    torch.testing.assert_close(pearson(query, key), torch.corrcoef(torch.cat([query, key]))[:4, 4:])


def test_bilinear_starts_as_the_dot_product_and_holds_two_projections() -> None:
    query, key = randn(4, 5), randn(6, 5)
    similarity = Bilinear(5, dtype=torch.float64)
    assert torch.equal(similarity(query, key), dot(query, key))
    to_query, to_key = randn(5, 5), randn(5, 5)
    with torch.no_grad():
        similarity.weight.copy_(to_query @ to_key.mT)
    torch.testing.assert_close(similarity(query, key), dot(query @ to_query, key @ to_key))


def test_temperature_runs_from_the_nearest_alone_to_all_alike() -> None:
    query, key, value = randn(4, 5), randn(6, 5), randn(6, 3)
    cold = convnn(query, key, value, k=4, weighting=softmax_at(1e-6))
    torch.testing.assert_close(cold, convnn(query, key, value, k=1))
    hot = convnn(query, key, value, k=4, weighting=softmax_at(1e9))
    torch.testing.assert_close(hot, convnn(query, key, value, k=4, weighting="uniform") / 4)


def test_softmin_of_a_distance_is_softmax_of_its_negative() -> None:
    query, key, value = randn(4, 5), randn(6, 5), randn(6, 3)
    ours = convnn(query, key, value, k="all", similarity="manhattan", weighting="softmax")
    torch.testing.assert_close(ours, F.softmin(torch.cdist(query, key, p=1), -1) @ value)
    theirs = convnn(query, key, value, k="all", similarity=lambda q, x: torch.cdist(q, x, p=1), weighting="softmin")
    torch.testing.assert_close(ours, theirs)


def test_a_relative_bias_is_translation_equivariant() -> None:
    bias = RelativeBias((7, 9), dtype=torch.float64)
    torch.nn.init.normal_(bias.table)
    patch = randn(3, 4, 5)
    outputs = []
    for down, right in ((1, 2), (3, 4)):
        # The same small picture somewhere on a map of which nothing else may be chosen.
        picture, there = torch.zeros(7, 9, 5, dtype=torch.float64), torch.zeros(7, 9, dtype=torch.bool)
        place = (slice(down, down + 3), slice(right, right + 4))
        picture[place], there[place] = patch, True
        x = picture.flatten(0, 1)
        output = convnn(x, x, x, k=5, mask=[bias, there.flatten()])
        outputs.append(output.unflatten(0, (7, 9))[place])
    torch.testing.assert_close(*outputs)
    plain = convnn(patch.flatten(0, 1), patch.flatten(0, 1), patch.flatten(0, 1), k=5)
    assert not torch.allclose(outputs[0].flatten(0, 1), plain)


MIXED: dict[str, tuple[Any, Any]] = {
    "cosine of coordinates beside features": (concatenated, "cosine"),
    "dot of coordinates beside features": (concatenated, "dot"),
    "distance of coordinates beside features": (concatenated, "euclidean"),
    "distance of scaled ones": (scaled_concat(0.5), "euclidean"),
    "cosine of scaled ones": (scaled_concat(0.5), "cosine"),
    "dot of coordinates": (coordinates, "dot"),
}


@pytest.mark.parametrize("name", MIXED)
def test_the_range_of_coordinates_matters_for_every_mixed_descriptor(name: str) -> None:
    """The thesis says it does not; that holds for distances between coordinates alone."""
    descriptor, similarity = MIXED[name]
    tokens = 0.3 * randn(25, 6)
    found = []
    for make in (between(0, 1), between(-1, 1)):
        x = descriptor(tokens, make((5, 5)))
        found.append(nearest(x, x, k=5, similarity=similarity).index.sort(-1).values)
    assert (found[0] != found[1]).any(-1).sum() > 12  # of 25 rows


def test_the_range_does_not_matter_for_distances_of_coordinates_alone() -> None:
    tokens = randn(25, 6)
    windows = []
    for make in (pixels, between(0, 1), between(-1, 1)):
        x = coordinates(tokens, make((5, 5)))
        windows.append(nearest(x[12:13], x, k=9, similarity="euclidean", order="key").index)
    assert torch.equal(windows[0], windows[1])
    assert torch.equal(windows[0], windows[2])


def test_a_map_that_is_not_square_needs_one_scale_for_both_axes() -> None:
    middle = 4 * 16 + 8
    windows = {}
    for name, make in (("pixels", pixels), ("-1..1", between(-1, 1))):
        x = make((8, 16)).flatten(0, 1)
        windows[name] = nearest(x[middle : middle + 1], x, k=9, similarity="chebyshev", order="key").index[0].tolist()
    assert windows["pixels"] == [middle + down * 16 + right for down in (-1, 0, 1) for right in (-1, 0, 1)]
    assert windows["-1..1"] != windows["pixels"]
