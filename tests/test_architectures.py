"""What config.json says: which architecture it is, what is filled in, and what is refused before any weight."""

import json
import shutil

import pytest
import torch
from d2f_hf.modeling.generation_config_d2f import DECODING_MODES
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from causal_models import LONG_ROPES, SHAPES, VOCAB_SIZE, stock_model
from d2f_hf import (
    D2FDreamForBlockDiffusion,
    D2FLlamaForBlockDiffusion,
    D2FQwen3ForBlockDiffusion,
    load_d2f_model,
)
from d2f_hf.architectures import ARCHITECTURES
from golden_data import GOLDEN
from tiny_models import tokenizer_of

STOCK = {
    "llama": (LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion),
    "mistral": (MistralConfig, MistralForCausalLM, D2FLlamaForBlockDiffusion),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, D2FDreamForBlockDiffusion),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, D2FQwen3ForBlockDiffusion),
}
all_stock = pytest.mark.parametrize("model_type", STOCK)
IDS = torch.arange(4, 34)[None]
BLOCK_MODELS = {"sdar": GOLDEN / "block_models" / "sdar_tiny", "v2": GOLDEN / "block_models" / "fastdllm_v2_tiny"}
block_models = pytest.mark.parametrize("name", BLOCK_MODELS)


@torch.no_grad()
def causal(model) -> torch.Tensor:
    return model(IDS, prompt_lengths=torch.zeros(1, dtype=torch.long), block_size=1).logits[..., :VOCAB_SIZE]


def stock_folder(folder, model_type: str, config: dict | None = None, **options) -> torch.Tensor:
    """A saved model of transformers, and its logits. `config` replaces values in its file; `None` removes one."""
    config_class, model_class, _ = STOCK[model_type]
    if model_type == "mistral":
        options.setdefault("sliding_window", None)
    if "head_dim" not in options and model_type == "qwen3":
        options["head_dim"] = 12
    model = stock_model(config_class, model_class, **options)
    model.save_pretrained(folder)
    change(folder, **(config or {}))
    with torch.no_grad():
        return model(IDS).logits


def change(folder, **config) -> None:
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({k: v for k, v in values.items() if k not in config or v is not None}))


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# ---- autoregressive checkpoints ----


@all_stock
@pytest.mark.parametrize("options", SHAPES, ids=str)
def test_an_autoregressive_checkpoint_loads_as_it_is(model_type, options, tmp_path):
    expected = stock_folder(tmp_path / "base", model_type, **options)
    if options.get("tie_word_embeddings"):
        assert "lm_head.weight" not in load_file(tmp_path / "base" / "model.safetensors")
    model = load_d2f_model(tmp_path / "base")
    assert type(model) is STOCK[model_type][2] and not model.training
    assert model.config.has_causal_mode and model.config.right_shift_logits
    assert model.config.trained_for == "autoregressive"
    assert model.config.block_alignment == "prompt" and model.config.block_size == 32
    assert_near(causal(model), expected)
    if "autoregressive" in DECODING_MODES:
        assert model.generation_config.decoding == "autoregressive"
    assert model.generate(IDS, max_new_tokens=6, block_size=4, decoding="d2f").shape[1] > IDS.shape[1]

    model.save_pretrained(tmp_path / "saved")
    again = load_d2f_model(tmp_path / "saved")
    assert causal(again).equal(causal(model))
    fields = ("mask_token_id", "vocab_size", "has_causal_mode", "trained_for", "right_shift_logits", "rope_parameters")
    for field in fields:
        assert getattr(again.config, field) == getattr(model.config, field), field
    assert again.generation_config.to_dict() == model.generation_config.to_dict()


@all_stock
@pytest.mark.parametrize("rope", LONG_ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_the_scaling_of_positions_is_read_in_all_spellings(model_type, rope, spelling, tmp_path):
    expected = stock_folder(
        tmp_path,
        model_type,
        rope_parameters=rope,
        max_position_embeddings=16 if rope["rope_type"] == "dynamic" else 64,
    )
    if spelling != "rope_parameters":
        old = {name: value for name, value in rope.items() if name != "rope_theta"}
        if spelling == "type":
            old["type"] = old.pop("rope_type")
        change(tmp_path, rope_parameters=None, rope_scaling=old, rope_theta=rope["rope_theta"])
    assert_near(causal(load_d2f_model(tmp_path)), expected)


@all_stock
def test_what_a_config_leaves_out_is_what_the_stock_class_says(model_type, tmp_path):
    """Mistral without `num_key_value_heads` has 8, where Llama has one per head."""
    options = (
        {"num_key_value_heads": 8, "num_attention_heads": 16, "hidden_size": 64} if model_type == "mistral" else {}
    )
    expected = stock_folder(tmp_path, model_type, **options)
    left_out = ["rms_norm_eps", "rope_parameters", "tie_word_embeddings", "attention_dropout", "use_cache"]
    change(tmp_path, **dict.fromkeys(left_out + (["num_key_value_heads"] if options else [])))
    assert_near(causal(load_d2f_model(tmp_path)), expected)


@all_stock
def test_several_eos_ids_of_the_generation_config_are_taken_and_its_sampler_is_not(model_type, tmp_path):
    stock_folder(tmp_path / "base", model_type)
    values = {"eos_token_id": [3, 4], "pad_token_id": 5, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(values))
    model = load_d2f_model(tmp_path / "base")
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == ([3, 4], 5)
    assert not model.generation_config.do_sample
    model.save_pretrained(tmp_path / "saved")
    assert load_d2f_model(tmp_path / "saved").generation_config.eos_token_id == [3, 4]


@pytest.mark.parametrize("options", [{"attention_bias": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_biases_are_loaded(options, tmp_path):
    expected = stock_folder(tmp_path, "llama", **options)
    assert_near(causal(load_d2f_model(tmp_path)), expected)


def test_fields_that_change_nothing_are_harmless(tmp_path):
    config = {
        "pretraining_tp": 2,
        "torch_dtype": "float32",
        "auto_map": {"AutoConfig": "evil.Config"},
        "use_cache": False,
    }
    expected = stock_folder(tmp_path, "llama", config)
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    assert_near(causal(load_d2f_model(tmp_path, trust_remote_code=True)), expected)


def test_rotary_frequencies_of_old_llama_checkpoints_are_overlooked(tmp_path):
    """Llama 2 files hold them, and each was an error: "must hold nothing but the model's weights"."""
    expected = stock_folder(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_near(causal(load_d2f_model(tmp_path)), expected)


@pytest.mark.parametrize("num_words", [60, VOCAB_SIZE], ids=["free rows", "full"])
@pytest.mark.parametrize("has_settings", [True, False], ids=["of D2FTrainer", "of anything else"])
@pytest.mark.parametrize("kind", ["q_proj", "embed_tokens"])
def test_an_adapter_finds_the_mask_token_that_it_was_trained_with(num_words, has_settings, kind, tmp_path):
    """On its row of the base, which is made as it was for the training."""
    stock_folder(tmp_path / "base", "llama")
    tokenizer_of(num_words).save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    model = load_d2f_model(tmp_path / "base")
    config = model.config
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=[kind], init_lora_weights=False)).eval()
    ids = torch.tensor([[3, 5, num_words, num_words]])
    with torch.no_grad():
        expected = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    if has_settings:
        config.has_causal_mode, config.block_size = False, 8
        config.save_pretrained(tmp_path / "adapter")
    for merge in (True, False):
        again = load_d2f_model(tmp_path / "base", tmp_path / "adapter", merge=merge)
        assert again.config.mask_token_id == num_words
        assert again.config.has_causal_mode is not has_settings
        assert again.config.block_size == (8 if has_settings else 32)
        if "autoregressive" in DECODING_MODES:
            assert again.generation_config.decoding == ("d2f" if has_settings else "autoregressive")
        with torch.no_grad():
            assert_near(again(ids).logits, expected)


# ---- released block-diffusion models ----


@block_models
def test_a_released_block_diffusion_model_loads_as_it_is(name, tmp_path):
    shutil.copytree(BLOCK_MODELS[name], tmp_path / "base")
    change(tmp_path / "base", mask_token_id=93)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": [90, 89]}))
    for file in ("configuration.py", "modeling.py", "configuration_sdar.py", "modeling_sdar.py"):
        (tmp_path / "base" / file).write_text("raise SystemExit('executed')")
    model = load_d2f_model(tmp_path / "base", trust_remote_code=True)
    assert type(model) is {"sdar": D2FQwen3ForBlockDiffusion, "v2": D2FDreamForBlockDiffusion}[name]
    assert model.config.block_size == {"sdar": 4, "v2": 32}[name] and model.config.block_alignment == "sequence"
    assert model.config.right_shift_logits is (name == "v2") and model.config.has_causal_mode is False
    assert model.config.mask_token_id == 93
    assert model.generation_config.eos_token_id == [90, 89]
    assert model.generation_config.block_add_threshold == 1.0
    assert model.generation_config.confidence_threshold == {"sdar": 0.85, "v2": 0.9}[name]
    left = {"bd_size", "auto_map", "fuse_cross_entropy", "conplemenrary_mask", "attn_implementation"}
    assert not left & set(model.config.to_dict())
    original = load_file(BLOCK_MODELS[name] / "model.safetensors")
    assert all(weight.equal(original[key]) for key, weight in model.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    again = load_d2f_model(tmp_path / "saved")
    for field in ("block_size", "block_alignment", "right_shift_logits", "has_causal_mode", "mask_token_id"):
        assert getattr(again.config, field) == getattr(model.config, field), field
    assert again.generation_config.block_add_threshold == 1.0


def test_the_mask_token_of_a_block_model_is_read_from_its_tokenizer_files(tmp_path):
    shutil.copytree(BLOCK_MODELS["v2"], tmp_path / "base")
    with pytest.raises(ValueError, match="`mask_token_id`.*nor in the tokenizer files"):
        load_d2f_model(tmp_path / "base")
    (tmp_path / "base" / "added_tokens.json").write_text(json.dumps({"|<MASK>|": 92}))
    model = load_d2f_model(tmp_path / "base")
    assert model.config.mask_token_id == 92 and model.config.vocab_size == 96


@pytest.mark.parametrize(("name", "mask", "eos"), [("sdar", 151669, [151645, 151643]), ("v2", 151665, 151645)])
def test_without_any_file_that_says_so_special_tokens_are_those_of_the_releases(name, mask, eos, tmp_path):
    shutil.copytree(BLOCK_MODELS[name], tmp_path / "base")
    block_size = "block_size" if name == "sdar" else "bd_size"
    removed = {"mask_token_id": None, "eos_token_id": None, "pad_token_id": None, block_size: None}
    change(tmp_path / "base", vocab_size=151936, **removed)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[key] = torch.zeros(151936, weights[key].shape[1])
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    model = load_d2f_model(tmp_path / "base")
    assert (model.config.mask_token_id, model.config.eos_token_id) == (mask, eos)
    assert model.generation_config.eos_token_id == eos
    assert model.config.block_size == {"sdar": 4, "v2": 32}[name]


# ---- what is refused ----


@pytest.fixture
def no_weights(monkeypatch):
    def from_pretrained(*args, **kwargs):
        raise AssertionError("weights were loaded before the error was found")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", from_pretrained)


EXPERTS, NORMS, PARTIAL = "mixture of experts", "other norms", "part of each head"
REFUSED_TYPES = {
    **dict.fromkeys(["mixtral", "qwen2_moe", "qwen3_moe", "sdar_moe", "llada2_moe", "llada_moe", "lladamoe"], EXPERTS),
    "diffusion_gemma": "replaces tokens by others rather than by a mask",
    "llava_llada": "reads images too",
    **dict.fromkeys(["cohere", "olmo2", "gemma", "gemma2", "gemma3_text"], NORMS),
    **dict.fromkeys(["phi", "stablelm", "gpt_neox", "glm4"], PARTIAL),
    "ministral": "sliding window",
    "something": "there is no code",
}


@pytest.mark.parametrize(("model_type", "word"), REFUSED_TYPES.items())
def test_other_architectures_are_refused_by_name_with_what_they_are(model_type, word, tmp_path, no_weights):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 8}))
    with pytest.raises(ValueError) as error:
        load_d2f_model(tmp_path)
    assert "`model_type`" in str(error.value) and repr(model_type) in str(error.value) and word in str(error.value)


HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
REFUSED_VALUES = [
    ("mistral", {"sliding_window": 32}, ("`sliding_window`", "32", "sliding_window=None")),
    ("qwen2", {**WINDOWED, "max_window_layers": 1}, ("`use_sliding_window`",)),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, ("`layer_types`", "sliding_attention")),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, ("`layer_types`", "chunked_attention")),
    ("llama", {"partial_rotary_factor": 0.5}, ("`partial_rotary_factor`", "0.5")),
    ("qwen3", {"rope_parameters": HALF_ROTATED}, ("`partial_rotary_factor`",)),
    ("qwen2", {"hidden_act": "gelu"}, ("`hidden_act`", "gelu")),
    ("llama", {"num_local_experts": 8}, ("`num_local_experts`", EXPERTS)),
    ("qwen3", {"num_experts": 128}, ("`num_experts`", EXPERTS)),
    ("llama", {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, ("`rope_type`", "mrope")),
]


@pytest.mark.parametrize(("model_type", "config", "words"), REFUSED_VALUES, ids=str)
def test_layers_of_another_kind_are_refused_by_name(model_type, config, words, tmp_path, no_weights):
    stock_folder(tmp_path, model_type, config)
    with pytest.raises(ValueError) as error:
        load_d2f_model(tmp_path)
    for word in (str(tmp_path), *words):
        assert word in str(error.value), str(error.value)


def test_a_mistral_whose_file_says_nothing_of_a_window_has_the_one_of_its_class(tmp_path, no_weights):
    stock_folder(tmp_path, "mistral", {"sliding_window": None, "max_position_embeddings": 32768})
    with pytest.raises(ValueError, match="4096 tokens"):
        load_d2f_model(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "config", "options"),
    [
        ("mistral", {"sliding_window": 64}, {}),
        ("mistral", {"sliding_window": 32}, {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, {}),
        ("qwen2", {**WINDOWED, "max_window_layers": 2}, {}),
        ("qwen3", WINDOWED, {"use_sliding_window": False}),
        ("llama", {"partial_rotary_factor": 1.0, "num_experts": 1}, {}),
    ],
    ids=str,
)
def test_a_window_that_hides_nothing_or_that_the_caller_turns_off_is_none(model_type, config, options, tmp_path):
    stock_folder(tmp_path, model_type)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    model = load_d2f_model(tmp_path, **options)
    assert causal(model).isfinite().all()


def test_what_is_refused_is_not_what_is_loaded():
    from d2f_hf import architectures

    assert not set(ARCHITECTURES) & set(architectures._NOT_HERE)
