"""ViT-Tiny on CIFAR: how many candidates ConvNN has, and which."""

from __future__ import annotations

from convnn_lab.tables.logs import CIFAR, vit_run
from convnn_lab.tables.record import Dataset, Logged, Row, Table
from convnn_lab.tables.vit_cifar import configuration, reference

# candidates, how many, logged loss, accuracy, GFLOPS and parameters
_LINES: dict[Dataset, tuple[tuple[str, int, float, float, float, float], ...]] = {
    "cifar10": (
        ("random", 16, 0.73539657, 79.043, 2.00874029, 5.500042),
        ("random", 32, 0.77941933, 79.8242, 2.03742048, 5.500042),
        ("random", 48, 0.86632191, 79.6973, 2.06610067, 5.500042),
        ("random", 64, 0.94932634, 78.75, 2.09478086, 5.500042),
        ("random", 80, 0.97367046, 79.2578, 2.12346106, 5.500042),
        ("random", 96, 1.04427548, 79.4727, 2.15214125, 5.500042),
        ("random", 112, 1.14475869, 77.9395, 2.18082144, 5.500042),
        ("random", 128, 1.31375568, 76.9727, 2.20950163, 5.500042),
        ("random", 144, 1.28623539, 77.5098, 2.23818182, 5.500042),
        ("random", 160, 1.41924342, 76.2305, 2.26686202, 5.500042),
        ("random", 176, 1.45719036, 76.2988, 2.29554221, 5.500042),
        ("random", 192, 1.71657704, 75.3809, 2.3242224, 5.500042),
        ("spatial", 16, 3.44743694, 56.7383, 2.00874029, 5.500042),
        ("spatial", 32, 2.73707466, 63.0176, 2.03742048, 5.500042),
        ("spatial", 48, 2.43234011, 66.3184, 2.06610067, 5.500042),
        ("spatial", 64, 2.38606811, 67.998, 2.09478086, 5.500042),
        ("spatial", 80, 2.19364344, 69.9414, 2.12346106, 5.500042),
        ("spatial", 96, 2.20019253, 70.5078, 2.15214125, 5.500042),
        ("spatial", 112, 2.21654066, 70.293, 2.18082144, 5.500042),
        ("spatial", 128, 2.05315283, 72.7344, 2.20950163, 5.500042),
        ("spatial", 144, 1.98598339, 71.6602, 2.23818182, 5.500042),
        ("spatial", 160, 1.88664506, 73.3789, 2.26686202, 5.500042),
        ("spatial", 176, 1.96894583, 72.8711, 2.29554221, 5.500042),
        ("spatial", 192, 1.92998413, 73.5352, 2.3242224, 5.500042),
    ),
    "cifar100": (
        ("random", 16, 2.12685165, 53.5352, 2.00877485, 5.517412),
        ("random", 32, 2.34186037, 53.6035, 2.03745504, 5.517412),
        ("random", 48, 2.43608287, 53.9062, 2.06613523, 5.517412),
        ("random", 64, 2.52975229, 54.0234, 2.09481542, 5.517412),
        ("random", 80, 2.66206641, 53.7793, 2.12349562, 5.517412),
        ("random", 96, 2.71441719, 54.1992, 2.15217581, 5.517412),
        ("random", 112, 2.90658037, 52.8711, 2.180856, 5.517412),
        ("random", 128, 3.03468637, 52.1777, 2.20953619, 5.517412),
        ("random", 144, 3.16524764, 51.6699, 2.23821638, 5.517412),
        ("random", 160, 3.36133911, 50.4785, 2.26689658, 5.517412),
        ("random", 176, 3.52989422, 50.5859, 2.29557677, 5.517412),
        ("random", 192, 3.8466553, 48.7109, 2.32425696, 5.517412),
        ("spatial", 16, 6.01285349, 30.3223, 2.00877485, 5.517412),
        ("spatial", 32, 5.02092071, 38.2227, 2.03745504, 5.517412),
        ("spatial", 48, 4.82374238, 40.2148, 2.06613523, 5.517412),
        ("spatial", 64, 4.43493538, 42.7637, 2.09481542, 5.517412),
        ("spatial", 80, 4.37743052, 44.2676, 2.12349562, 5.517412),
        ("spatial", 96, 4.36484063, 44.5312, 2.15217581, 5.517412),
        ("spatial", 112, 4.30758285, 45.1953, 2.180856, 5.517412),
        ("spatial", 128, 4.24696722, 44.9316, 2.20953619, 5.517412),
        ("spatial", 144, 4.09003491, 47.7832, 2.23821638, 5.517412),
        ("spatial", 160, 4.10949042, 47.5098, 2.26689658, 5.517412),
        ("spatial", 176, 4.14270617, 46.7383, 2.29557677, 5.517412),
        ("spatial", 192, 3.95691436, 48.6328, 2.32425696, 5.517412),
    ),
}
_BELOW = "Less than self-attention reaches; the thesis says that random candidates always do better."


def _rows(dataset: Dataset) -> list[Row]:
    attention = reference(dataset, "Self-Attention")
    rows = [attention, reference(dataset, "ConvNN, all")]
    for candidates, r, *numbers in _LINES[dataset]:
        logged = Logged(vit_run(dataset, "N_test_correct---", f"ConvNNAttention_K9_N{r}_{candidates}"), *numbers)
        below = candidates == "random" and attention.logged and logged.accuracy < attention.logged.accuracy
        how = configuration("convnn", candidates=candidates, r=r)
        label = f"ConvNN, {candidates}, r = {r}"
        rows.append(Row(label, dataset, how, logged=logged, note=_BELOW if below else ""))
    return rows


VIT_CANDIDATES = Table("vit-candidates", "ViT-Tiny: candidates", tuple(row for name in CIFAR for row in _rows(name)))
