"""Masks of any kind, and the rotary embedding. What both have to do in a model is in `test_modeling_d2f.py`."""

import copy

import pytest
import torch
from d2f_hf.modeling.attention_d2f import rotate
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from causal_models import stock_model, with_its_weights
from d2f_hf import D2FLLaDAForBlockDiffusion, D2FLlamaForBlockDiffusion
from tiny_models import FAMILIES, tiny_config, tiny_model

# B batch, L sequence, S key/value slots, H heads, D head dimension

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
IMPLEMENTATIONS = ["eager", "sdpa", "flex_attention"]
LOWEST = [-torch.inf, -1e4, -1e9, *(torch.finfo(dtype).min for dtype in DTYPES)]
IDS = torch.randint(0, 37, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def without_gradients_and_compiling():
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def model_of(implementation: str, dtype: torch.dtype = torch.float32, family: str = "llada"):
    model = copy.deepcopy(tiny_model(family=family)).to(dtype)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("model_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask_dtype", DTYPES, ids=str)
def test_an_additive_mask_of_any_dtype_says_what_the_bool_mask_says(implementation, model_dtype, mask_dtype):
    """The lowest number of one dtype is -inf in a narrower one, and too high to hide a key in a wider one; a row that
    is hidden as a whole gave NaN, or scores that were rounded to nothing."""
    model = model_of(implementation, model_dtype)
    allowed = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    allowed[0, 0, 3] = False
    expected = model(IDS, attention_mask=allowed).logits
    assert expected.isfinite().all()
    for lowest in LOWEST:
        mask = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~allowed, lowest).to(mask_dtype)
        logits = model(IDS, attention_mask=mask).logits
        assert logits.dtype == model_dtype
        tolerance = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(model_dtype, 1e-5)
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_added_to_the_scores_counts(implementation):
    model, bias = model_of(implementation), torch.arange(6.0)[None, None, None]
    logits = model(IDS, attention_mask=bias).logits
    assert not torch.allclose(logits, model(IDS).logits, atol=0.01)
    torch.testing.assert_close(model(IDS, attention_mask=bias - 3).logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.long, *DTYPES], ids=str)
@pytest.mark.parametrize("structure", [{}, {"prompt_lengths": torch.tensor([2, 3]), "block_size": 2}], ids=len)
def test_a_mask_of_tokens_may_have_any_dtype_and_any_number_for_a_token(dtype, structure):
    """A 2 counted as two positions, and 0.5 as none."""
    model, mask = model_of("sdpa"), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    expected = model(IDS, attention_mask=mask, **structure).logits
    assert model(IDS, attention_mask=mask.to(dtype), **structure).logits.equal(expected)
    if dtype != torch.bool:
        token = 2 if not dtype.is_floating_point else 0.5
        assert model(IDS, attention_mask=(mask * token).to(dtype), **structure).logits.equal(expected)


def test_a_mask_of_tokens_that_is_meant_to_be_added_is_an_error():
    mask = torch.zeros(2, 6).masked_fill(torch.arange(6) < 2, -torch.inf)
    with pytest.raises(ValueError, match="`attention_mask` of shape \\(B, S\\) must be 1"):
        model_of("sdpa")(IDS, attention_mask=mask)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (3, 1, 6, 6), (2, 1, 5, 6), (2, 1, 6, 5), (2, 1, 6, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_finished_mask_of_another_shape_is_an_error(implementation, shape, dtype):
    """One mask per head is none of those: flex_attention would take that of the first head for all."""
    with pytest.raises(ValueError, match="`attention_mask` with four dimensions must have the shape"):
        model_of(implementation)(IDS, attention_mask=torch.ones(shape).to(dtype))


@pytest.mark.parametrize("shape", [(6,), (2, 6, 6), (1, 2, 1, 6, 6)], ids=str)
def test_a_mask_with_another_number_of_dimensions_is_an_error(shape):
    with pytest.raises(ValueError, match="`attention_mask` must have shape"):
        model_of("sdpa")(IDS, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (2, 1, 1, 6), (1, 1, 6, 6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float16, torch.float64], ids=str)
def test_rows_and_queries_may_share_a_finished_mask(implementation, shape, dtype):
    model, allowed = model_of(implementation), torch.ones(shape, dtype=torch.bool)
    allowed[..., 1] = False
    mask = allowed.to(dtype)
    if dtype.is_floating_point:
        mask = torch.zeros(shape, dtype=dtype).masked_fill(~allowed, -torch.inf)
    expected = model(IDS, attention_mask=allowed.expand(2, 1, 6, 6)).logits
    torch.testing.assert_close(model(IDS, attention_mask=mask).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_option_of_the_attention_function_of_transformers_still_reaches_it(family):
    model = tiny_model(family=family)
    assert not torch.allclose(model(IDS, is_causal=True).logits, model(IDS).logits, atol=0.01)
    causal = model(IDS, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()).logits
    torch.testing.assert_close(model(IDS, is_causal=True).logits, causal, atol=1e-5, rtol=1e-5)


def test_rotating_is_a_multiplication_of_complex_numbers():
    rotary = tiny_model().model.rotary_emb
    x, position = torch.randn(2, 5, 3, 8), torch.tensor([[0, 1, 2, 3, 4], [7, 7, 100, 3, 0]])
    turned = torch.polar(torch.ones(2, 5, 1, 4), position[..., None, None] * rotary.inv_freq)
    expected = torch.complex(x[..., :4], x[..., 4:]) * turned
    actual = rotate(x, *rotary(x, position))
    torch.testing.assert_close(actual, torch.cat([expected.real, expected.imag], dim=-1))
    assert rotate(x.half(), *rotary(x, position)).dtype == torch.float16


def test_frequencies_are_computed_on_the_host_whatever_the_default_device_is():
    expected = tiny_model().model.rotary_emb.inv_freq
    with torch.device("meta"):
        filled = D2FLLaDAForBlockDiffusion(tiny_config())
        filled.to_empty(device="cpu")
    assert filled.model.rotary_emb.inv_freq.equal(expected)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_change_as_in_transformers(rope_type):
    """Also for keys in a cache, which keep the frequencies of their own forward, and for a short text after a long."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
        rope |= {**factors, "original_max_position_embeddings": 16}
    length = 16 if rope_type == "dynamic" else 64
    stock = stock_model(LlamaConfig, LlamaForCausalLM, rope_parameters=rope, max_position_embeddings=length)
    own = with_its_weights(stock, D2FLlamaForBlockDiffusion)
    ids = torch.randint(0, 60, (1, 40), generator=torch.Generator().manual_seed(1))
    causal = {"prompt_lengths": torch.zeros(1, dtype=torch.long), "block_size": 1}
    for end in (10, 40, 20, 12):
        torch.testing.assert_close(own(ids[:, :end], **causal).logits, stock(ids[:, :end]).logits, rtol=0, atol=1e-5)
    caches = DynamicCache(), DynamicCache()
    for start, end in ((0, 13), (13, 17), (17, 18), (18, 40)):
        found = own(ids[:, start:end], cache=caches[0], **causal).logits
        expected = stock(ids[:, start:end], past_key_values=caches[1]).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
