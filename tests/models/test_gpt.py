"""The causal model of text: against torch's transformer, and written with a cache against without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convnn import ConvNNAttention, LinearAttention, models
from convnn.models import GPT
from convnn.models.gpt import drawn
from convnn_lab import cli


def small(**options: Any) -> GPT:
    model = GPT(24, 3, 4, **{"vocabulary": 11, "length": 20, "layer": "convnn", "k": 5, **options})
    model = model.double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)  # as started, all characters are as likely
    return model


def text(n: int, batch: int = 2) -> Tensor:
    return torch.randint(11, (batch, n))


def theirs(model: GPT, tokens: Tensor) -> Tensor:
    """What torch's own layers make of the same weights."""
    assert model.pos_embed is not None
    x, n = model.token_embed(tokens) + model.pos_embed[: tokens.shape[1]], tokens.shape[1]
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(24, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True).double().eval()
        own: Any = block
        with torch.no_grad():
            layer.self_attn.in_proj_weight.copy_(own.attn.qkv.weight)
            layer.self_attn.in_proj_bias.zero_()
        pairs = (
            (layer.self_attn.out_proj, own.attn.proj),
            (layer.linear1, own.mlp.fc1),
            (layer.linear2, own.mlp.fc2),
            (layer.norm1, own.norm1),
            (layer.norm2, own.norm2),
        )
        for their, ours in pairs:
            their.load_state_dict(ours.state_dict())
        x = layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(n, dtype=x.dtype), is_causal=True)
    return model.head(model.norm(x))


def test_with_attention_it_is_torchs_transformer() -> None:
    model, tokens = small(layer="attention", k="all"), text(13)
    torch.testing.assert_close(model(tokens), theirs(model, tokens), rtol=1e-9, atol=1e-9)


def test_a_kernel_of_ones_and_every_key_is_attention() -> None:
    model, tokens = small(k=13), text(13)
    for block in model.blocks:
        nn.init.ones_(block.attn.kernel.weight)  # type: ignore[union-attr,arg-type]
    torch.testing.assert_close(model(tokens), theirs(model, tokens), rtol=1e-9, atol=1e-9)


def test_what_comes_later_changes_nothing() -> None:
    model, tokens = small(), text(13)
    other = torch.cat([tokens[:, :8], (tokens[:, 8:] + 1) % 11], 1)
    assert torch.equal(model(tokens)[:, :8], model(other)[:, :8])
    assert not torch.equal(model(tokens)[:, 8:], model(other)[:, 8:])


CHOICES: dict[str, dict[str, Any]] = {
    "convnn": {},
    "attention": {"layer": "attention", "k": "all"},
    "kvt": {"layer": "kvt"},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary": {"positions": None, "position": "rotary"},
    "factory": {"layer": ConvNNAttention.using(k=5, similarity="cosine", weighting="uniform"), "k": None},
}


def chosen(name: str) -> GPT:
    given = {"k": 5, **CHOICES[name]}
    if given["k"] is None:
        given.pop("k")
        model = GPT(24, 3, 4, vocabulary=11, length=20, **given).double().eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
        return model
    return small(**given)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("parts", [[1] * 13, [2, 1, 10]], ids=["one by one", "in parts"])
def test_steps_give_the_forward_of_the_whole(name: str, parts: list[int]) -> None:
    model, tokens = chosen(name), text(13)
    caches, outputs = model.cache(13), []
    for part in tokens.split(parts, 1):
        logits, caches = model.step(part, caches)
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), model(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CHOICES)
def test_the_likeliest_text_is_that_of_forwards_without_a_cache(name: str) -> None:
    model, tokens = chosen(name), text(6)
    slow = tokens
    for _ in range(9):
        slow = torch.cat([slow, model(slow)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(model.generate(tokens, 9, temperature=0), slow)


def test_it_writes_from_one_token_and_beyond_the_learned_places() -> None:
    model, start = small(), text(1)
    written = model.generate(start, 50, temperature=0)
    assert written.shape == (2, 51)
    # After 20 tokens the last 10 are the beginning: the place of each is then counted from there.
    again = written[:, 11:21]
    for place in range(21, 31):
        assert torch.equal(model(again)[:, -1].argmax(-1), written[:, place])
        again = torch.cat([again, written[:, place : place + 1]], 1)


def test_a_model_without_learned_places_has_no_end() -> None:
    model, start = small(positions="sinusoidal"), text(7)
    written = model.generate(start, 30, temperature=0)
    assert torch.equal(model(written[:, :36])[:, -1].argmax(-1), written[:, 36])


def test_draws_are_a_generators_and_among_the_likeliest() -> None:
    model, start = small(), text(4)
    one, same = (model.generate(start, 12, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, same)
    assert torch.equal(model.generate(start, 12, top=1), model.generate(start, 12, temperature=0))
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).expand(4000, -1)
    draws = drawn(logits, 0.5, 2, torch.Generator().manual_seed(0)).flatten().bincount(minlength=4) / 4000
    expected = torch.tensor([0.0, 4.0, 2.0, 0.0]).exp() * torch.tensor([0, 1, 1, 0])
    torch.testing.assert_close(draws, expected / expected.sum(), rtol=0, atol=0.03)


def test_info_counts_a_text_of_tokens(tmp_path: Path) -> None:
    target = tmp_path / "info.json"
    given = ["--layer", "convnn", "--k", "5", "--image", "20", "--classes", "11", "--json", str(target)]
    assert cli.main(["info", "gpt_tiny", *given]) == cli.HOLDS
    told = json.loads(target.read_text())
    model = models.create("gpt_tiny", layer="convnn", k=5, vocabulary=11, length=20, device="meta")
    assert told["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    n, d = 20, 128
    linear = 2 * n * (4 * d * d + 8 * d * d)  # projections and the two linear layers
    block = linear + 2 * n * n * d + 2 * n * d * 5  # all scores, five neighbours in each channel
    assert told["flops"] == 4 * block + 2 * n * d * 11


def test_gradients_reach_every_parameter() -> None:
    model = small(dropout=0.1).train()
    model(text(13)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_it_starts_nearly_indifferent_and_leaves_a_factorys_layers_as_they_are() -> None:
    model = models.create("gpt_tiny", vocabulary=65, length=32, layer="convnn", k=5)
    tokens = torch.randint(65, (4, 32))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert abs(float(loss.detach()) - torch.tensor(65.0).log()) < 0.3
    block: Any = model.blocks[0]  # type: ignore[index]
    assert float(block.attn.proj.weight.detach().std()) == pytest.approx(0.02 / 8**0.5, rel=0.05)

    class Own(ConvNNAttention):
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__(dim, heads, k=2)
            nn.init.constant_(self.proj.weight, 7.0)

    given: Any = GPT(24, 1, 4, layer=Own).blocks[0]
    assert bool((given.attn.proj.weight == 7).all())


def test_what_does_not_fit_is_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match="learned 20 places, got 21 tokens"):
        model(text(21))
    with pytest.raises(ValueError, match="k must be from 1 to the number of keys, 3, got 5"):
        model(text(3))
    with pytest.raises(ValueError, match="whole numbers of shape"):
        model(torch.randn(2, 6))
    with pytest.raises(ValueError, match="a token to begin with"):
        model.generate(text(0), 3)
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        model.generate(text(3), 3, temperature=-1.0)
    with pytest.raises(TypeError, match="LinearAttention keeps nothing"):
        GPT(24, 1, 4, layer=LinearAttention).generate(text(3), 3)
    with pytest.raises(ValueError, match="positions must be one of"):
        small(positions="rotary")
