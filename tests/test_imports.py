"""The core needs torch alone, and its files import one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import convnn

SOURCE = Path(convnn.__file__).parent


def top_level_modules(statement: str) -> set[str]:
    code = f"import sys; {statement}\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_convnn_brings_nothing_that_torch_does_not() -> None:
    brought = top_level_modules("import convnn") - top_level_modules("import torch")
    assert brought - set(sys.stdlib_module_names) == {"convnn"}


def test_converting_brings_only_what_the_model_is_made_of() -> None:
    use = "import convnn, torchvision\nconvnn.convert(torchvision.models.swin_t())"
    brought = top_level_modules(use)
    assert "torchvision" in brought
    assert not brought & {"timm", "transformers"}


def test_an_integration_without_its_package_says_what_it_needs() -> None:
    use = """
for package in ("timm", "torchvision", "transformers"):
    sys.modules[package] = None
    try:
        __import__("convnn.integrations." + package)
    except ModuleNotFoundError as error:
        assert "pip install " + package in str(error), error
    else:
        raise SystemExit(package)
"""
    assert "convnn" in top_level_modules(use)


def test_the_operator_does_not_bring_triton_along() -> None:
    use = "import convnn, torch\nwith torch.no_grad(): convnn.functional.convnn(*[torch.ones(3, 2)] * 3, k=2)"
    assert "triton" not in top_level_modules(use)


# A file may import from files on lines above its own; a line is one level.
LEVELS = [
    {"names", "neighbors", "similarity", "weighting", "hashing"},
    {"checks", "selection"},
    {"candidates", "masks", "descriptor", "patches"},
    {"blend"},
    {"laid", "relative", "forms"},
    {"search", "watching"},
    {"cost"},
    {"backends.record", "backends.blocks", "backends.combine", "backends.largest"},
    {"backends.held", "backends.pieces", "backends.relaxed"},
    {"backends.reference"},
    {"backends.chunked"},
    {"backends.triton.kernels"},
    {f"backends.triton.kernels.{name}" for name in ("inverse", "invert", "slots", "tiles", "trial")},
    {
        *(f"backends.triton.kernels.{name}" for name in ("combine", "exact", "merge", "mix", "repair", "rows")),
        *(f"backends.triton.kernels.{name}" for name in ("stream", "whole")),
        "backends.triton.register",
        "backends.triton.sizes",
    },
    {f"backends.triton.kernels.{name}" for name in ("by_key", "by_query", "by_row", "by_slot", "few", "mix_backward")},
    {"backends.triton.kernels.few_keys"},
    {"backends.triton.kernels.few_backward"},
    {f"backends.triton.{name}" for name in ("backward", "compiled", "few_launch", "modes", "shapes", "split")},
    {"backends.triton.launch"},
    {"backends.triton.mix_sizes", "backends.triton.row_steps"},
    {"backends.triton.mix_steps", "backends.triton.ops"},
    {"backends.triton.mix_grads"},
    {"backends.triton.few_ops", "backends.triton.mix", "backends.triton.scored"},
    {f"backends.triton.{name}" for name in ("few", "flops", "given", "mixed", "ranks")},
    {"backends.triton.gates", "backends.triton.held", "backends.triton.spread"},
    {"backends.triton.attention", "backends.triton.choice"},
    {"backends.triton"},
    {"backends"},
    {"arguments"},
    {"functional"},
    {"layers.configurable", "layers.windows", "layers.shapes", "layers.places", "layers.cache"},
    {"layers.kernel"},
    {"layers.maps", "layers.linear"},
    {"layers.convnn", "layers.attention", "layers.multihead"},
    {"layers.hybrid"},
    {"layers"},
    {"recipes", "inside", "morph"},
    {"rollout"},
    {"surgery.twins", "surgery.report", "surgery.wrappers"},
    {"surgery.carry"},
    {"surgery.attention", "surgery.maps", "surgery.rules", "surgery.walk"},
    {"surgery.operate"},
    {"surgery"},
    {"models.factories"},
    {"models.vgg", "models.resnet", "models.vit"},
    {"models.gpt"},
    {"models"},
    {"integrations"},
    {"integrations.heads"},
    {"integrations.timm_layers", "integrations.torchvision", "integrations.transformers"},
    {"integrations.hub", "integrations.timm"},
    {"convnn"},
]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "convnn"


def imported(path: Path) -> set[str]:
    """The modules of the package a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            names = [f"{node.module}.{a.name}" for a in node.names]
        found |= {name for name in names if name == "convnn" or name.startswith("convnn_lab")}
        for name in names:
            inner = name.removeprefix("convnn.").split(".")
            if name.startswith("convnn."):
                places = [(inner[:n], SOURCE / "/".join(inner[:n])) for n in (4, 3, 2, 1)]
                known = [
                    ".".join(parts)
                    for parts, place in places
                    if place.with_suffix(".py").exists() or (place / "__init__.py").exists()
                ]
                found.add(known[0] if known else inner[0])
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    own = level[module_name(path)]
    allowed = {name for name, number in level.items() if number < own}
    assert imported(path) <= allowed


def test_the_core_asserts_nothing() -> None:
    for path in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert not any(isinstance(node, ast.Assert) for node in nodes), path
