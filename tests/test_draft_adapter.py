"""The gated adapter: masks of a draft are computed with it, everything else by the model's own weights, bit by bit."""

import pytest
import torch
from d2f_hf.modeling.draft_adapter import DraftAdapter
from transformers import AutoModelForCausalLM

from causal_models import FAMILIES, VOCAB_SIZE, models
from d2f_hf import load_d2f_model

all_families = pytest.mark.parametrize("family", FAMILIES)


def with_drafter(family: str, rank: int = 4):
    """A model of the weights of a stock one, with a drafter that is not zero."""
    model = models(family)[1]
    model.model.add_drafter({"rank": rank, "alpha": 8})
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "draft" in name:
            parameter.data.normal_(std=0.3)
    return model


def causal(model, ids, **inputs):
    return model(ids, prompt_lengths=torch.zeros(len(ids), dtype=torch.long), block_size=1, **inputs).logits


@all_families
def test_tokens_that_are_no_masks_of_a_draft_are_computed_by_the_models_own_weights(family):
    plain, model = models(family)[1], with_drafter(family)
    ids = torch.randint(1, VOCAB_SIZE, (2, 9))
    expected = causal(plain, ids)
    assert causal(model, ids).equal(expected)
    is_drafted = torch.zeros_like(ids, dtype=torch.bool)
    assert causal(model, ids, is_drafted=is_drafted).equal(expected)
    is_drafted[:, 5:] = True
    drafted = causal(model, ids, is_drafted=is_drafted)
    assert drafted[:, :5].equal(expected[:, :5])
    assert (drafted[:, 5:] != expected[:, 5:]).any(-1).all()


@all_families
def test_the_terms_are_those_of_low_rank_updates_of_all_projections(family):
    """With every token gated, the model is one whose weights have the products added."""
    model = with_drafter(family)
    ids = torch.randint(1, VOCAB_SIZE, (2, 7))
    found = causal(model, ids, is_drafted=torch.ones_like(ids, dtype=torch.bool))
    merged = with_drafter(family)
    with torch.no_grad():
        for layer in merged.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for adapter, projections in (
                (attention.draft_input, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (attention.draft_output, (attention.o_proj,)),
                (mlp.draft_input, (mlp.gate_proj, mlp.up_proj)),
                (mlp.draft_output, (mlp.down_proj,)),
            ):
                update = 2.0 * adapter.up @ adapter.down  # alpha / rank
                for projection, own in zip(projections, update.split(adapter.out_features), strict=True):
                    projection.weight += own
        embeds = merged.model.draft_embedding.expand(2, 7, -1)
    expected = merged(inputs_embeds=embeds, prompt_lengths=torch.zeros(2, dtype=torch.long), block_size=1).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@all_families
def test_a_new_drafter_adds_nothing_and_reads_the_mask_token(family):
    model = models(family)[1]
    ids = torch.full((1, 6), model.config.mask_token_id)
    expected = causal(model, ids)
    model.model.add_drafter()
    assert model.config.drafter == {"rank": 64}
    assert causal(model, ids, is_drafted=torch.ones_like(ids, dtype=torch.bool)).equal(expected)


@all_families
def test_the_base_is_byte_identical_and_a_folder_has_both(family, tmp_path):
    base, model = models(family)[1], with_drafter(family)
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, VOCAB_SIZE, (2, 7))
    is_drafted = torch.arange(7)[None].expand(2, -1) > 3
    expected = causal(model, ids, is_drafted=is_drafted)
    for loaded in (
        load_d2f_model(tmp_path, dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float32),
    ):
        assert loaded.config.drafter == {"rank": 4, "alpha": 8}
        assert causal(loaded, ids, is_drafted=is_drafted).equal(expected)
        weights = loaded.state_dict()
        assert all(weights[name].equal(value) for name, value in base.state_dict().items())


def test_gradient_checkpointing_sees_the_same_gate_in_the_backward_pass():
    gradients = []
    for checkpointing in (False, True):
        model = with_drafter("llama").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.arange(1, 8)[None]
        causal(model, ids, is_drafted=torch.arange(7)[None] > 2).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"alpha": 2}, "drafter"),
        ({"rank": 0}, "rank"),
        ({"rank": 2.0}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": 2, "alpha": 0}, "alpha"),
        ({"rank": 2, "alpha": float("nan")}, "alpha"),
        ({"rank": 2, "beta": 1}, "drafter"),
        (64, "drafter"),
    ],
    ids=str,
)
def test_a_drafter_that_is_none_is_refused_by_name(drafter, message):
    model = models()[1]
    with pytest.raises(ValueError, match=f"`{message}`"):
        model.model.add_drafter(drafter)
    assert model.config.drafter is None


def test_a_second_drafter_is_refused():
    with pytest.raises(ValueError, match="has one already"):
        with_drafter("llama").model.add_drafter({"rank": 2})


def test_a_drafter_follows_dtype_and_device_of_its_layers():
    model = models()[1].to(torch.bfloat16)
    model.model.add_drafter({"rank": 2})
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_an_adapter_begins_with_terms_of_zero():
    adapter = DraftAdapter({"rank": 3}, 5, (2, 4))
    outputs = (torch.randn(1, 2, 2), torch.randn(1, 2, 4))
    found = adapter(outputs, torch.randn(1, 2, 5), torch.ones(1, 2, 1))
    assert all(a.equal(b) for a, b in zip(found, outputs, strict=True)) and adapter.down.abs().sum() > 0
