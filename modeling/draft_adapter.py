"""The gated adapter of verified decoding: low-rank terms that act at the masks of a draft, and nowhere else.

A token of the text is computed by the model's own weights alone, so under a causal mask the model stays the
autoregressive one that it was. Only the masks, whose predictions are the draft, see the adapter.
"""

# B batch, L sequence, R rank, D width of the hidden states

from typing import Any

import torch
from torch import nn

DEFAULT_RANK = 64


class DraftAdapter(nn.Module):
    """What is added, at the masks of a draft, to projections that read the same input.

    The parameters are tensors of this module rather than layers, so that nothing takes them for projections of the
    model: neither an adapter on all linear layers, nor quantised weights.

    Args:
        drafter (`dict`): `rank` R, and `alpha`: the terms are multiplied by `alpha / rank`.
        in_features (`int`): Width of the input.
        out_features (`tuple[int]`): Widths of the outputs of the projections.
    """

    def __init__(self, drafter: dict[str, Any], in_features: int, out_features: tuple[int, ...]):
        super().__init__()
        rank = drafter["rank"]
        self.scaling = drafter.get("alpha", rank) / rank
        self.out_features = out_features
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.empty(sum(out_features), rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As LoRA begins: the terms are zero until they are trained."""
        nn.init.kaiming_uniform_(self.down, a=5**0.5)
        nn.init.zeros_(self.up)

    def forward(
        self, outputs: tuple[torch.Tensor, ...], x: torch.Tensor, draft_gate: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The `outputs` `(B, L, ...)` of the projections of `x` `(B, L, D)`, with the terms where the gate is 1.

        Args:
            draft_gate (`torch.Tensor` of shape `(B, L, 1)`): 1 at the masks of a draft, 0 elsewhere.
        """
        reduced = nn.functional.linear(x, self.down) * (draft_gate * self.scaling)  # [B, L, R]
        terms = nn.functional.linear(reduced, self.up).split(self.out_features, dim=-1)
        return tuple(output + term for output, term in zip(outputs, terms, strict=True))
