"""From pictures and networks to a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from convnn_lab.explorer.networks import Network
from convnn_lab.explorer.page import Pane, View, page
from convnn_lab.explorer.pictures import Picture, picture
from convnn_lab.explorer.pixels import pixel_layers, scaled

SHOWN = 1024
"""pixels of the longer side of a picture that is looked at without a network"""


def pictures(paths: Sequence[Path]) -> list[Picture]:
    """Read the pictures."""
    return [picture(path) for path in paths]


def written(
    seen: Sequence[Picture], networks: Sequence[Network | None], wanted: Sequence[str] = (), cells: int = 3136
) -> str:
    """The page of some pictures, each seen by every network; None sees pixels."""
    panes = [pane(network, seen, wanted, cells) for network in networks]
    who = " and ".join(each.name for each in panes)
    what = seen[0].name if len(seen) == 1 else f"{len(seen)} pictures"
    return page(f"{what}: {who}", panes)


def pane(network: Network | None, seen: Sequence[Picture], wanted: Sequence[str], cells: int) -> Pane:
    """What one network sees."""
    views = []
    for each in seen:
        if network is None:
            shown, (rows, columns) = each.image, scaled(each, cells)[1]
            scale = min(SHOWN / max(rows, columns), max(1.0, max(shown.size) / max(rows, columns)))
            shown = shown.resize((round(columns * scale), round(rows * scale)), Image.Resampling.LANCZOS)
            views.append(View(each.name, shown, pixel_layers(each, cells), each.notes))
        else:
            shown, layers = network.look(each, wanted, cells)
            views.append(View(each.name, shown, layers, each.notes))
    return Pane("pixels" if network is None else network.name, views, () if network is None else network.notes)
