"""Write text with a trained run: each character costs one row of attention, the rest comes out of a cache.

convnn train shakespeare-tiny --data-dir DIR --output runs/plays
python examples/generate.py runs/plays --prompt "ROMEO:" --count 500
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from convnn.models import GPT
from convnn_lab.data.text import TEXTS, decoded, encoded
from convnn_lab.train import evaluate, store
from convnn_lab.train.run import Run


def opened(folder: Path, which: evaluate.Which, device: torch.device) -> tuple[GPT, list[str]]:
    """The model of a run, and the characters it knows."""
    run = Run.open(folder)
    _, recipe = run.recipe()
    if recipe.dataset not in TEXTS:
        raise SystemExit(f"{folder} has not learned from a text but from {recipe.dataset}")
    model, _ = evaluate.trained(run, recipe, which, device)
    return cast(GPT, model), store.read_json(folder / "data.json")["classes"]


@torch.no_grad()
def without_a_cache(model: GPT, tokens: Tensor, count: int) -> Tensor:
    """The likeliest text by a forward of the whole for every character: what the cache saves."""
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


def compared(model: GPT, tokens: Tensor) -> str:
    """Say how long the likeliest text takes with the cache and without, and whether it is the same."""
    assert model.pos_embed is not None
    count = len(model.pos_embed) - tokens.shape[1]
    start = time.perf_counter()
    ours = model.generate(tokens, count, temperature=0)
    middle = time.perf_counter()
    theirs = without_a_cache(model, tokens, count)
    with_it, without = middle - start, time.perf_counter() - middle
    same = "the same text" if torch.equal(ours, theirs) else "another text"
    return f"{count} characters: {with_it:.2f} s with the cache, {without:.2f} s without it, {same}"


def main(arguments: list[str] | None = None) -> None:
    """Print the prompt and what follows, as it is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run of convnn train shakespeare")
    parser.add_argument("--prompt", default="ROMEO:")
    parser.add_argument("--count", type=int, default=500, help="characters to write")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 for the likeliest character always")
    parser.add_argument("--top", type=int, help="draw among so many of the likeliest characters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", choices=["last", "best", "average"], default="best")
    parser.add_argument("--compare", action="store_true", help="also write without a cache, and compare")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, characters = opened(given.run, given.weights, device)
    tokens = encoded(given.prompt, characters)[None].to(device)
    generator = torch.Generator(device).manual_seed(given.seed)
    options = {"temperature": given.temperature, "top": given.top, "generator": generator}
    print(given.prompt, end="", flush=True)
    start = time.perf_counter()
    for token in model.stream(tokens, given.count, **options):
        print(decoded(token[0], characters), end="", flush=True)
    print(f"\n\n{given.count / (time.perf_counter() - start):.0f} characters a second")
    if given.compare:
        # Where the layer searches for k neighbours, a forward needs as many characters.
        prompt = tokens.repeat(1, len(characters))[:, : len(model.pos_embed) // 2]  # type: ignore[arg-type]
        print(compared(model, prompt))


if __name__ == "__main__":
    main()
