"""Pipelined decoding that looks ahead (experimental): LoPA's branches, arXiv 2512.16229, as further rows.

Each forward reads several variants of a live row, which try one more token each; decoding goes on with one of them.
What comes before and after is the pipelined loop. The rules are at the end of this file.
"""

# B rows of the response, R its tokens, A live rows, n branches of each, R' response tokens that are looked at, N
# blocks, K block size, V vocabulary, M tokens of the window that have logits, over all live rows

import torch

from .decoding_rules import scatter_rows
from .pipelined_decoding import PipelinedDecoder
from .response import Response
from .sampler import Prediction


class LookAheadDecoder(PipelinedDecoder):
    """A [`PipelinedDecoder`] with `num_branches`.

    The cache has n rows for each live row, and all of them get what is final. As long as no row has anything to try,
    which is in their first forward, one each is enough: a prompt is read once. One that joins while others decode goes
    through it n times.

    It replaces four parts of a step: the forward reads all branches, the prediction is that of the best branch, what
    that branch tried is accepted, and rows of the cache are moved n at a time.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_branches: int = self.generation_config.num_branches or 1
        self.num_cache_rows = 1  # of each live row
        # The last predictions, `(M,)` each, and where that of a response token is among them; -1 where it has none.
        self.tokens = torch.zeros(1, dtype=torch.long, device="cpu")
        self.probability = torch.zeros(1, dtype=torch.float, device="cpu")
        self.values: dict[str, torch.FloatTensor] = {}  # `(M, V)`: those that are kept
        shape = (len(self.response.sequences), len(self.position))
        self.prediction_index = torch.full(shape, -1, device="cpu")
        # What each branch tries besides the accepted tokens `(A, n, R')`, and what the one that goes on did `(A, R')`.
        self.tried = torch.zeros(0, 1, 0, dtype=torch.bool, device="cpu")
        self.tried_by_winner = torch.zeros(0, 0, dtype=torch.bool, device="cpu")

    def add_rows(self, rows: torch.LongTensor) -> None:
        super().add_rows(rows)
        self.prediction_index[rows] = -1

    def _forward(
        self, start: torch.LongTensor, end: torch.LongTensor, row: torch.LongTensor, index: torch.LongTensor
    ) -> torch.Tensor:
        """Feeds all branches of the live rows: logits `(M, n, V)`."""
        num_rows, num_branches = len(self.live), self.num_branches
        if (self.joined_at_step == self.num_steps).all():
            num_branches = self.num_cache_rows = 1
        elif self.num_cache_rows == 1:
            self.num_cache_rows = num_branches
            sources = torch.arange(num_rows, device="cpu").repeat_interleave(num_branches)
            self.cache.move_rows(sources, torch.arange(len(sources), device="cpu"))

        shape = self.is_masked.shape  # [A, R']
        prediction_index = self.prediction_index[self.live[row], index]
        has_prediction = scatter_rows(prediction_index >= 0, row, index, shape)
        probability = scatter_rows(self.probability[prediction_index], row, index, shape)
        self.tried = lookahead_tokens(has_prediction[:, None], probability[:, None], num_branches).squeeze(2)

        branches = self._branches()
        rows = torch.arange(num_rows * num_branches, device="cpu")
        start, end = start.repeat_interleave(num_branches), end.repeat_interleave(num_branches)
        row, index = self._of_all_branches(row, index)
        starts = self.grid.starts.repeat_interleave(num_branches)
        logits = self.feed(branches.sequences, rows, starts, start, end, row, index)
        return logits.unflatten(0, (num_branches, -1)).transpose(0, 1)

    def _predict(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response_row: torch.LongTensor
    ) -> tuple[torch.Tensor | None, Prediction]:
        """What the forward says of each token in the branch that goes on; a token that it tried is as it was tried."""
        num_rows, num_branches, length = self.tried.shape
        logits = logits.transpose(0, 1).flatten(0, 1)  # [n * M, V]
        branch_row, branch_index = self._of_all_branches(row, index)
        index_in_response = self.index_in_response(row, index).repeat(num_branches)
        tokens, probability, ranking, scores = self.sampler(logits, branch_row, index_in_response, self._branches())

        is_masked, probability_of_branches = (
            scatter_rows(values, branch_row, branch_index, (num_rows * num_branches, length)).view(self.tried.shape)
            for values in (torch.ones_like(branch_row, dtype=torch.bool), probability)
        )
        winner = best_branch((is_masked & ~self.tried)[:, :, None], probability_of_branches[:, :, None])  # [A]
        self.tried_by_winner = self.tried[torch.arange(num_rows, device="cpu"), winner]
        of_winner = winner[row] * len(row) + torch.arange(len(row), device="cpu")
        tokens, probability, ranking = tokens[of_winner], probability[of_winner], ranking[of_winner]
        values = {"scores": scores, "logits": logits}
        values = {name: values[name][of_winner.to(logits.device)] for name in self.response.kept}

        was_tried = self.tried_by_winner[row, index].nonzero().flatten()
        if len(was_tried) > 0:
            before = self.prediction_index[response_row[was_tried], index[was_tried]]
            tokens[was_tried] = self.tokens[before]
            for name, own in values.items():
                own[was_tried.to(own.device)] = self.values[name][before.to(own.device)]
        self.tokens, self.probability, self.values = tokens, probability, values
        self.prediction_index.fill_(-1)
        self.prediction_index[response_row, index] = torch.arange(len(row), device="cpu")
        return values.get("logits"), Prediction(tokens, probability, ranking, values.get("scores"))

    def _accept(
        self,
        has_prediction: torch.BoolTensor,
        has_logits: torch.BoolTensor,
        prediction: Prediction,
        is_fully_activated: torch.BoolTensor,
    ) -> torch.BoolTensor:
        has_prediction = has_prediction & ~self.tried_by_winner
        accepted = super()._accept(has_prediction, has_logits, prediction, is_fully_activated)
        return accepted[:, : has_prediction.shape[1]] | self.tried_by_winner

    def _of_all_branches(
        self, row: torch.LongTensor, index: torch.LongTensor
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Tokens `(M,)` of the live rows in all their branches, `(n * M,)`: those of all rows' first branch first."""
        num_branches = self.tried.shape[1]
        branch = torch.arange(num_branches, device="cpu")[:, None]
        return (row * num_branches + branch).flatten(), index.repeat(num_branches)

    def _branches(self) -> Response:
        """The branches as rows of a response of their own, to be read: branch a of live row p is row p * n + a."""
        response_row = self.live.repeat_interleave(self.tried.shape[1])
        branches = self.response.of_rows(response_row)
        row, index = self.tried.flatten(0, 1).nonzero(as_tuple=True)
        starts = self.grid.starts.repeat_interleave(self.tried.shape[1])
        tokens = self.tokens[self.prediction_index[response_row[row], index]]
        branches.sequences[row, starts[row] + index] = tokens
        return branches

    def _split_shared_rows(self, row: torch.LongTensor, index: torch.LongTensor, logits: torch.Tensor):
        source, *tokens = super()._split_shared_rows(row, index, logits)
        self.tried = self.tried[source]
        return source, *tokens

    def _move_rows(self, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        branch = torch.arange(self.num_cache_rows, device="cpu")
        sources, targets = ((rows[:, None] * len(branch) + branch).flatten() for rows in (sources, targets))
        super()._move_rows(sources, targets)


def lookahead_tokens(
    is_masked: torch.BoolTensor, probability: torch.FloatTensor, num_branches: int
) -> torch.BoolTensor:
    """Which tokens each branch of the next forward reads besides the accepted ones (LoPA, arXiv 2512.16229).

    Branch 0 is the anchor and reads none. Branch a reads one more: that with the a-th highest probability of those
    that the row has not accepted. A branch that finds none left is the anchor once more.

    Args:
        is_masked (`torch.BoolTensor` of shape `(A, N, K)`): Masked tokens of open blocks that have a prediction.
        probability (`torch.FloatTensor` of shape `(A, N, K)`): Their probabilities. Of equal ones the earlier token
            comes first.
        num_branches (`int`): n, with the anchor.

    Returns:
        `torch.BoolTensor` of shape `(A, n, N, K)`.
    """
    flat = probability.masked_fill(~is_masked, -torch.inf).flatten(1)  # [A, N * K]
    order = flat.argsort(dim=-1, descending=True, stable=True)[:, : num_branches - 1]
    # Branch a, from 1 on, gets element a - 1 of the order.
    tried = is_masked.new_zeros(len(flat), num_branches, flat.shape[1])
    tried[:, 1 : 1 + order.shape[1]].scatter_(-1, order[..., None], True)
    return tried.view(len(flat), num_branches, *is_masked.shape[1:]) & is_masked[:, None]


def best_branch(is_masked: torch.BoolTensor, probability: torch.FloatTensor) -> torch.LongTensor:
    """The branch of each row, `(A,)`, with which decoding goes on (LoPA, arXiv 2512.16229).

    That whose remaining masked tokens have the highest mean probability, because most of them can be accepted soon;
    one that has none left has 1. Of equal ones the first, so the anchor before all.

    Departure: the mean over all remaining tokens is the paper's definition. Its released code averages the lower half
    and mixes in the probability of the token that the branch tried.

    Args:
        is_masked (`torch.BoolTensor` of shape `(A, n, N, K)`): Tokens that are masked in the branch and have a
            prediction.
        probability (`torch.FloatTensor` of shape `(A, n, N, K)`): Their probabilities.
    """
    num_masked = is_masked.flatten(2).sum(-1)  # [A, n]
    total = probability.where(is_masked, 0.0).flatten(2).sum(-1)
    confidence = torch.where(num_masked == 0, 1.0, total / num_masked.clamp(min=1))
    is_best = confidence == confidence.max(-1, keepdim=True).values
    return is_best.long().argmax(-1)
