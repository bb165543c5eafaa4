"""VGG-11 on CIFAR: how many candidates, and which.

A random choice, too, has side² candidates; where a map is smaller than that, all of it are candidates.
"""

from __future__ import annotations

from convnn_lab.tables.logs import CIFAR, vgg_run
from convnn_lab.tables.record import Dataset, Logged, Row, Table
from convnn_lab.tables.vgg import NAMES, PARAMETERS, configuration, reference

# candidates, side, logged GFLOPS, loss and accuracy at the ratio 0.5, loss and accuracy at the ratio 1
_LINES: dict[Dataset, tuple[tuple[str, int, float, float, float, float, float], ...]] = {
    "cifar10": (
        ("random", 4, 0.29709555, 1.31857215, 81.8652, 1.94841948, 58.8672),
        ("random", 6, 0.30070563, 1.35170937, 80.9473, 2.49304751, 57.6074),
        ("random", 8, 0.30421146, 1.22633007, 80.6348, 2.24612615, 56.3086),
        ("random", 10, 0.30871894, 1.32859295, 81.123, 2.38374209, 57.1973),
        ("random", 12, 0.3108489, 1.35489933, 81.6016, 2.53408244, 55.8594),
        ("random", 14, 0.31336611, 1.25801792, 81.4453, 2.46265689, 55.3516),
        ("random", 16, 0.31627059, 1.24412044, 81.2207, 2.48265605, 55.8594),
        ("random", 18, 0.31956234, 1.36613432, 81.5137, 2.42058522, 56.1035),
        ("random", 20, 0.32008947, 1.30220614, 81.6211, 2.70152951, 55.2637),
        ("random", 22, 0.3206721, 1.19748732, 81.8164, 2.49266886, 55.752),
        ("random", 24, 0.32131021, 1.21958375, 82.1191, 2.47930293, 55.5371),
        ("random", 26, 0.32200381, 1.24565243, 82.5293, 2.49917541, 54.043),
        ("random", 28, 0.3227529, 1.28399703, 80.4492, 2.47377586, 54.7266),
        ("random", 30, 0.32355747, 1.36854796, 81.9531, 2.52227527, 55.0586),
        ("random", 32, 0.32441754, 1.20856789, 81.8066, 2.47098209, 55.1465),
        ("spatial", 4, 0.29709574, 1.35562072, 79.2676, 3.42768618, 45.4688),
        ("spatial", 6, 0.30070592, 1.38020326, 80.2246, 2.78109691, 51.6016),
        ("spatial", 8, 0.30421197, 1.47664787, 79.6777, 2.63479463, 54.4434),
        ("spatial", 10, 0.30871934, 1.18873582, 81.4062, 2.59776644, 53.75),
        ("spatial", 12, 0.31084947, 1.40655201, 80.8105, 2.70395414, 53.4277),
        ("spatial", 14, 0.3133669, 1.25129033, 80.4883, 2.58892322, 53.9355),
        ("spatial", 16, 0.31627162, 1.2274535, 81.8066, 2.78730698, 53.4961),
        ("spatial", 18, 0.31956298, 1.41517166, 80.6934, 2.72189022, 53.2812),
        ("spatial", 20, 0.32009027, 1.34283064, 82.3145, 2.93793778, 52.6465),
        ("spatial", 22, 0.32067306, 1.31292141, 80.459, 2.7925302, 52.3828),
        ("spatial", 24, 0.32131136, 1.18006603, 81.2598, 2.5533792, 54.9902),
        ("spatial", 26, 0.32200516, 1.38048334, 81.543, 2.72181607, 52.8613),
        ("spatial", 28, 0.32275446, 1.33827178, 81.5723, 2.77974456, 53.9453),
        ("spatial", 30, 0.32355927, 1.4197346, 81.2402, 2.80432572, 53.3984),
        ("spatial", 32, 0.32441958, 1.39707351, 81.7578, 2.62624464, 53.75),
    ),
    "cifar100": (
        ("random", 4, 0.29783283, 3.79314649, 47.8125, 3.24243481, 32.4512),
        ("random", 6, 0.30144291, 3.75866077, 48.7891, 4.37457413, 31.2891),
        ("random", 8, 0.30494874, 3.48482554, 49.0625, 4.25010144, 32.1484),
        ("random", 10, 0.30945622, 3.50894984, 48.1152, 4.44194735, 32.0508),
        ("random", 12, 0.31158618, 3.42065024, 50.2051, 4.51657772, 31.7578),
        ("random", 14, 0.31410339, 3.60353943, 49.0527, 4.55853661, 32.6367),
        ("random", 16, 0.31700787, 3.36394269, 49.5215, 4.65795015, 31.5039),
        ("random", 18, 0.32029962, 3.45833688, 49.3262, 4.6175613, 31.6406),
        ("random", 20, 0.32082675, 3.47625892, 49.1895, 4.59116405, 31.4355),
        ("random", 22, 0.32140938, 3.43594871, 48.5742, 4.73119829, 31.3965),
        ("random", 24, 0.32204749, 3.70877272, 48.8086, 4.80196461, 31.377),
        ("random", 26, 0.32274109, 3.47970572, 48.9551, 4.72237549, 30.7812),
        ("random", 28, 0.32349018, 3.70218184, 48.5938, 4.65246235, 31.875),
        ("random", 30, 0.32429475, 3.53892474, 50.1367, 4.75255191, 31.6406),
        ("random", 32, 0.32515482, 3.51700861, 49.8438, 4.84438879, 31.0449),
        ("spatial", 4, 0.29783302, 3.97154516, 42.8027, 6.94600443, 19.7852),
        ("spatial", 6, 0.3014432, 3.63038837, 45.7422, 5.59091517, 26.7969),
        ("spatial", 8, 0.30494925, 3.59398537, 47.8027, 5.03682207, 28.8477),
        ("spatial", 10, 0.30945662, 3.6359521, 47.7051, 5.0749481, 29.375),
        ("spatial", 12, 0.31158675, 3.48662164, 47.8027, 5.09103887, 28.916),
        ("spatial", 14, 0.31410418, 3.45797607, 47.9395, 5.2142941, 29.0137),
        ("spatial", 16, 0.3170089, 3.56645626, 48.3789, 5.02596426, 29.668),
        ("spatial", 18, 0.32030026, 3.44333333, 48.5645, 5.05123435, 29.1016),
        ("spatial", 20, 0.32082755, 3.57221679, 47.4512, 5.18202319, 29.1211),
        ("spatial", 22, 0.32141034, 3.48485548, 49.5117, 5.14133464, 29.4336),
        ("spatial", 24, 0.32204864, 3.30235543, 49.6289, 5.03542367, 30.4297),
        ("spatial", 26, 0.32274244, 3.4431724, 49.1699, 4.94052126, 30.3613),
        ("spatial", 28, 0.32349174, 3.57361425, 48.0762, 5.1015002, 30.0977),
        ("spatial", 30, 0.32429655, 3.4783821, 49.1309, 4.99036726, 29.8438),
        ("spatial", 32, 0.32515686, 3.44498536, 49.6387, 4.98852649, 29.668),
    ),
}
_BELOW = "Less than the spatial grid of this size reaches; the thesis says that random candidates always do better."


def _points(dataset: Dataset) -> list[tuple[str, float, int, Logged]]:
    points = []
    for candidates, side, gflops, *finals in _LINES[dataset]:
        for ratio, loss, accuracy in ((0.5, *finals[:2]), (1.0, *finals[2:])):
            run = vgg_run(dataset, "N_test", f"BranchingConvNN_{candidates}_NS{side}_col_col", ratio)
            points.append((candidates, ratio, side, Logged(run, loss, accuracy, gflops, PARAMETERS[dataset])))
    return points


def _rows(dataset: Dataset) -> list[Row]:
    points = sorted(_points(dataset), key=lambda point: point[:3])
    spatial = {point[1:3]: point[3].accuracy for point in points if point[0] == "spatial"}
    rows = [reference(dataset, ratio) for ratio in NAMES]
    for candidates, ratio, side, logged in points:
        below = candidates == "random" and logged.accuracy < spatial[ratio, side]
        label = f"{NAMES[ratio]}, {candidates}, r = {side}²"
        how = configuration(ratio, candidates=candidates, r=side**2)
        rows.append(Row(label, dataset, how, logged=logged, note=_BELOW if below else ""))
    return rows


VGG_CANDIDATES = Table("vgg-candidates", "VGG-11: candidates", tuple(row for name in CIFAR for row in _rows(name)))
