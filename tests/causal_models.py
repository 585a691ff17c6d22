"""Autoregressive models of transformers, and ours with the same weights."""

# B batch, L sequence

import torch
from d2f_hf.modeling.modeling_d2f import D2FForBlockDiffusion
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from d2f_hf import D2FCache, D2FDreamForBlockDiffusion, D2FLlamaForBlockDiffusion, D2FQwen3ForBlockDiffusion

VOCAB_SIZE = 80
MASK = 0  # it is never chosen here, so the stock class is kept from choosing it
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, D2FLlamaForBlockDiffusion),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, D2FDreamForBlockDiffusion),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, D2FQwen3ForBlockDiffusion),
}
# Tied and untied heads, grouped heads, heads of their own width.
SHAPES = (
    {},
    {"tie_word_embeddings": True},
    {"num_key_value_heads": 1, "head_dim": 6},
    {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    {"hidden_size": 40, "num_attention_heads": 4, "num_hidden_layers": 3, "rms_norm_eps": 1e-3},
)
LONG_ROPES = (
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)


def stock_model(
    config_class: type[PreTrainedConfig],
    model_class: type[PreTrainedModel],
    seed: int = 0,
    scale: float = 0.25,
    **options,
) -> PreTrainedModel:
    """A random model of transformers with weights large enough for its predictions to differ."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": VOCAB_SIZE - 1,
        "pad_token_id": VOCAB_SIZE - 2,
    }
    model = model_class(config_class(**{**defaults, **options})).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        weight.data.normal_(1.0 if "norm" in name else 0.0, scale, generator=generator)
    return model


def with_its_weights(stock: PreTrainedModel, model_class: type[D2FForBlockDiffusion], **options):
    """A model of ours with the configuration and the weights of `stock`."""
    values = {name: value for name, value in stock.config.to_dict().items() if name not in ("model_type", "dtype")}
    config = model_class.config_class.from_dict(values, has_causal_mode=True, **options)
    model = model_class(config).eval()
    model.load_state_dict(stock.state_dict())
    return model


@torch.no_grad()
def assert_equal_to_stock(config_class, model_class, own_class, dtype=torch.float32, tolerance=1e-5, **options):
    """Whole, padded at the left, and in pieces with a cache."""
    stock = stock_model(config_class, model_class, scale=0.2, **options).to(dtype)
    own = with_its_weights(stock, own_class).to(dtype)
    is_causal = {"prompt_lengths": torch.zeros(2, dtype=torch.long), "block_size": 1}
    ids = torch.randint(0, VOCAB_SIZE - 2, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = stock(ids).logits
    torch.testing.assert_close(own(ids, **is_causal).logits, expected, rtol=0, atol=tolerance)

    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    padded = stock(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    found = own(ids, attention_mask=mask, **is_causal).logits
    torch.testing.assert_close(found[mask.bool()], padded[mask.bool()], rtol=0, atol=tolerance)

    if stock.config.rope_parameters["rope_type"] == "dynamic":
        return  # keys in a cache keep the frequencies of the length at which they were written, in both
    cache = D2FCache(own.config.num_hidden_layers, 40)
    for start, end in ((0, 13), (13, 14), (14, 40)):
        slots = torch.arange(start, end)
        cache.set_window(slots.expand(2, -1), end)
        visible = torch.arange(end)[None] <= slots[:, None]
        piece = own(
            ids[:, start:end],
            attention_mask=visible[None, None].expand(2, 1, -1, -1),
            position_ids=slots.expand(2, -1),
            cache=cache,
        )
        torch.testing.assert_close(piece.logits, expected[:, start:end], rtol=0, atol=tolerance)


def models(family: str = "llama", seed: int = 0):
    """A random model of transformers, and ours with its weights and a mask token."""
    config_class, stock_class, own_class = FAMILIES[family]
    stock = stock_model(config_class, stock_class, seed, head_dim=12) if family == "qwen3" else None
    stock = stock_model(config_class, stock_class, seed) if stock is None else stock
    return stock, with_its_weights(stock, own_class, mask_token_id=MASK)


def prompts(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded at the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, VOCAB_SIZE - 2, (len(lengths), width), generator=generator)
    mask = torch.tensor([[int(i >= width - length) for i in range(width)] for length in lengths])
    return {"input_ids": ids.masked_fill(mask == 0, VOCAB_SIZE - 2), "attention_mask": mask}
