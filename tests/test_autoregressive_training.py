"""From an autoregressive checkpoint to a diffusion model: load it, train it, decode it, save it."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from causal_models import stock_model
from d2f_hf import D2FTrainer, D2FTrainingArguments, diffusion_model_from_autoregressive, load_d2f_model
from tiny_models import tokenizer_of

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["masked_diffusion", "distillation"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_autoregressive_checkpoint_is_trained_decoded_saved_and_loaded(family, objective, tmp_path):
    options = {"head_dim": 12} if family == "qwen3" else {}
    stock_model(*FAMILIES[family], **options).save_pretrained(tmp_path / "base")
    model = load_d2f_model(tmp_path / "base", block_size=4)
    assert model.config.has_causal_mode and model.generation_config.decoding == "autoregressive"
    mask_token_id, before = model.config.mask_token_id, model.get_input_embeddings().weight.detach().clone()
    data = [{"input_ids": [3, 4, 5, 6 + i, 7, 8, 9, 10], "prompt_length": 3} for i in range(8)]
    args = D2FTrainingArguments(
        output_dir=tmp_path / "run",
        objective=objective,
        block_size=4,
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
    )
    trainer = D2FTrainer(model, args, train_dataset=data)
    trainer.train()
    assert all(torch.tensor(entry["loss"]).isfinite() for entry in trainer.state.log_history if "loss" in entry)
    trained = trainer.model
    if objective == "distillation":
        trained = trained.merge_and_unload()
    else:
        assert not trained.get_input_embeddings().weight.equal(before)
    assert not trained.config.has_causal_mode and trained.generation_config.decoding == "d2f"
    assert trained.config.trained_for is None  # so nobody is warned of pipelined decoding
    ids = torch.tensor([[3, 4, 5]])
    tokens = trained.eval().generate(ids, max_new_tokens=9)
    assert mask_token_id not in tokens[0, 3:].tolist()
    trained.save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert again.config.mask_token_id == mask_token_id
    assert again.generate(ids, max_new_tokens=9).equal(tokens)


WITHOUT_THE_PACKAGE = """
import sys

sys.modules["d2f_hf"] = None  # `import d2f_hf` fails

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

results = {}
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert AutoTokenizer.from_pretrained(folder).mask_token_id == model.config.mask_token_id
    results[folder] = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=9)
save_file(results, sys.argv[1])
"""


@pytest.mark.slow
def test_a_distilled_adapter_goes_back_on_its_base_and_what_is_merged_loads_without_the_package(tmp_path):
    """Of each family. Such an adapter was loaded as part of an autoregressive model, which it no longer is."""
    expected, data = {}, [{"input_ids": [3, 4, 5, 6 + i, 7, 8, 9, 10], "prompt_length": 3} for i in range(8)]
    prompt = torch.tensor([[3, 4, 5]])
    for family, (config_class, model_class) in FAMILIES.items():
        base = tmp_path / family / "base"
        stock_model(config_class, model_class).save_pretrained(base)
        tokenizer = tokenizer_of(80, eos_token="w79", pad_token="w78")
        model = diffusion_model_from_autoregressive(base, tokenizer, block_size=4)
        model.save_pretrained(tmp_path / family / "converted")
        args = D2FTrainingArguments(
            output_dir=tmp_path / family / "run", max_steps=2, learning_rate=1e-2, report_to="none", use_cpu=True
        )
        trainer = D2FTrainer(model, args, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        trainer.save_model(tmp_path / family / "adapter")
        merged = trainer.model.merge_and_unload().eval()
        tokens = merged.generate(prompt, max_new_tokens=9)

        for folder in (base, tmp_path / family / "converted"):
            again = load_d2f_model(folder, tmp_path / family / "adapter")
            assert not again.config.has_causal_mode and again.config.trained_for is None
            assert again.generation_config.decoding == "d2f" and again.config.block_size == 4
            assert again.generate(prompt, max_new_tokens=9).equal(tokens)

        folder = tmp_path / family / "merged"
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        expected[str(folder)] = tokens
    blocked = {"PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"}
    environment = {name: value for name, value in os.environ.items() if name not in blocked}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONWARNINGS": "ignore"}
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(tmp_path / "results.safetensors"), *expected]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = load_file(tmp_path / "results.safetensors")
    assert results.keys() == expected.keys() and all(results[name].equal(value) for name, value in expected.items())
