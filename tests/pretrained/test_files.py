"""Files of pretrained networks: names, layouts and shapes, on files written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from convnn_lab.pretrained.resnet50_keras import ResNet50, prepared, renamed, resnet50
from convnn_lab.pretrained.resnet_cifar import ResNet, resnet_cifar
from convnn_lab.pretrained.scores import normalized
from convnn_lab.pretrained.vit_mnist import ViT, vit_mnist


def random_state(model: nn.Module) -> dict[str, Tensor]:
    state = {name: torch.rand_like(tensor) for name, tensor in model.state_dict().items() if "num_batches" not in name}
    model.load_state_dict(state, strict=False)
    return state


def test_a_resnet_is_as_deep_as_its_file(tmp_path: Path) -> None:
    model = ResNet(2, classes=7).eval()
    save_file(random_state(model), tmp_path / "weights.safetensors")
    again, x = resnet_cifar(tmp_path / "weights.safetensors"), torch.randn(2, 3, 32, 32)
    assert len(again.layer1) == len(again.layer3) == 2  # type: ignore[arg-type]
    torch.testing.assert_close(again(x), model(x))
    assert not again.training


def test_a_shortcut_takes_every_second_pixel_between_zeros() -> None:
    block = ResNet(1).layer2[0].eval()  # type: ignore[index]
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.rand(1, 16, 6, 8)
    y = block(x)
    assert y.shape == (1, 32, 3, 4)
    assert torch.equal(y[:, 8:24], x[..., ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match="there must be a file of weights"):
        resnet_cifar(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is no safetensors file, or damaged"):
        vit_mnist(path)
    save_file({"embed.bias": torch.zeros(64)}, path)
    with pytest.raises(ValueError, match=r"linear\.bias, got embed\.bias"):
        resnet_cifar(path)
    with pytest.raises(
        ValueError, match=r"names or shapes differ; blocks\.0\.attn\.proj\.bias must be \(64,\), got nothing"
    ):
        vit_mnist(path)


def mnist_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state under the names the file has, written down block by block."""
    theirs = {"embed": "to_patch_embedding.1", "norm": "mlp_head.0", "head": "mlp_head.1"}
    for block in range(6):
        inside = {"norm1": "0.norm", "attn.qkv": "0.fn.to_qkv", "attn.proj": "0.fn.to_out.0", "norm2": "1.norm"}
        inside |= {"fc1": "1.fn.net.0", "fc2": "1.fn.net.3"}
        theirs |= {f"blocks.{block}.{ours}": f"transformer.layers.{block}.{name}" for ours, name in inside.items()}
    renamed_state = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        renamed_state[f"{theirs[module]}.{kind}" if module in theirs else name] = tensor
    return renamed_state


def plain_vit(state: dict[str, Tensor], image: Tensor) -> Tensor:
    """The network for one image, in loops over patches and heads."""
    patches = [image[0, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].flatten() for r in range(7) for c in range(7)]
    first = "to_patch_embedding.1"
    embedded = torch.stack(patches) @ state[f"{first}.weight"].T + state[f"{first}.bias"]
    tokens = torch.cat([state["cls_token"][0], embedded]) + state["pos_embedding"][0]
    for block in range(6):
        attend, net = (f"transformer.layers.{block}.{part}" for part in (0, 1))

        def norm(x: Tensor, at: str) -> Tensor:
            return F.layer_norm(x, (64,), state[f"{at}.norm.weight"], state[f"{at}.norm.bias"])

        queries, keys, values = (norm(tokens, attend) @ state[f"{attend}.fn.to_qkv.weight"].T).chunk(3, -1)
        heads = []
        for head in range(4):
            own = slice(64 * head, 64 * head + 64)
            heads.append((queries[:, own] @ keys[:, own].T / 8).softmax(-1) @ values[:, own])
        out = f"{attend}.fn.to_out.0"
        tokens = tokens + torch.cat(heads, -1) @ state[f"{out}.weight"].T + state[f"{out}.bias"]
        inner = norm(tokens, net) @ state[f"{net}.fn.net.0.weight"].T + state[f"{net}.fn.net.0.bias"]
        tokens = tokens + inner.relu() @ state[f"{net}.fn.net.3.weight"].T + state[f"{net}.fn.net.3.bias"]
    last = F.layer_norm(tokens[0], (64,), state["mlp_head.0.weight"], state["mlp_head.0.bias"])
    return last @ state["mlp_head.1.weight"].T + state["mlp_head.1.bias"]


def test_the_vision_transformer_is_read_under_its_own_names(tmp_path: Path) -> None:
    state = {name: torch.randn_like(tensor) / 8 for name, tensor in ViT().state_dict().items()}
    named = mnist_file(state)
    assert set(named) > {"transformer.layers.5.1.fn.net.3.weight", "mlp_head.1.bias", "cls_token"}
    save_file(named, tmp_path / "weights.safetensors")
    model, image = vit_mnist(tmp_path / "weights.safetensors"), torch.rand(1, 28, 28)
    torch.testing.assert_close(model(image[None])[0], plain_vit(named, image), atol=1e-5, rtol=1e-4)


def keras(folder: Path, arrays: dict[str, np.ndarray], epsilon: float, shards: int = 3) -> None:
    """Write weights as the converter of Keras does: all bytes one after another, cut into shards anywhere."""
    content = b"".join(array.astype("<f4").tobytes() for array in arrays.values())
    cuts = [len(content) * number // shards for number in range(shards + 1)]
    paths = [f"group1-shard{number + 1}of{shards}.bin" for number in range(shards)]
    for path, start, end in zip(paths, cuts[:-1], cuts[1:], strict=True):
        (folder / path).write_bytes(content[start:end])
    described = [{"name": name, "shape": list(a.shape), "dtype": "float32"} for name, a in arrays.items()]
    layers = [{"class_name": "BatchNormalization", "config": {"epsilon": epsilon}}]
    topology = {"model_config": {"config": {"layers": layers}}}
    manifest: Any = [{"paths": paths, "weights": described}]
    (folder / "model.json").write_text(json.dumps({"modelTopology": topology, "weightsManifest": manifest}))


def keras_arrays(width: int, depths: tuple[int, ...], classes: int) -> dict[str, np.ndarray]:
    """Random weights of a small ResNet under Keras's names, kernels as (H, W, in, out)."""
    draw, arrays = np.random.default_rng(0), {}

    def conv(name: str, norm: str, size: int, inputs: int, outputs: int) -> None:
        arrays[f"{name}/kernel"] = draw.normal(size=(size, size, inputs, outputs)) / (size * inputs**0.5)
        arrays[f"{name}/bias"] = draw.normal(size=outputs)
        for kind in ("gamma", "beta", "moving_mean", "moving_variance"):
            arrays[f"{norm}/{kind}"] = draw.uniform(0.5, 1.5, size=outputs)

    conv("conv1", "bn_conv1", 7, 3, width)
    channels = width
    for stage, depth in enumerate(depths):
        inner = width * 2**stage
        for letter in "abcdef"[:depth]:
            at = f"{stage + 2}{letter}_branch"
            sizes = {"2a": (1, channels, inner), "2b": (3, inner, inner), "2c": (1, inner, 4 * inner)}
            sizes |= {"1": (1, channels, 4 * inner)} if letter == "a" else {}
            for branch, (size, inputs, outputs) in sizes.items():
                conv(f"res{at}{branch}", f"bn{at}{branch}", size, inputs, outputs)
            channels = 4 * inner
    arrays["fc1000/kernel"], arrays["fc1000/bias"] = draw.normal(size=(channels, classes)), draw.normal(size=classes)
    return arrays


def plain_resnet(arrays: dict[str, np.ndarray], x: Tensor, depths: tuple[int, ...], epsilon: float) -> Tensor:
    """The network in Keras's order, read straight from its arrays."""
    given = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}

    def step(x: Tensor, name: str, norm: str, stride: int, padding: int) -> Tensor:
        y = F.conv2d(x, given[f"{name}/kernel"].permute(3, 2, 0, 1), given[f"{name}/bias"], stride, padding)
        mean, variance, gamma, beta = (
            given[f"{norm}/{kind}"][:, None, None] for kind in ("moving_mean", "moving_variance", "gamma", "beta")
        )
        return (y - mean) / (variance + epsilon).sqrt() * gamma + beta

    y = F.pad(step(x, "conv1", "bn_conv1", 2, 3).relu(), (1, 1, 1, 1))
    y = F.max_pool2d(y, 3, 2)
    for stage, depth in enumerate(depths):
        for letter in "abcdef"[:depth]:
            at, stride = f"{stage + 2}{letter}_branch", 2 if stage and letter == "a" else 1
            z = step(y, f"res{at}2a", f"bn{at}2a", stride, 0).relu()
            z = step(z, f"res{at}2b", f"bn{at}2b", 1, 1).relu()
            z = step(z, f"res{at}2c", f"bn{at}2c", 1, 0)
            y = (z + (step(y, f"res{at}1", f"bn{at}1", stride, 0) if letter == "a" else y)).relu()
    return y.mean((-2, -1)) @ given["fc1000/kernel"] + given["fc1000/bias"]


def test_kerass_resnet_is_read_from_its_shards(tmp_path: Path) -> None:
    depths = (1, 2, 1, 2)
    arrays = keras_arrays(4, depths, 6)
    keras(tmp_path, arrays, epsilon=0.02)
    model, x = resnet50(tmp_path), torch.randn(2, 3, 33, 41)
    wanted = plain_resnet(arrays, x, depths, epsilon=0.02)
    torch.testing.assert_close(model(x), wanted, atol=1e-4, rtol=1e-4)


def test_every_name_of_the_real_network_has_its_place() -> None:
    names = [renamed(name) for name in keras_arrays(1, (3, 4, 6, 3), 2)]
    with torch.device("meta"):
        ours = [name for name in ResNet50(1e-3).state_dict() if "num_batches" not in name]
    assert sorted(names) == sorted(ours)
    with pytest.raises(ValueError, match="'res6a_branch1/kernel' is no weight of ResNet-50"):
        renamed("res6a_branch1/kernel")


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there must be a model\.json"):
        resnet50(tmp_path)
    keras(tmp_path, keras_arrays(4, (1, 1, 1, 1), 6), epsilon=0.02)
    shard = tmp_path / "group1-shard2of3.bin"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match="bytes together, got"):
        resnet50(tmp_path)


def test_a_photograph_is_cut_turned_round_and_centred() -> None:
    photograph = np.zeros((40, 60, 3), np.uint8)
    photograph[:, 10:50] = (200, 100, 50)
    ready = prepared(photograph)
    assert ready.shape == (1, 3, 224, 224)
    wanted = torch.tensor([50 - 103.939, 100 - 116.779, 200 - 123.68])
    torch.testing.assert_close(ready.mean((0, 2, 3)), wanted, atol=1e-3, rtol=0)


def test_pixels_are_normalised_by_channel() -> None:
    pixels = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    wanted = torch.tensor([[[[-1.0, 1.0]], [[0.0, 2.0]]]])
    torch.testing.assert_close(normalized(pixels, (0.5, 0.2), (0.5, 0.1)), wanted)
