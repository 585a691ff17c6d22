"""Forwards of all architectures in plain torch, for the oracle: one sequence, float32, no cache.

All are the same transformer (RMSNorm, rotary positions, SiLU-gated MLP) under different parameter names.
"""

# L sequence, V vocabulary, H heads, G key/value heads, D head size

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

LLADA_NAMES = {
    "embedding": "model.transformer.wte.weight",
    "norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
    "layer": "model.transformer.blocks.{}.",
    "attention_norm": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "mlp_norm": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
DREAM_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def block_causal_mask(length: int, prompt_length: int, block_size: int) -> torch.Tensor:
    """Bool `[L, L]` (query, key): every token sees its own block and all earlier ones; the prompt is block 0."""
    blocks = [0 if i < prompt_length else 1 + (i - prompt_length) // block_size for i in range(length)]
    return torch.tensor([[key <= query for key in blocks] for query in blocks])


def load_plain_model(folder: str | Path) -> Callable[..., torch.Tensor]:
    """`logits_fn(ids, prompt_length=None, block_size=None)` of a LLaDA or Dream checkpoint folder.

    It gives `[L, V]`: block-causal with both options, with full attention without.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    weights = load_file(Path(folder) / "model.safetensors")
    if config["model_type"] == "llada":
        names = LLADA_NAMES
        sizes = (config["n_layers"], config["n_heads"], config["n_kv_heads"])
    else:
        names = DREAM_NAMES
        sizes = (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"])

    @torch.no_grad()
    def logits_fn(ids: list[int], prompt_length: int | None = None, block_size: int | None = None) -> torch.Tensor:
        if prompt_length is None or block_size is None:
            allowed = torch.ones(len(ids), len(ids), dtype=torch.bool)
        else:
            allowed = block_causal_mask(len(ids), prompt_length, block_size)
        return plain_forward(
            weights, names, torch.tensor(ids), allowed, *sizes, config["rope_theta"], config["rms_norm_eps"]
        )

    return logits_fn


def plain_forward(
    weights: dict[str, torch.Tensor],
    names: dict[str, str],
    ids: torch.Tensor,
    allowed: torch.Tensor,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    rope_theta: float,
    eps: float,
    positions: torch.Tensor | None = None,
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Logits `[L, V]` of the ids `[L]` under the mask `allowed` `[L, L]`.

    With `memory` the ids stand at `positions` `[L]` of a sequence of which it holds keys and values by layer. Theirs
    are replaced in it, and all of it is attended to. An empty one is filled.
    """
    positions = torch.arange(len(ids)) if positions is None else positions

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(len(x), count, -1).transpose(0, 1)  # [L, H D] -> [H, L, D]

    x = weights[names["embedding"]][ids]  # [L, hidden]
    head_size = len(weights[names["layer"].format(0) + names["q"] + ".weight"]) // n_heads
    frequencies = rope_theta ** (-torch.arange(0, head_size, 2) / head_size)  # [D / 2]
    angles = (positions[:, None] * frequencies).repeat(1, 2)  # [L, D]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    for layer in range(n_layers):

        def weight(part: str, layer: int = layer) -> torch.Tensor:
            return weights[names["layer"].format(layer) + names[part] + ".weight"]

        def linear(x: torch.Tensor, part: str, layer: int = layer) -> torch.Tensor:
            bias = weights.get(names["layer"].format(layer) + names[part] + ".bias")
            return F.linear(x, weight(part), bias)

        def normed(x: torch.Tensor, part: str, layer: int = layer) -> torch.Tensor:
            """The heads `[H, L, D]`, normed where the model does that."""
            weight = weights.get(names["layer"].format(layer) + f"self_attn.{part}_norm.weight")
            return x if weight is None else norm(x, weight)

        h = norm(x, weight("attention_norm"))
        q = rotate(normed(heads(linear(h, "q"), n_heads), "q"))  # [H, L, D]
        k = rotate(normed(heads(linear(h, "k"), n_kv_heads), "k"))  # [G, L, D]
        v = heads(linear(h, "v"), n_kv_heads)
        k, v = (t.repeat_interleave(n_heads // n_kv_heads, dim=0) for t in (k, v))  # [H, L, D]
        if memory is not None:
            for kept, new in zip(memory.setdefault(layer, (k.clone(), v.clone())), (k, v), strict=True):
                kept[:, positions] = new
            k, v = memory[layer]
        scores = (q @ k.transpose(1, 2) / head_size**0.5).masked_fill(~allowed, float("-inf"))  # [H, L, L]
        attention = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), -1)  # [L, H D]
        x = x + linear(attention, "o")
        h = norm(x, weight("mlp_norm"))
        x = x + linear(F.silu(linear(h, "gate")) * linear(h, "up"), "down")
    return F.linear(norm(x, weights[names["norm"]]), weights[names["head"]])
