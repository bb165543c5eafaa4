"""Time of one interaction with the explorer page, and the size of a page, in the browser that is installed.

An interaction is everything between a click or a move of a control and the drawn picture: the search, the heat or the
lines, the numbers beside them. Each is the median of many.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from convnn_lab.explorer import networks, pictures, views
from convnn_lab.explorer.layer import Layer
from convnn_lab.explorer.page import Pane, View, page
from convnn_lab.explorer.places import Map

CELLS = 56
CHANNELS = (3, 48, 64, 256)
TIMED = """async ([settings, times]) => {
  await explorer.ready;
  explorer.change(settings);
  const taken = [];
  for (let time = 0; time < times; time++) {
    const start = performance.now();
    explorer.set({x: (time * 0.37) % 1, y: (time * 0.61) % 1, token: -1});
    taken.push(performance.now() - start);
  }
  taken.sort((one, other) => one - other);
  return [taken[times >> 1], taken[Math.floor(0.95 * times)]];
}"""
SETTINGS: dict[str, dict[str, Any]] = {
    "k = 9, cosine": {"k": 9, "similarity": "cosine", "share": 1},
    "k = 9, share 0.5, Euclidean": {"k": 9, "similarity": "euclidean", "share": 0.5},
    "all, softmax": {"k": "all", "similarity": "scaled_dot", "share": 1, "weighting": "softmax"},
    "k = 600, lines": {"k": 600, "similarity": "pearson", "share": 1, "style": "lines"},
    "k = 9, 512 random, BigBird": {"k": 9, "share": 1, "candidates": "random", "count": 512, "mask": "bigbird"},
}


def main() -> None:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only here

    path = shutil.which("chromium") or shutil.which("google-chrome") or sys.exit("no chromium to measure in")
    where = Map.whole(CELLS, CELLS)
    layers = [
        Layer(f"{channels} channels", "map", where, torch.randn(1, where.keys, channels)) for channels in CHANNELS
    ]
    noise = Image.effect_noise((224, 224), 90).convert("RGB")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        target = Path(folder) / "page.html"
        target.write_text(page("noise", [Pane("noise", [View("noise", noise, layers)])]), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1400, "height": 900})
        opened.goto(target.as_uri())
        print(f"{browser.browser_type.name} {browser.version}, N = M = {where.keys}; median (95 %) in ms")
        for number, channels in enumerate(CHANNELS):
            opened.evaluate(f"explorer.ready.then(() => explorer.pick(0, {{layer: {number}}}))")
            for name, settings in SETTINGS.items():
                median, late = opened.evaluate(
                    TIMED, [{"candidates": "all", "mask": "none", "style": "both", **settings}, 100]
                )
                print(f"{channels:4} channels  {name:30} {median:6.1f} ({late:.1f})")
        browser.close()
        picture = Path(folder) / "noise.png"
        noise.save(picture)
        for name in ("vit_tiny", "vit_base", "resnet50"):
            layer = "hybrid" if name == "resnet50" else "convnn"
            network = networks.by_name(name, layer=layer)
            text = views.written([pictures.picture(picture)], [network])
            count = text.count('"chooses"')
            print(f"{name} on 224 x 224: {count} layers, {len(text.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
