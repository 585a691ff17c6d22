"""What the tests of training share: a tiny model and its adapter, rows, arguments, and what a run has changed."""

import random

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model

from d2f_hf import D2FLLaDAConfig, D2FLLaDAForBlockDiffusion, D2FTrainer, D2FTrainingArguments
from tiny_models import tiny_model as tiny_random_model

PAD, EOS, MASK = 0, 1, 3


def tiny_model(right_shift_logits: bool = False, seed: int = 0, **options) -> D2FLLaDAForBlockDiffusion:
    torch.manual_seed(seed)
    config = D2FLLaDAConfig(
        vocab_size=40,
        d_model=16,
        n_heads=2,
        n_layers=2,
        mlp_hidden_size=24,
        initializer_range=0.2,
        block_size=4,
        mask_token_id=MASK,
        eos_token_id=EOS,
        pad_token_id=PAD,
        right_shift_logits=right_shift_logits,
        **options,
    )
    return D2FLLaDAForBlockDiffusion(config)


def tiny_dataset(count: int = 16, seed: int = 0) -> Dataset:
    """Rows of different lengths; tokens 4 and up."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt_length, response_length = rng.randint(1, 5), rng.randint(2, 9)
        tokens = [rng.randrange(4, 40) for _ in range(prompt_length + response_length)]
        rows.append({"input_ids": tokens + [EOS], "prompt_length": prompt_length})
    return Dataset.from_list(rows)


def arguments(folder, **options) -> D2FTrainingArguments:
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "eos_tail": "block",
    }
    return D2FTrainingArguments(**{**defaults, **options})


def without_dropout() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "attn_out"])


def losses_of(trainer: D2FTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def adapted_model(**options) -> PeftModel:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(tiny_model(), config)


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(model, before) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


RAW = [{"prompt": "abc ", "completion": letters} for letters in ("hello", "you", "there my friend", "x")]


def letters_model():
    return tiny_random_model(eos_token_id=38, mask_token_id=39, pad_token_id=37)
