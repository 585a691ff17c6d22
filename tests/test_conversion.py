"""From an autoregressive checkpoint to a diffusion model in one call."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from causal_models import VOCAB_SIZE, stock_model
from d2f_hf import (
    D2FDreamForBlockDiffusion,
    D2FGenerationConfig,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
    D2FLlamaForBlockDiffusion,
    D2FQwen3ForBlockDiffusion,
    diffusion_model_from_autoregressive,
)
from golden_data import GOLDEN
from tiny_models import tokenizer_of

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "reference_model"
STOCK = {
    "llama": (LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion),
    "mistral": (MistralConfig, MistralForCausalLM, D2FLlamaForBlockDiffusion),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, D2FDreamForBlockDiffusion),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, D2FQwen3ForBlockDiffusion),
}
SIZES = (60, VOCAB_SIZE - 1, VOCAB_SIZE)  # of tokenizers: with spare rows in the embedding, with one, with none
IDS = torch.arange(3, 15)[None]


def base(folder: Path, family: str = "llama", **options):
    """A stock checkpoint in `folder`, and its logits."""
    config_class, model_class, _ = STOCK[family]
    window = {"sliding_window": None} if family == "mistral" else {}
    stock = stock_model(config_class, model_class, **window, **options)
    stock.save_pretrained(folder)
    with torch.no_grad():
        return folder, stock(IDS).logits


@torch.no_grad()
def causal_logits(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids, prompt_lengths=torch.zeros(1, dtype=torch.long), block_size=1).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family, as_llada", [*((name, False) for name in STOCK), ("llama", True), ("mistral", True)])
def test_under_a_causal_mask_it_is_the_autoregressive_model(family, as_llada, size, tied, tmp_path):
    """Whatever row of the embedding a new mask token gets. It is never chosen."""
    folder, expected = base(tmp_path / "base", family, tie_word_embeddings=tied)
    tokenizer = tokenizer_of(size)
    model = diffusion_model_from_autoregressive(folder, tokenizer, block_size=4, as_llada=as_llada)
    assert type(model) is (D2FLLaDAForBlockDiffusion if as_llada else STOCK[family][2]) and not model.training
    assert model.config.mask_token_id == tokenizer.mask_token_id == size
    assert tokenizer.mask_token == "<|mask|>" and model.config.block_size == 4
    others = [i for i in range(VOCAB_SIZE) if i != size]
    found = causal_logits(model)
    torch.testing.assert_close(found[..., others], expected[..., others], rtol=0, atol=1e-5)
    assert (found[..., size] < found[..., others].amax(-1)).all()
    assert model.config.has_causal_mode and model.config.trained_for == "autoregressive"
    assert model.generation_config.decoding == "autoregressive"
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == tied

    model.save_pretrained(tmp_path / "saved")
    again = diffusion_model_from_autoregressive(tmp_path / "saved", tokenizer, as_llada=as_llada)
    assert type(again) is type(model) and causal_logits(again).equal(found)


@pytest.mark.parametrize("as_llada", [False, True])
def test_the_twin_of_the_reference_model(as_llada):
    """Its tokenizer is in another folder, and has a mask token, whose row stays as it is."""
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "tokenizer")
    options = {"dtype": torch.float64}  # in float32 logits of up to 17 differ by 2e-5, which is how they are rounded
    model = diffusion_model_from_autoregressive(EXAMPLE / "twin", tokenizer, as_llada=as_llada, **options)
    twin = LlamaForCausalLM.from_pretrained(EXAMPLE / "twin", **options).eval()
    ids = torch.randint(0, 1024, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(causal_logits(model, ids), twin(ids).logits, rtol=0, atol=1e-5)
    assert model.config.mask_token_id == tokenizer.mask_token_id == 3 and model.config.vocab_size == 1024


def test_the_shipped_teacher_has_the_configuration_that_its_script_makes(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "tokenizer")
    model = diffusion_model_from_autoregressive(EXAMPLE / "twin", tokenizer, as_llada=True, block_size=5)
    model.config.has_causal_mode, model.config.trained_for = False, None  # as training does
    model.generation_config.decoding = "d2f"
    model.save_pretrained(tmp_path)
    for read in (D2FLLaDAConfig.from_pretrained, D2FGenerationConfig.from_pretrained):
        made, shipped = read(tmp_path), read(EXAMPLE / "teacher")
        if isinstance(shipped, D2FGenerationConfig):  # options that are newer than the file
            shipped.with_defaults()
        made, shipped = made.to_dict(), shipped.to_dict()
        # The last three are nothing that decoding here depends on, and were written by an earlier version.
        not_compared = ("auto_map", "transformers_version", "use_cache", "output_attentions", "output_hidden_states")
        different = {name for name in made | shipped if made.get(name) != shipped.get(name)} - set(not_compared)
        assert different == set()


@pytest.mark.parametrize(
    "own, mask_token, expected",
    [
        ({"mask_token": "[M]"}, None, "[M]"),
        ({"mask_token": "[M]"}, "w5", "w5"),
        ({"mask_token": "[M]"}, "<|new|>", "<|new|>"),
        ({}, "<|new|>", "<|new|>"),
    ],
)
def test_which_token_is_the_mask(own, mask_token, expected, tmp_path):
    tokenizer = tokenizer_of(60, **own)
    is_new = expected not in tokenizer.get_vocab()
    model = diffusion_model_from_autoregressive(base(tmp_path)[0], tokenizer, mask_token=mask_token)
    assert tokenizer.mask_token == expected and model.config.mask_token_id == tokenizer.mask_token_id
    if is_new:
        embedding: Any = model.get_input_embeddings()
        weight = embedding.weight
        others = [i for i in range(len(weight)) if i != tokenizer.mask_token_id]
        torch.testing.assert_close(weight[tokenizer.mask_token_id], weight[others].mean(0))


def test_without_a_tokenizer_the_files_say_it(tmp_path):
    folder, _ = base(tmp_path)
    tokenizer_of(60, mask_token="[M]").save_pretrained(folder)
    model = diffusion_model_from_autoregressive(folder)
    assert model.config.mask_token_id == tokenizer_of(60, mask_token="[M]").mask_token_id
    assert diffusion_model_from_autoregressive(folder, mask_token="w7").config.mask_token_id != 60


@pytest.mark.parametrize(
    "family, config, options, message",
    [
        ("qwen2", {}, {"as_llada": True}, "`as_llada` must be False"),
        ("qwen3", {}, {"as_llada": True}, "`as_llada` must be False"),
        ("llama", {"attention_bias": True}, {"as_llada": True}, "`attention_bias`"),
        ("llama", {"mlp_bias": True}, {"as_llada": True}, "`mlp_bias`"),
        ("llama", {"head_dim": 6}, {"as_llada": True}, "`head_dim`"),
        ("llama", {}, {"as_llada": True, "device_map": "cpu"}, "`device_map`"),
        ("llama", {}, {"mask_token_id": 4}, "`mask_token_id`"),
        ("llama", {}, {"blok_size": 4}, "`blok_size`"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_weights_load(family, config, options, message, tmp_path):
    folder, _ = base(tmp_path, family, **config)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match=message):
        diffusion_model_from_autoregressive(folder, tokenizer_of(60), **options)


def test_a_diffusion_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a diffusion model already: pass it to `load_d2f_model`"):
        diffusion_model_from_autoregressive(GOLDEN / "llada_tiny")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(ValueError, match="mixture of experts"):
        diffusion_model_from_autoregressive(tmp_path)
