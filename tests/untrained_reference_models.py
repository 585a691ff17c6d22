"""A folder like the one with the reference models, of tiny models that know nothing."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from d2f_hf import D2FLLaDAConfig, D2FLLaDAForBlockDiffusion


def save_untrained_models(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Writes twin, teacher, student and tokenizer to `folder`, and gives it back."""
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(folder / "twin")
    sizes = {"d_model": 8, "mlp_hidden_size": 8, "n_layers": 1, "n_heads": 1, "block_size": 16}
    config = D2FLLaDAConfig(
        vocab_size=len(tokenizer), mask_token_id=tokenizer.mask_token_id, right_shift_logits=True, **sizes, **ids
    )
    teacher = D2FLLaDAForBlockDiffusion(config)
    teacher.save_pretrained(folder / "teacher")
    get_peft_model(teacher, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder
