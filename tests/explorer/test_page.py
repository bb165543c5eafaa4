"""The page in a real browser, opened from disk: what it lights up is what the library finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from convnn_lab import cli
from convnn_lab.explorer import networks, pictures
from convnn_lab.explorer.layer import Choices, Layer, found
from convnn_lab.explorer.page import Pane, View, page
from tests.explorer import samples

Open = Callable[..., Any]
# Cells of the first pane whose middle is drawn hot, by looking at the canvas; padding and class tokens aside.
LIT = """() => {
  const canvas = document.querySelector("canvas.view"), {layer} = explorer.neighbours();
  const at = draw.frame(canvas.width, canvas.height, layer), lit = [];
  const copy = Object.assign(document.createElement("canvas"), {width: canvas.width, height: canvas.height});
  const context = copy.getContext("2d", {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let key = layer.before; key < layer.keys; key++) {
    const [left, top, right, bottom] = layer.corners(key);
    if (left < 0 || top < 0 || right > 1.0001 || bottom > 1.0001) continue;
    const x = at.left + at.width * (left + right) / 2, y = at.top + at.height * (top + bottom) / 2;
    const [red, green, blue] = pixels.slice(4 * (Math.floor(y) * canvas.width + Math.floor(x)));
    if (red + green > 250 && red > blue + 60) lit.push(key);
  }
  return lit;
}"""


def settings(seen: dict[str, Any]) -> Choices:
    named = {"mask_seed" if name == "maskSeed" else name: value for name, value in seen.items()}
    return Choices(**{field.name: named[field.name] for field in fields(Choices)})


def agrees(page: Any, layer: Layer, pane: int = 0) -> set[int]:
    """Hold what the page found against the library, for its own query, head and settings; the neighbours."""
    now = page.evaluate(f"(({{query, head, s, found}}) => ({{query, head, s, found}}))(explorer.neighbours({pane}))")
    near, weights = found(layer.rounded(), settings(now["s"]))
    row = near.index[now["head"], now["query"]]
    expected = dict(zip(row[row >= 0].tolist(), weights[now["head"], now["query"]][row >= 0].tolist(), strict=True))
    seen = dict(zip(now["found"]["index"], now["found"]["weights"], strict=True))
    assert set(seen) == set(expected)
    assert [seen[key] for key in sorted(seen)] == pytest.approx([expected[key] for key in sorted(seen)])
    return set(expected)


def click(page: Any, x: float, y: float) -> None:
    box = page.locator("canvas.view").first.bounding_box()
    page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])


def until(page: Any, holds: str) -> None:
    """Wait for an expression; the page allows nobody to evaluate strings inside it."""
    for _ in range(200):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never: {holds}")


def test_a_click_lights_up_the_nearest_cells(open_page: Open) -> None:
    layer = samples.tokens()
    gray = Image.new("RGB", (28, 16), (90, 90, 90))
    page_ = open_page(page("gray", [Pane("sample", [View("gray.png", gray, [layer])])]))
    page_.locator("#f-style button[value=heat]").click()
    for x, y, query in ((0.02, 0.03, 1), (0.5, 0.4, 1 + 7 + 3), (0.99, 0.99, 28)):
        click(page_, x, y)
        assert page_.evaluate("explorer.neighbours().query") == query
        keys = agrees(page_, layer)
        # The mark of the query may cover its own cell.
        assert set(page_.evaluate(LIT)) - {query} == keys - {query, 0}


def test_every_control_moves_the_neighbours_as_the_library_does(open_page: Open) -> None:
    layer = samples.padded()
    page_ = open_page(samples.text(layer))
    click(page_, 0.4, 0.6)
    before = agrees(page_, layer)
    page_.locator("#c-share").fill("0")
    square = agrees(page_, layer)
    row, column = divmod(page_.evaluate("(({layer, query}) => layer.own(query))(explorer.neighbours())"), 8)
    assert square == {(row + down) * 8 + column + across for down in (-1, 0, 1) for across in (-1, 0, 1)}
    assert square != before
    for value in ("0.25", "0.6", "1"):
        page_.locator("#c-share").fill(value)
        agrees(page_, layer)
    for control, value in (("k", "700"), ("k", "1000"), ("k", "450")):
        page_.locator(f"#c-{control}").fill(value)
        agrees(page_, layer)
    for control in ("similarity", "weighting", "mask", "self"):
        for option in page_.locator(f"#c-{control} option:not([hidden])").all():
            page_.locator(f"#c-{control}").select_option(option.get_attribute("value"))
            agrees(page_, layer)
    page_.locator("#c-weighting").select_option("softmax_at")
    page_.locator("#c-temperature").fill("-1")
    assert page_.evaluate("explorer.neighbours().s.temperature") == 0.1
    agrees(page_, layer)
    for kind in ("random", "grid", "own", "all"):
        page_.locator(f"#f-candidates button[value={kind}]").click()
        agrees(page_, layer)
        if kind in ("random", "grid"):
            page_.locator("#c-count").fill("600")
            agrees(page_, layer)


def test_the_numbers_beside_candidates_and_masks_count(open_page: Open) -> None:
    layer = samples.padded()
    page_ = open_page(samples.text(layer))
    page_.locator("#f-candidates button[value=random]").click()
    page_.locator("#c-seed").fill("12")
    page_.locator("#c-seed").press("Tab")
    page_.locator("#c-mask").select_option("bigbird")
    page_.locator("#c-radius").fill("300")
    for control in ("globals", "random", "maskSeed"):
        page_.locator(f"#c-{control}").fill("2")
        page_.locator(f"#c-{control}").press("Tab")
    now = page_.evaluate("explorer.neighbours().s")
    assert (now["seed"], now["globals"], now["random"], now["maskSeed"]) == (12, 2, 2, 2)
    agrees(page_, layer)
    page_.locator("#own").click()
    assert settings(page_.evaluate("explorer.neighbours().s")) == layer.own


def test_dragging_the_dial_flows_from_a_square_to_likeness(open_page: Open) -> None:
    layer = samples.padded()
    page_ = open_page(samples.text(layer))
    box = page_.locator("#c-share").bounding_box()
    middle = box["y"] + box["height"] / 2
    page_.mouse.move(box["x"] + box["width"] - 6, middle)
    page_.mouse.down()
    shares = []
    for step in (0.75, 0.5, 0.25, 0.0):
        page_.mouse.move(box["x"] + 4 + step * (box["width"] - 8), middle)
        shares.append(page_.evaluate("explorer.neighbours().s.share"))
        agrees(page_, layer)
    page_.mouse.up()
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0.0
    page_.locator("#play").click()
    until(page_, "explorer.neighbours().s.share > 0.02")
    page_.locator("#play").click()
    still = page_.evaluate("explorer.neighbours().s.share")
    page_.wait_for_timeout(80)
    assert page_.evaluate("explorer.neighbours().s.share") == still


def test_dragging_keys_and_touch_move_the_query(open_page: Open) -> None:
    layer = samples.padded()
    page_ = open_page(samples.text(layer), has_touch=True)
    canvas = page_.locator("canvas.view")
    box = canvas.bounding_box()
    click(page_, 0.1, 0.1)
    first = page_.evaluate("explorer.neighbours().query")
    page_.mouse.move(box["x"] + 10, box["y"] + 10)
    page_.mouse.down()
    page_.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.8 * box["height"], steps=3)
    page_.mouse.up()
    dragged = page_.evaluate("explorer.neighbours().query")
    assert dragged > first
    canvas.focus()
    page_.keyboard.press("ArrowUp")
    assert page_.evaluate("explorer.neighbours().query") == dragged - 6
    page_.keyboard.press("ArrowLeft")
    assert page_.evaluate("explorer.neighbours().query") == dragged - 7
    agrees(page_, layer)
    page_.touchscreen.tap(box["x"] + 0.5 * box["width"], box["y"] + 0.1 * box["height"])
    assert page_.evaluate("explorer.neighbours().query") in (2, 3)
    assert "row 0" in canvas.get_attribute("aria-label")


def test_layers_and_heads_are_switched(open_page: Open) -> None:
    layers = [samples.tokens(), samples.padded(), samples.strided()]
    page_ = open_page(samples.text(*layers))
    for number, layer in enumerate(layers):
        page_.get_by_label("Layer of sample").select_option(str(number))
        agrees(page_, layer)
    page_.get_by_label("Layer of sample").select_option("0")
    page_.get_by_label("Head of sample").select_option("1")
    assert page_.evaluate("explorer.neighbours().head") == 1
    agrees(page_, layers[0])
    page_.get_by_role("button", name="class token").click()
    assert page_.evaluate("explorer.neighbours().query") == 0
    agrees(page_, layers[0])
    page_.locator("canvas.view").focus()
    page_.keyboard.press("]")
    agrees(page_, layers[1])
    page_.keyboard.press("[")
    page_.keyboard.press(".")
    agrees(page_, layers[0])
    page_.locator("#strip button").nth(2).click()
    assert page_.evaluate("explorer.neighbours().layer.name") == "strided"
    agrees(page_, layers[2])
    page_.locator("details").first.evaluate("each => { each.open = true; }")
    until(page_, "document.querySelectorAll('tbody tr').length > 0")
    assert page_.locator("tbody tr").count() == page_.evaluate("explorer.neighbours().found.index.length")


def test_a_link_brings_the_view_back(open_page: Open, tmp_path: Path) -> None:
    layers = [samples.tokens(), samples.padded()]
    page_ = open_page(samples.text(*layers))
    page_.get_by_label("Layer of sample").select_option("1")
    click(page_, 0.7, 0.3)
    page_.locator("#c-similarity").select_option("pearson")
    page_.locator("#c-share").fill("0.4")
    page_.locator("#link").click()
    address = page_.evaluate("location.href")
    kept = page_.evaluate("JSON.stringify([explorer.neighbours().query, explorer.neighbours().found])")
    page_.goto("about:blank")
    page_.goto(address)
    page_.evaluate("explorer.ready.then(() => null)")
    assert page_.evaluate("JSON.stringify([explorer.neighbours().query, explorer.neighbours().found])") == kept
    # Whatever else stands in an address, the page stays a page.
    page_.goto(
        f"{(tmp_path / 'page.html').as_uri()}#k=-3&share=nan&layers=99&heads=x&similarity=<b>&count=0&picture=1e9"
    )
    page_.reload()
    page_.evaluate("explorer.ready.then(() => null)")
    agrees(page_, layers[1])


def test_a_view_is_saved_as_png(open_page: Open) -> None:
    page_ = open_page(samples.text(samples.padded(), name='a "b" <c>.png'))
    with page_.expect_download() as download:
        page_.locator("#save").click()
    assert download.value.suggested_filename == "a_b_c_.png-neighbours.png"
    saved = Image.open(BytesIO(Path(download.value.path()).read_bytes()))
    assert saved.width == page_.evaluate("document.querySelector('canvas.view').width")
    assert len(saved.getcolors(10**6) or []) > 50


def test_names_are_text_and_nothing_else(open_page: Open) -> None:
    evil = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\u2028{{DATA}}"
    layer = Layer(evil, evil, samples.padded().map, samples.padded().key, notes=(evil,))
    views = [View(evil, samples.image(), [layer], (evil,))] * 2
    page_ = open_page(page(evil, [Pane(evil, views, (evil,)), Pane(evil, views)]))
    assert page_.locator("h1").text_content() == page_.title() == evil
    assert page_.locator("img[src=x]").count() == 0
    assert page_.locator("h2").first.text_content() == evil
    assert page_.locator("select option").first.text_content() == evil


def test_pictures_and_networks_stand_side_by_side(open_page: Open) -> None:
    layers = [samples.padded(), samples.strided()]
    panes = [Pane(name, [View(f"{n}.png", samples.image(24 + n), [layer]) for n in (0, 6)]) for name, layer in
             zip(("first", "second"), layers, strict=True)]  # fmt: skip
    page_ = open_page(page("two", panes))
    click(page_, 0.3, 0.7)
    for pane, layer in enumerate(layers):
        agrees(page_, layer, pane)
    places = [page_.evaluate(f"(({{layer, query}}) => layer.place(query))(explorer.neighbours({n}))") for n in (0, 1)]
    assert places == [[3, 1], [2, 0]]
    width = page_.evaluate("document.querySelector('canvas.view').height")
    page_.locator("#gallery button").nth(1).click()
    assert page_.evaluate("explorer.state.picture") == 1
    assert page_.evaluate("document.querySelector('canvas.view').height") != width
    agrees(page_, layers[1], 1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(open_page: Open, scheme: str) -> None:
    page_ = open_page(
        samples.text(*[samples.tokens()] * 8), viewport={"width": 360, "height": 740}, color_scheme=scheme
    )
    assert page_.evaluate("document.documentElement.scrollWidth") <= 360
    assert page_.evaluate("document.documentElement.dataset.theme") == scheme
    box = page_.locator("canvas.view").bounding_box()
    assert 250 < box["width"] <= 360
    named = (
        "Array.from(document.querySelectorAll('button,input,select,canvas.view')).filter((e) => !e.closest('[hidden]'))"
    )
    unnamed = (
        f"{named}.filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert page_.evaluate(unnamed) == []


def test_a_model_is_explored_from_the_command_line(open_page: Open, tmp_path: Path) -> None:
    picture, target = tmp_path / "picture.png", tmp_path / "explored.html"
    samples.image(90, 70).save(picture)
    options = [
        "--model",
        "vit_tiny",
        "--layer",
        "convnn",
        "--k",
        "5",
        "--size",
        "64",
        "--layers",
        "blocks.1",
        "-o",
        str(target),
    ]
    assert cli.main(["explore", str(picture), *options]) == 0
    page_ = open_page(target)
    assert page_.locator("select option").all_text_contents()[:3] == [
        "blocks.1.attn",
        "blocks.10.attn",
        "blocks.11.attn",
    ]
    network = networks.by_name("vit_tiny", size=64, layer="convnn", k=5)
    _, layers = network.look(pictures.picture(picture), ("blocks.1",))
    click(page_, 0.9, 0.1)
    assert page_.evaluate("explorer.neighbours().query") == 4
    keys = agrees(page_, layers[0])
    near, _ = found(layers[0], layers[0].own)
    assert keys == set(near.index[0, 4].tolist())
    assert torch.equal(near.index, near.index.clamp(min=0))
