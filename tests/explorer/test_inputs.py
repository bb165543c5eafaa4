"""Pictures as people have them, runs as they are found, and calls that are wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from convnn import models
from convnn_lab import cli
from convnn_lab.explorer import networks, page
from convnn_lab.explorer.layer import Layer, found
from convnn_lab.explorer.pictures import LARGEST, picture
from convnn_lab.explorer.pixels import pixel_layers, scaled
from convnn_lab.explorer.places import Map
from tests.explorer import samples


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def test_a_picture_comes_upright(tmp_path: Path) -> None:
    plain = samples.image(30, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side: a quarter turn clockwise puts it right
    turned = picture(saved(plain, tmp_path / "turned.png", exif=exif))
    assert turned.image.size == (20, 30)
    assert np.array_equal(np.asarray(turned.image), np.rot90(np.asarray(plain), -1))
    assert turned.notes == ("turned as its camera says",)
    assert picture(saved(plain, tmp_path / "plain.png")).notes == ()


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    half = Image.new("RGBA", (4, 3), (200, 0, 0, 255))
    half.putpixel((1, 1), (0, 0, 0, 0))
    for name, image in (("a.png", half), ("b.png", half.quantize(8)), ("c.webp", half)):
        read = picture(saved(image, tmp_path / name, **({"lossless": True} if name == "c.webp" else {})))
        assert read.image.getpixel((1, 1)) == (255, 255, 255)
        assert read.image.getpixel((0, 0))[0] > 190  # type: ignore[index]
        assert read.notes == ("laid on white where it is transparent",)


def test_gray_pictures_of_one_and_two_bytes_are_pictures(tmp_path: Path) -> None:
    levels = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    deep = picture(saved(Image.fromarray(levels), tmp_path / "deep.png"))
    assert np.array_equal(np.asarray(deep.image)[..., 0], levels // 257)
    flat = picture(saved(Image.fromarray((levels // 257).astype(np.uint8)), tmp_path / "flat.png"))
    assert flat.image.mode == "RGB"
    assert np.array_equal(np.asarray(flat.image), np.asarray(deep.image))


def test_an_enormous_picture_is_downscaled_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = saved(Image.new("L", (12_000, 900), 7), tmp_path / "wide.png")
    read = picture(wide)
    assert read.image.size == (LARGEST, round(LARGEST * 900 / 12_000))
    assert read.notes == ("downscaled from 12000 x 900",)
    target = tmp_path / "page.html"
    assert cli.main(["explore", str(wide), "-o", str(target)]) == 0
    assert "wide.png: downscaled from 12000 x 900" in capsys.readouterr().out
    assert "downscaled from 12000 x 900" in target.read_text()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("convnn_lab.explorer.pictures.PIXELS", 1_000_000)
        with pytest.raises(ValueError, match="cannot be read as an image"):
            picture(wide)


def test_no_picture_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "words.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes(saved(samples.image(), tmp_path / "whole.png").read_bytes()[:80])
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "float.tiff")
    good, target = str(tmp_path / "whole.png"), str(tmp_path / "page.html")
    for arguments, message in (
        ([str(tmp_path / "words.png")], "words.png cannot be read as an image"),
        ([str(tmp_path / "cut.png")], "cut.png cannot be read as an image"),
        ([str(tmp_path / "float.tiff")], "floating point numbers have no brightness"),
        ([str(tmp_path / "nothing.png")], "there is no picture"),
        ([], "name at least one picture"),
        ([good, "--run", "a", "--model", "b"], "--run and --model each say who looks"),
        ([good, "--run", str(tmp_path)], "holds no run: there is no config.json"),
        ([good, "--compare", str(tmp_path), str(tmp_path)], "holds no run"),
        ([good, "--compare", "a", "b", "--model", "vgg11"], "leave out --run and --model"),
        ([good, "--k", "5"], "--k is for --model"),
        ([good, "--model", "vit_teeny"], "unknown model 'vit_teeny'"),
        ([good, "--model", "gpt_tiny"], "gpt_tiny is a model of text and sees nothing in pictures"),
        ([good, "--model", "vit_tiny", "--ratio", "0.5"], "vit_tiny does not take these options"),
        ([good, "--model", "resnet8", "--weights", str(tmp_path / "no.safetensors")], "there is no file of weights"),
        ([good, "--model", "resnet8", "--weights", good], "does not hold the weights of this model"),
        ([good, "--cells", "0"], "--cells must be at least 1"),
        ([good, "-o", str(tmp_path / "no" / "page.html")], "--output must name a file that can be written"),
    ):
        assert cli.main(["explore", *arguments, *([] if "-o" in arguments else ["-o", target])]) == cli.MISUSED, (
            arguments
        )
        assert message in capsys.readouterr().err
    assert not Path(target).exists()


def test_a_run_without_weights_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare, picture_ = tmp_path / "bare", saved(samples.image(), tmp_path / "a.png")
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("checkpoints"))
    assert cli.main(["explore", str(picture_), "--run", str(bare), "-o", str(tmp_path / "p.html")]) == cli.MISUSED
    assert "has no weights yet" in capsys.readouterr().err
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "dataset": "shakespeare"}))
    assert cli.main(["explore", str(picture_), "--run", str(bare), "-o", str(tmp_path / "p.html")]) == cli.MISUSED
    assert "has learned from a text and sees nothing in pictures" in capsys.readouterr().err


def test_runs_are_compared_by_the_same_query(run: Path, tmp_path: Path, open_page: Callable[..., Any]) -> None:
    picture_, target = saved(samples.image(32, 40), tmp_path / "a'\"<i>.png"), tmp_path / "p.html"
    assert cli.main(["explore", str(picture_), "--compare", str(run), str(run), "-o", str(target)]) == 0
    page_ = open_page(target)
    assert page_.locator("h2").all_text_contents() == [run.name] * 2
    first, second = (page_.evaluate(f"explorer.neighbours({pane}).found.index") for pane in (0, 1))
    assert first == second
    network = networks.of_run(run)
    _, layers = network.look(picture(picture_))
    near, _ = found(layers[0].rounded(), layers[0].own)
    assert sorted(first) == sorted(near.index[0, page_.evaluate("explorer.neighbours().query")].tolist())
    assert [each.name for each in layers] == page_.locator("select").first.locator("option").all_text_contents()


def test_given_weights_are_used(tmp_path: Path) -> None:
    torch.manual_seed(5)
    save_file(models.create("resnet8", layer="hybrid").state_dict(), tmp_path / "w.safetensors")
    seen = picture(saved(samples.image(), tmp_path / "a.png"))
    random_, given = (
        networks.by_name("resnet8", size=16, layer="hybrid", weights=weights).look(seen)[1][0].key
        for weights in (None, tmp_path / "w.safetensors")
    )
    assert not torch.equal(random_, given)
    assert networks.by_name("resnet8", size=16).notes == ("its weights are random: nothing was learned",)


def test_pixels_are_features_of_their_cells(tmp_path: Path) -> None:
    seen = picture(saved(samples.image(60, 40), tmp_path / "a.png"))
    image, sides = scaled(seen, 150)
    assert sides == (10, 15)
    colour, patch, around = pixel_layers(seen, 150)
    pixels = torch.from_numpy(np.array(image)).double()
    cell = pixels[8:12, 20:24].mean((0, 1))
    others = pixels.reshape(10, 4, 15, 4, 3).mean((1, 3))
    expected = (cell - others.mean()) / others.std()
    torch.testing.assert_close(colour.key[0, 2 * 15 + 5].double(), expected, rtol=1e-4, atol=1e-4)
    assert (colour.key.shape, patch.key.shape, around.key.shape) == ((1, 150, 3), (1, 150, 48), (1, 150, 108))
    for tiny in (samples.image(1, 1), samples.image(1, 90), Image.new("RGB", (9, 7), "red")):
        for layer in pixel_layers(picture(saved(tiny, tmp_path / "tiny.png")), 150):
            assert layer.key.isfinite().all()
            assert layer.map.keys == layer.key.shape[1] <= 150


def test_a_page_of_twelve_layers_stays_small() -> None:
    # As a ViT-Base has them on a picture of 224 x 224: 12 layers of 12 heads, 197 tokens and 64 channels.
    query, key = torch.randn(2, 12, 197, 64).unbind(0)
    layers = [Layer(f"blocks.{n}.attn", "Attention", Map.whole(14, 14, 1), key + n, query - n) for n in range(12)]
    noise = Image.effect_noise((224, 224), 90).convert("RGB")
    text = page.page("noise", [page.Pane("vit_base", [page.View("noise.png", noise, layers)])])
    assert 9_000_000 < len(text.encode()) < 10_000_000


def test_json_stays_inside_its_script() -> None:
    text = page.as_script({"</script>": ["<!--", "&", "\u2028", "ü"]})
    assert not set("<>&\u2028") & set(text)
    assert "ü" in text


def test_help_and_mistakes_import_no_torch() -> None:
    call = "cli.main(['explore', 'x', '--cells', '0'])"
    code = f"import sys; from convnn_lab import cli; {call}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
