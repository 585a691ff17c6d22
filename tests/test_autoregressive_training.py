"""From an autoregressive checkpoint to a diffusion model: load it, train it, decode it, save it."""

import pytest
import torch
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
from d2f_hf import D2FTrainer, D2FTrainingArguments, load_d2f_model

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
    ids = torch.tensor([[3, 4, 5]])
    tokens = trained.eval().generate(ids, max_new_tokens=9)
    assert mask_token_id not in tokens[0, 3:].tolist()
    trained.save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert again.config.mask_token_id == mask_token_id
    assert again.generate(ids, max_new_tokens=9).equal(tokens)
