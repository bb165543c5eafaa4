"""The explorer page: pictures, features in half precision, style and script, all in one file."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

import convnn
from convnn_lab.explorer.layer import Layer, exponent

SHARP = 128
"""up to so many pixels of a side, a picture is drawn with the edges of its pixels"""
SCRIPTS = ("theme.js", "search.js", "decode.js", "draw.js", "controls.js", "facts.js", "link.js", "app.js")


@dataclass(frozen=True)
class View:
    """A picture as one network sees it."""

    name: str
    image: Image.Image
    layers: Sequence[Layer]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pane:
    """What one network sees in every picture."""

    name: str
    views: Sequence[View]
    notes: tuple[str, ...] = ()


@dataclass
class _Held:
    """The long texts of a page, each once, apart from what describes them."""

    texts: dict[str, str] = field(default_factory=dict)

    def keep(self, content: bytes) -> str:
        said = base64.b64encode(content).decode()
        return next((name for name, text in self.texts.items() if text == said), None) or self._new(said)

    def _new(self, said: str) -> str:
        name = f"b{len(self.texts)}"
        self.texts[name] = said
        return name


def page(title: str, panes: Sequence[Pane]) -> str:
    """Write the page: it asks no server and no network for anything."""
    held = _Held()
    pictures: list[dict[str, Any]] = []
    told = [_pane(pane, held, pictures) for pane in panes]
    data = {"title": title, "version": convnn.__version__, "pictures": pictures, "panes": told}
    folder = files("convnn_lab.explorer") / "static"
    blobs = "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in held.texts.items())
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (folder / "style.css").read_text(encoding="utf-8"),
        "DATA": as_script(data),
        "BLOBS": blobs,
        "SCRIPT": script,
    }
    template = (folder / "template.html").read_text(encoding="utf-8")
    pieces = template.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def as_script(data: Any) -> str:
    """JSON that stays inside its script element, whatever names stand in it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _pane(pane: Pane, held: _Held, pictures: list[dict[str, Any]]) -> dict[str, Any]:
    views = []
    for view in pane.views:
        told = {"name": view.name, "picture": len(pictures), "notes": list(view.notes)}
        pictures.append(_picture(view.image, held))
        views.append({**told, "layers": [_layer(layer, held) for layer in view.layers]})
    return {"name": pane.name, "views": views, "notes": list(pane.notes)}


def _picture(image: Image.Image, held: _Held) -> dict[str, Any]:
    sharp = max(image.size) <= SHARP
    kind, options = ("png", {"optimize": True}) if max(image.size) <= 256 else ("jpeg", {"quality": 88})
    file = BytesIO()
    image.save(file, kind, **options)
    width, height = image.size
    return {
        "source": held.keep(file.getvalue()),
        "type": f"image/{kind}",
        "width": width,
        "height": height,
        "sharp": sharp,
    }


def _layer(layer: Layer, held: _Held) -> dict[str, Any]:
    scale = 2.0 ** exponent(layer)

    def keep(part: Any) -> str:
        return held.keep((part.double() / scale).half().contiguous().numpy().astype("<f2").tobytes())

    where = layer.map
    return {
        "name": layer.name,
        "kind": layer.kind,
        "heads": layer.heads,
        "channels": layer.key.shape[-1],
        "exponent": exponent(layer),
        "key": keep(layer.key),
        "query": None if layer.query is None else keep(layer.query),
        "cells": where.cells,
        "inner": where.inner,
        "rows": where.rows,
        "columns": where.columns,
        "ownRows": where.own_rows,
        "ownColumns": where.own_columns,
        "before": where.before,
        "kernel": where.kernel,
        "dilation": where.dilation,
        "chooses": layer.own.as_page(),
        "candidates": None if layer.candidates is None else layer.candidates.tolist(),
        "mask": None if layer.mask is None else held.keep(np.packbits(layer.mask.numpy()).tobytes()),
        "notes": list(layer.notes),
    }
