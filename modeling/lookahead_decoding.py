"""Pipelined decoding that looks ahead: LoPA's branches (arXiv 2512.16229) as further rows of the forward.

Each forward reads several variants of a live row, which try one more token each; decoding goes on with one of them.
What comes before and after is the pipelined loop. `acceptance_rules.py` has the rules.
"""

# B rows of the response, R its tokens, A live rows, n branches of each, R' response tokens that are looked at,
# V vocabulary, M masked tokens in the window, over all live rows

import copy

import torch

from .acceptance_rules import best_branch, lookahead_tokens
from .decoding_rules import spread
from .pipelined_decoding import PipelinedDecoder
from .response_d2f import Response


class LookAheadDecoder(PipelinedDecoder):
    """A [`PipelinedDecoder`] with `num_branches`.

    The cache has n rows for each live row, and all of them get what is final. As long as no row has anything to try,
    which is in their first forward, one each is enough: a prompt is read once. One that joins while others decode goes
    through it n times.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_branches: int = self.generation_config.num_branches or 1
        self.num_cache_rows = 1  # of each live row
        # The last predictions, `(M,)` each, and where that of a response token is among them; -1 where it has none.
        self.tokens, self.probability = torch.zeros(1, dtype=torch.long), torch.zeros(1)
        self.values: dict[str, torch.FloatTensor] = {}  # `(M, V)`: those that are kept
        self.place = torch.full((len(self.response.sequences), self.response.max_new_tokens), -1)  # [B, R]
        # What each branch tries besides the accepted tokens `(A, n, R')`, and what the one that goes on did `(A, R')`.
        self.tried, self.tried_by_winner = torch.zeros(0, 1, 0, dtype=torch.bool), torch.zeros(0, 0, dtype=torch.bool)

    def add_rows(self, rows: torch.LongTensor) -> None:
        super().add_rows(rows)
        self.place[rows] = -1

    def _forward(
        self, fed_from: torch.LongTensor, end: torch.LongTensor, row: torch.LongTensor, index: torch.LongTensor
    ) -> torch.Tensor:
        """Feeds all branches of the live rows: logits `(M, n, V)`."""
        num_rows, num_branches = len(self.live), self.num_branches
        if (self.joined == self.num_steps).all():
            num_branches = self.num_cache_rows = 1
        elif self.num_cache_rows == 1:
            self.num_cache_rows = num_branches
            sources = torch.arange(num_rows).repeat_interleave(num_branches)
            self.cache.move_rows(sources, torch.arange(len(sources)))

        shape = self.is_masked.shape  # [A, R']
        place = self.place[self.live[row], index]
        has_prediction = spread(place >= 0, row, index, shape)
        probability = spread(self.probability[place], row, index, shape)
        self.tried = lookahead_tokens(has_prediction[:, None], probability[:, None], num_branches).squeeze(2)

        branches = copy.copy(self)  # a decoder of the same cache whose live rows they are
        branches.response, branches.live = self._branches(), torch.arange(num_rows * num_branches)
        branches.prompt_lengths = branches.response.prompt_lengths
        fed_from, end = fed_from.repeat_interleave(num_branches), end.repeat_interleave(num_branches)
        logits = PipelinedDecoder._forward(branches, fed_from, end, *self._of_all_branches(row, index))
        return logits.unflatten(0, (num_branches, -1)).transpose(0, 1)

    def _predict(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response_row: torch.LongTensor
    ) -> tuple[torch.Tensor, torch.FloatTensor | None, torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
        """What the forward says of each token in the branch that goes on; a token that it tried is as it was tried."""
        num_rows, num_branches, length = self.tried.shape
        logits = logits.transpose(0, 1).flatten(0, 1)  # [n * M, V]
        branch_row, branch_index = self._of_all_branches(row, index)
        scores, tokens, probability, ranking = self.model._predict(
            logits,
            branch_row,
            branch_index,
            self._branches(),
            self.logits_processor,
            self.generation_config,
            self.generator,
        )

        is_masked, probability_of_branches = (
            spread(values, branch_row, branch_index, (num_rows * num_branches, length)).view(self.tried.shape)
            for values in (torch.ones_like(branch_row, dtype=torch.bool), probability)
        )
        winner = best_branch((is_masked & ~self.tried)[:, :, None], probability_of_branches[:, :, None])  # [A]
        self.tried_by_winner = self.tried[torch.arange(num_rows), winner]
        of_winner = winner[row] * len(row) + torch.arange(len(row))
        tokens, probability, ranking = tokens[of_winner], probability[of_winner], ranking[of_winner]
        values = {"scores": scores, "logits": logits}
        values = {name: values[name][of_winner.to(logits.device)] for name in self.response.kept}

        was_tried = self.tried_by_winner[row, index].nonzero().flatten()
        if len(was_tried) > 0:
            place = self.place[response_row[was_tried], index[was_tried]]
            tokens[was_tried] = self.tokens[place]
            for name, own in values.items():
                own[was_tried.to(own.device)] = self.values[name][place.to(own.device)]
        self.tokens, self.probability, self.values = tokens, probability, values
        self.place.fill_(-1)
        self.place[response_row, index] = torch.arange(len(row))
        return values.get("logits"), values.get("scores"), tokens, probability, ranking

    def _accept(self, has_prediction: torch.BoolTensor, row: torch.LongTensor, index: torch.LongTensor, *predictions):
        accepted = super()._accept(has_prediction & ~self.tried_by_winner, row, index, *predictions)
        return accepted | self.tried_by_winner[row, index]

    def _of_all_branches(
        self, row: torch.LongTensor, index: torch.LongTensor
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """Tokens `(M,)` of the live rows in all their branches, `(n * M,)`: those of all rows' first branch first."""
        num_branches = self.tried.shape[1]
        return (row * num_branches + torch.arange(num_branches)[:, None]).flatten(), index.repeat(num_branches)

    def _branches(self) -> Response:
        """The branches as rows of a response of their own, to be read: branch a of live row p is row p * n + a."""
        response, branches = self.response, copy.copy(self.response)
        response_row = self.live.repeat_interleave(self.tried.shape[1])
        branches.sequences, branches.prompt_lengths, branches.limits = (
            values[response_row] for values in (response.sequences, response.prompt_lengths, response.limits)
        )
        row, index = self.tried.flatten(0, 1).nonzero(as_tuple=True)
        tokens = self.tokens[self.place[response_row[row], index]]
        branches.sequences[row, branches.prompt_lengths[row] + index] = tokens
        return branches

    def _take_copies_apart(self, row: torch.LongTensor, index: torch.LongTensor, logits: torch.Tensor):
        source, *tokens = super()._take_copies_apart(row, index, logits)
        self.tried = self.tried[source]
        return source, *tokens

    def _move_rows(self, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        branch = torch.arange(self.num_cache_rows)
        sources, targets = ((rows[:, None] * len(branch) + branch).flatten() for rows in (sources, targets))
        super()._move_rows(sources, targets)
