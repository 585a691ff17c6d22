"""Which predicted tokens a step of pipelined decoding accepts: the rules, and what they remember of live rows."""

# A live rows, R' response tokens that are looked at, N blocks of them, K block size

from typing import Any

import torch

from .acceptance_rules import Credit, accept, first_tokens_alone, first_unfinished_sub_blocks, required_tokens
from .decoding_rules import as_blocks, scatter_where
from .generation_config_d2f import D2FGenerationConfig
from .sampler import Prediction


class TokenAcceptance:
    """Applies the acceptance rule of a generation config to the live rows.

    Args:
        generation_config (`D2FGenerationConfig`): With its defaults filled in.
        block_size (`int`): K.
        num_blocks (`int`): The most blocks of a row.
    """

    def __init__(self, generation_config: D2FGenerationConfig, block_size: int, num_blocks: int):
        self.generation_config = generation_config
        self.block_size = block_size
        self.options = generation_config.acceptance_options()
        self.steps_per_block: int | None = self.options.pop("steps_per_block", None)
        self.credit: Credit | None = None  # of acceptance_rule="credit", `(A, N, K)`
        # Steps in which a block had to accept, for `steps_per_block`.
        self.num_steps = torch.zeros(0, num_blocks, dtype=torch.long, device="cpu")

    def keep_rows(self, kept: torch.LongTensor, num_new: int) -> None:
        """Keeps what is remembered of the live rows `kept`, in that order; behind them come `num_new` rows."""
        if self.credit is not None:
            self.credit = self.credit.select(kept, num_new)
        if self.steps_per_block is not None:
            new = self.num_steps.new_zeros(num_new, self.num_steps.shape[1])
            self.num_steps = torch.cat([self.num_steps.index_select(0, kept), new])

    def __call__(
        self,
        has_prediction: torch.BoolTensor,
        has_logits: torch.BoolTensor,
        prediction: Prediction,
        is_fully_activated: torch.BoolTensor,
        row_options: dict[str, torch.Tensor],
    ) -> torch.BoolTensor:
        """Which tokens, `(A, R')` or up to a whole block more, are accepted: only those that `has_prediction` can be.

        Args:
            has_prediction (`torch.BoolTensor` of shape `(A, R')`): Masked tokens of open blocks.
            has_logits (`torch.BoolTensor` of shape `(A, R')`): The tokens that `prediction` is about.
            prediction (`Prediction`): What the sampler says of them.
            is_fully_activated (`torch.BoolTensor` of shape `(A, N)`): Blocks that accept at least one token.
            row_options (`dict[str, torch.Tensor]`): Options that have a value for each live row, `(A,)`.
        """
        block_size, config, options = self.block_size, self.generation_config, self.options
        is_candidate = as_blocks(has_prediction, block_size)  # [A, N, K]
        if config.sub_block_size is not None:
            is_candidate = first_unfinished_sub_blocks(is_candidate, config.sub_block_size)
        if config.first_token_alone:
            one_at_a_time = row_options["block_add_threshold"] >= 1.0
            is_candidate = first_tokens_alone(is_candidate, one_at_a_time)
        probability = as_blocks(scatter_where(prediction.probability, has_logits), block_size)
        ranking = probability
        if prediction.ranking is not prediction.probability:
            ranking = as_blocks(scatter_where(prediction.ranking, has_logits), block_size)
        tokens = None
        if config.acceptance_rule == "credit":
            tokens = as_blocks(scatter_where(prediction.tokens, has_logits), block_size)
        arguments: dict[str, Any] = dict(options)
        if "confidence_threshold" in options:
            arguments["confidence_threshold"] = row_options["confidence_threshold"][:, None, None]
        if self.steps_per_block is not None:
            num_blocks = is_candidate.shape[1]
            taken = self.num_steps[:, :num_blocks]
            arguments["num_required"] = required_tokens(taken, config.block_size, self.steps_per_block)
            self.num_steps[:, :num_blocks] += is_fully_activated & is_candidate.any(-1)
        accepted, self.credit = accept(
            is_candidate, tokens, probability, ranking, is_fully_activated, credit=self.credit, **arguments
        )
        return accepted.flatten(1)
