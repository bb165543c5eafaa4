"""transformers' registry and its attentions: masks, shared keys, caches, weights, and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTModel,
)
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.vit.modeling_vit import ViTAttention

import convnn
from convnn import ConvNNAttention, MultiheadConvNN, morph
from convnn.candidates import random
from convnn.integrations.transformers import attend, configure, register_attention
from convnn.similarity import Bilinear

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 30,
}
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 0}


def vit(**options: Any) -> Any:
    return ViTModel(ViTConfig(image_size=20, patch_size=4, **SMALL, **options)).eval()


def bert(**options: Any) -> Any:
    return BertModel(BertConfig(vocab_size=50, **SMALL, **options)).eval()


def llama(**options: Any) -> Any:
    sizes = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, **options)).eval()


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": torch.randint(1, 50, (2, 11)), "attention_mask": mask}


def test_a_model_is_told_to_attend_through_convnn() -> None:
    model, x = vit(attn_implementation="eager"), torch.randn(2, 3, 20, 20)
    before = model(x).last_hidden_state
    model.set_attn_implementation("convnn")
    torch.testing.assert_close(model(x).last_hidden_state, before, **CLOSE)
    configure(model, k=26)
    torch.testing.assert_close(model(x).last_hidden_state, before, **CLOSE)
    model.config.convnn = {"k": 4}
    fewer = model(x).last_hidden_state
    assert (fewer - before).abs().max() > 1e-3
    rules = {ViTAttention: MultiheadConvNN.using(k=4)}
    model.set_attn_implementation("eager")
    torch.testing.assert_close(convnn.convert(model, rules)[0](x).last_hidden_state, fewer, **CLOSE)


def test_the_choice_is_saved_and_loaded_with_a_model(tmp_path: Path) -> None:
    model, x = vit(attn_implementation="convnn", convnn={"k": 4}), torch.randn(1, 3, 20, 20)
    model.save_pretrained(tmp_path)
    again = ViTModel.from_pretrained(tmp_path, attn_implementation="convnn").eval()
    torch.testing.assert_close(again(x).last_hidden_state, model(x).last_hidden_state)
    plain = ViTModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert (plain(x).last_hidden_state - model(x).last_hidden_state).abs().max() > 1e-3


def test_a_converted_model_is_saved_as_what_it_was(tmp_path: Path) -> None:
    model, given = bert(), padded()
    convnn.convert(model)[0].save_pretrained(tmp_path)
    again = BertModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**given).last_hidden_state, model(**given).last_hidden_state)


@pytest.mark.parametrize("through", ["registry", "sdpa", "eager"])
@pytest.mark.parametrize("k", ["all", 4])
def test_what_is_masked_might_as_well_be_absent(through: str, k: Any) -> None:
    given = padded()
    if through == "registry":
        model = bert(attn_implementation="convnn", convnn={"k": k})
    else:
        rules: Any = {BertSelfAttention: MultiheadConvNN.using(k=k)}
        model = convnn.convert(bert(attn_implementation=through), rules)[0]
    whole = model(**given).last_hidden_state[1, :7]
    alone = model(given["input_ids"][1:, :7]).last_hidden_state[0]
    torch.testing.assert_close(whole, alone, **CLOSE)


def test_weights_are_those_of_the_eager_attention() -> None:
    model, given = bert(attn_implementation="eager"), padded()
    wanted = model(**given, output_attentions=True).attentions
    twin = convnn.convert(model)[0]
    model.set_attn_implementation("convnn")
    for each in (model, twin):
        got = each(**given, output_attentions=True).attentions
        assert len(got) == len(wanted) == 2
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    model.config.convnn = {"k": 4}
    weights = model(**given, output_attentions=True).attentions[0]
    assert ((weights > 0).sum(-1) == 4).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 11))


def test_asking_for_weights_changes_no_output() -> None:
    model, given = bert(attn_implementation="convnn", convnn={"k": 4}), padded()
    plain, asked = model(**given), model(**given, output_attentions=True)
    torch.testing.assert_close(asked.last_hidden_state, plain.last_hidden_state, **CLOSE)
    assert plain.attentions is None


@pytest.mark.parametrize("through", ["registry", "twin"])
def test_text_is_generated_with_a_cache_and_shared_keys(through: str) -> None:
    model, prompt = llama(attn_implementation="eager"), torch.randint(1, 50, (2, 5))
    ours = copy.deepcopy(model)
    if through == "registry":
        ours.set_attn_implementation("convnn")
    else:
        ours = convnn.convert(ours)[0]
    said: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    said |= {"return_dict_in_generate": True, "output_logits": True}
    wanted, got = (each.generate(prompt, **said) for each in (model, ours))
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), **CLOSE)


def test_at_the_start_of_a_text_there_are_fewer_than_k() -> None:
    model, prompt = llama(attn_implementation="convnn", convnn={"k": 4}), torch.randint(1, 50, (1, 9))
    short = model(prompt[:, :3]).logits
    torch.testing.assert_close(model(prompt).logits[:, :3], short, **CLOSE)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(prompt[:, :3]).logits, short, **CLOSE)


@pytest.mark.parametrize("masks", ["eager", "sdpa"])
@pytest.mark.parametrize("weighting", ["softmax", "uniform", "softmin", "sparsemax"])
@pytest.mark.parametrize("k", [4, "all"])
def test_what_comes_later_is_not_seen(k: Any, weighting: str, masks: str) -> None:
    model, prompt = llama(attn_implementation=masks), torch.randint(3, 50, (2, 9))
    rules = {"*.self_attn": ConvNNAttention.using(k=k, weighting=weighting, kernel=None)}
    twin = convnn.convert(model, rules)[0]
    other = prompt.clone()
    other[:, 8] = 2
    ours, theirs = twin(prompt).logits, twin(other).logits
    torch.testing.assert_close(ours[:, :8], theirs[:, :8], **CLOSE)
    assert (ours[:, 8] - theirs[:, 8]).abs().max() > 1e-3


def test_a_prompt_may_be_shorter_than_a_kernel() -> None:
    model, prompt = llama(attn_implementation="sdpa"), torch.randint(3, 50, (2, 9))
    twin = convnn.convert(model, {"*.self_attn": ConvNNAttention.using(k=6)})[0]
    torch.testing.assert_close(twin(prompt[:, :3]).logits, twin(prompt).logits[:, :3], **CLOSE)
    tokens = twin.generate(prompt[:, :3], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 8)
    assert torch.equal(tokens[:, 3:4], twin(prompt[:, :3]).logits[:, -1:].argmax(-1))
    twin.model.config._attn_implementation_internal = "eager"
    given = twin(prompt[:, :3], output_attentions=True).attentions[0]
    assert given.shape == (2, 4, 3, 3)


def test_a_model_of_several_parts_is_told_once(tmp_path: Path) -> None:
    text, sight = CLIPTextConfig(vocab_size=50, **SMALL), CLIPVisionConfig(image_size=20, patch_size=4, **SMALL)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=sight.to_dict(), projection_dim=16)
    model = CLIPModel(config).eval()
    given = {"input_ids": torch.randint(3, 49, (2, 7)), "pixel_values": torch.randn(2, 3, 20, 20)}
    before = model(**given).logits_per_image
    model.set_attn_implementation("convnn")
    torch.testing.assert_close(model(**given).logits_per_image, before, **CLOSE)
    configure(model, k=1)
    nearest = model(**given).logits_per_image
    assert (nearest - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    again = CLIPModel.from_pretrained(tmp_path, attn_implementation="convnn").eval()
    torch.testing.assert_close(again(**given).logits_per_image, nearest)
    with pytest.raises(ValueError, match=r"convnn knows k, kernel, .*, got kk"):
        configure(model, kk=4)
    with pytest.raises(ValueError, match="Linear has no configuration of transformers"):
        configure(torch.nn.Linear(2, 2), k=4)


def test_candidates_of_a_name_are_drawn_anew_in_training_alone() -> None:
    register_attention("convnn-among-8", k=4, candidates=random(8))
    model, x = vit(attn_implementation="convnn-among-8"), torch.randn(1, 3, 20, 20)
    assert torch.equal(model(x).last_hidden_state, model(x).last_hidden_state)
    model.train()
    assert not torch.equal(model(x).last_hidden_state, model(x).last_hidden_state)
    with pytest.raises(ValueError, match="self_score is for tokens that are their own neighbours"):
        register_attention("convnn-one", k=4, candidates=random(8), self_score="one")
    rules = {ViTAttention: MultiheadConvNN.using(k=4, candidates=random(8), self_score="one")}
    with pytest.raises(ValueError, match="self_score is for tokens that are their own neighbours"):
        convnn.convert(vit(), rules)


def test_twins_move_along_the_spectrum() -> None:
    twin = convnn.convert(bert(attn_implementation="sdpa"))[0]
    names = morph.apply(twin, k=3)
    assert names == [f"encoder.layer.{layer}.attention.self.convnn" for layer in (0, 1)]
    given = padded()
    configured = bert(attn_implementation="convnn", convnn={"k": 3})
    configured.load_state_dict(twin.state_dict())
    torch.testing.assert_close(twin(**given)[0], configured(**given)[0], **CLOSE)


def test_attention_to_another_sequence() -> None:
    model = bert(is_decoder=True, add_cross_attention=True, attn_implementation="eager")
    twin, report = convnn.convert(model)
    assert {entry.before for entry in report.replaced} == {"BertSelfAttention", "BertCrossAttention"}
    given = padded() | {"encoder_hidden_states": torch.randn(2, 6, 24)}
    given["encoder_attention_mask"] = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 1]])
    torch.testing.assert_close(twin(**given).last_hidden_state, model(**given).last_hidden_state, **CLOSE)


def test_a_kernel_learns_in_a_twin() -> None:
    model, x = vit(), torch.randn(2, 3, 20, 20)
    plain, _ = convnn.convert(model, {ViTAttention: ConvNNAttention.using(k=4, kernel=None)})
    twin, report = convnn.convert(model, {ViTAttention: ConvNNAttention.using(k=4)})
    assert [entry.note for entry in report.replaced] == ["attends to the 4 nearest keys, not to all"] * 2
    torch.testing.assert_close(twin(x).last_hidden_state, plain(x).last_hidden_state, **CLOSE)
    added = {name for name, _ in twin.named_parameters()} - {name for name, _ in model.named_parameters()}
    assert added == {f"layers.{number}.attention.convnn.kernel.weight" for number in (0, 1)}
    twin(x).last_hidden_state.square().mean().backward()
    assert all(dict(twin.named_parameters())[name].grad.abs().max() > 0 for name in added)
    with pytest.raises(ValueError, match="4 nearest keys"):
        convnn.revert(twin)


def test_a_twin_is_copied_pickled_and_reverted_beside_its_model() -> None:
    model, given = bert(), padded()
    twin, _ = convnn.convert(model)
    wanted = model(**given).last_hidden_state
    for again in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        torch.testing.assert_close(again(**given).last_hidden_state, wanted, **CLOSE)
        back, _ = convnn.revert(again)
        own = [module.config for module in back.modules() if isinstance(module, BertSelfAttention)]
        assert all(config is back.config for config in own)
    assert "already" in convnn.convert(twin)[1]["encoder.layer.0.attention.self"].note


def test_a_name_of_ones_own() -> None:
    register_attention("convnn-cosine", k=5, similarity="cosine")
    model, x = vit(attn_implementation="convnn-cosine"), torch.randn(1, 3, 20, 20)
    rules = {ViTAttention: MultiheadConvNN.using(k=5, similarity="cosine")}
    same = convnn.convert(model, rules)[0](x).last_hidden_state
    torch.testing.assert_close(model(x).last_hidden_state, same, **CLOSE)
    with pytest.raises(ValueError, match="a kernel learns"):
        register_attention("convnn-kernel", k=5, kernel="depthwise")
    with pytest.raises(ValueError, match="what learns belongs to a model"):
        register_attention("convnn-learned", k=5, similarity=Bilinear(8))


def test_a_scale_of_its_own_is_kept() -> None:
    module, tokens = vit().layers[0].attention, torch.randn(2, 3, 7, 8)
    output, weights = attend(None, module, tokens, tokens, tokens, scaling=0.7)
    wanted = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, scale=0.7)
    torch.testing.assert_close(output.transpose(1, 2), wanted, **CLOSE)
    assert weights is None


def test_what_it_does_not_know_is_refused() -> None:
    sizes = SMALL | {"head_dim": 8, "num_key_value_heads": 1, "attn_implementation": "eager"}
    gemma = Gemma2Model(Gemma2Config(vocab_size=50, **sizes)).eval()
    report = convnn.convert(gemma)[1]
    assert {entry.note for entry in report.left} == {
        "it asks its attention for softcap, which the operator does not know"
    }
    gemma.set_attn_implementation("convnn")
    with pytest.raises(ValueError, match="does not know softcap, which Gemma2Attention asks for"):
        gemma(torch.randint(50, (1, 5)))
    model, x = vit(attn_implementation="convnn"), torch.randn(1, 3, 20, 20)
    model.config.convnn = {"k": 4, "kernel": "depthwise"}
    with pytest.raises(ValueError, match="without a kernel"):
        model(x)
    tokens = torch.randn(1, 3, 5, 8)
    with pytest.raises(ValueError, match=r"needs masks of shape \(B, 1 or H, N, M\)"):
        attend(None, model.layers[0].attention, tokens, tokens, tokens, torch.ones(1, 5))
