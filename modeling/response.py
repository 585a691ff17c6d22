"""The state of decoding: the tokens of a batch, of which some are still masked.

It lives in the host's memory. The host has to see what was accepted anyway, to compose the next window, and there each
rule costs microseconds, not a kernel launch: a step of decoding waits for the accelerator once.
"""

# B rows, R response tokens (the limit), P prompt tokens, A rows that are looked at, M tokens, V vocabulary

import torch
from torch.nn import functional as F
from transformers.generation import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .decoding_rules import first_index
from .generation_config_d2f import D2FGenerationConfig, D2FGenerationOutput

NO_TOKEN = -1  # behind the limit of a row


class Response:
    """The tokens of a batch while it is decoded, and what has been said about them to streamers and stopping criteria.

    Args:
        prompts (`torch.LongTensor` of shape `(B, P)`): Prompts from position 0; behind a shorter one anything.
        prompt_lengths (`torch.LongTensor` of shape `(B,)`): Their lengths.
        max_new_tokens (`int`): R, response tokens at the most.
        min_new_tokens (`int`): Response tokens before the first EOS at the least.
        mask_token_id (`int`): Stands for a token that is not decoded.
        eos_token_ids (`torch.LongTensor`, *optional*): Tokens that end a response.
        stopping_criteria (`StoppingCriteriaList`): Asked about each decoded token once all before it are decoded.
        streamer (`BaseStreamer`, *optional*): Gets the same tokens, and drafts of what follows if it takes them.
        keep (`tuple[str]`): `"scores"` and `"logits"`: which of them to keep for each token.
    """

    def __init__(
        self,
        prompts: torch.LongTensor,
        prompt_lengths: torch.LongTensor,
        max_new_tokens: int,
        min_new_tokens: int,
        mask_token_id: int,
        eos_token_ids: torch.LongTensor | None,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        keep: tuple[str, ...] = (),
    ):
        self.device = prompts.device  # of the model's input, and of what streamers, criteria and callers get
        prompts, prompt_lengths = prompts.cpu(), prompt_lengths.cpu()
        self.prompt_lengths = prompt_lengths
        self.prompt_width = prompts.shape[1]
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens
        self.mask_token_id = mask_token_id
        self.eos_token_ids = [] if eos_token_ids is None else eos_token_ids.tolist()
        self.stopping_criteria = stopping_criteria
        self.streamer = streamer
        self.limits = torch.full_like(prompt_lengths, max_new_tokens)  # of each row, R or less
        self.sequences = F.pad(prompts, (0, max_new_tokens), value=mask_token_id)
        self.sequences.scatter_(1, prompt_lengths[:, None] + torch.arange(max_new_tokens), mask_token_id)
        self.stopped_at = self.limits.clone()  # by a stopping criterion
        self.was_remasked = torch.zeros(len(prompt_lengths), max_new_tokens, dtype=torch.bool)
        self.kept: dict[str, torch.FloatTensor | None] = dict.fromkeys(keep)  # [B, R, V] each, once there is one
        self.published = [0] * len(prompt_lengths)  # tokens that criteria and streamer know

    def replace_rows(self, rows: torch.LongTensor, prompts: list[torch.LongTensor], limits: torch.LongTensor) -> None:
        """Puts new prompts, `(L,)` each and at most P long, and their limits in the place of ended `rows`."""
        for row, prompt, limit in zip(rows.tolist(), prompts, limits.tolist(), strict=True):
            self.sequences[row] = NO_TOKEN
            self.sequences[row, : len(prompt)] = prompt
            self.sequences[row, len(prompt) : len(prompt) + limit] = self.mask_token_id
            self.prompt_lengths[row] = len(prompt)
            self.limits[row] = self.stopped_at[row] = limit
            self.published[row] = 0
            self.was_remasked[row] = False

    def tokens(self, rows: torch.LongTensor | None = None, length: int | None = None) -> torch.LongTensor:
        """The first `length` response tokens of `rows` (all), `(A, length)`."""
        sequences, prompt_lengths = self.sequences, self.prompt_lengths
        if rows is not None:
            sequences, prompt_lengths = sequences[rows], prompt_lengths[rows]
        slots = prompt_lengths[:, None] + torch.arange(self.max_new_tokens if length is None else length)
        return sequences.gather(1, slots)

    def is_masked(self) -> torch.BoolTensor:
        """Which response tokens, `(B, R)`, are not decoded."""
        return self.tokens() == self.mask_token_id

    def is_eos(self, tokens: torch.LongTensor) -> torch.BoolTensor:
        """Which of `tokens`, of any shape, are EOS."""
        if len(self.eos_token_ids) == 1:
            return tokens == self.eos_token_ids[0]
        is_eos = torch.zeros_like(tokens, dtype=torch.bool)
        for token_id in self.eos_token_ids:
            is_eos |= tokens == token_id
        return is_eos

    def first_eos(self) -> torch.LongTensor:
        """Index of the first decoded EOS of each row, `(B,)`, its limit where there is none."""
        return torch.minimum(first_index(self.is_eos(self.tokens())), self.limits)

    def is_stopped(self) -> torch.BoolTensor:
        """Which rows, `(B,)`, a stopping criterion has ended."""
        return self.stopped_at < self.limits

    def prefix_length(self) -> torch.LongTensor:
        """How many response tokens of each row, `(B,)`, are decoded without a gap, up to and including an EOS."""
        end = torch.minimum(self.first_eos() + 1, self.limits)
        return torch.minimum(first_index(self.is_masked()), end)

    def lengths(self) -> torch.LongTensor:
        """The lengths of ended responses, `(B,)`: up to and including their EOS, or where they were stopped."""
        return torch.minimum(self.first_eos() + 1, self.stopped_at)

    def accept(
        self,
        accepted: torch.BoolTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        tokens: torch.LongTensor,
        **values: torch.Tensor | None,
    ) -> None:
        """Puts the `accepted` of `tokens`, `(M,)` each, at places `index` of the responses of `row`.

        Their `scores` and `logits`, `values` of shape `(M, V)`, are kept as far as they are asked for.
        """
        chosen = accepted.nonzero().squeeze(1)
        row, index = row[chosen], index[chosen]
        self.sequences[row, self.prompt_lengths[row] + index] = tokens[chosen]
        for name in self.kept:
            own = values[name][chosen.to(self.device)].float()
            if self.kept[name] is None:
                self.kept[name] = own.new_zeros(len(self.sequences), self.max_new_tokens, own.shape[-1])
            self.kept[name][row.to(self.device), index.to(self.device)] = own

    def remask(self, row: torch.LongTensor, index: torch.LongTensor) -> None:
        """Takes the tokens at places `index` of the responses of `row` back, `(M,)` each."""
        self.sequences[row, self.prompt_lengths[row] + index] = self.mask_token_id
        self.was_remasked[row, index] = True

    @property
    def has_listeners(self) -> bool:
        """Whether anybody wants to know what is new before all is decoded."""
        return self.streamer is not None or len(self.stopping_criteria) > 0

    def publish(self, shown: torch.LongTensor, block_size: int = 1) -> None:
        """Tells stopping criteria and streamer what is new; drafts reach to `shown` `(B,)` tokens or an EOS.

        Where a token can be taken back as long as its block of `block_size` is not decoded, whole blocks are told.
        """
        if not self.has_listeners:
            return
        end_of_text, prefix_length = self.first_eos(), self.prefix_length()
        shown = torch.minimum(shown, end_of_text + 1)
        if block_size > 1:
            is_whole = prefix_length == torch.minimum(end_of_text + 1, self.limits)
            prefix_length -= (prefix_length % block_size).masked_fill(is_whole, 0)
        for b, decoded in enumerate(prefix_length.tolist()):
            begin = int(self.prompt_lengths[b])
            decoded = min(decoded, int(self.stopped_at[b]))
            sequence = self.sequences[b : b + 1].clone().to(self.device)
            if any(isinstance(c, MaxTimeCriteria) and c(sequence, None).any() for c in self.stopping_criteria):
                self.stopped_at[b] = decoded  # whether or not there is a new token
            for length in range(self.published[b] + 1, decoded + 1):
                if len(self.stopping_criteria) and self.stopping_criteria(sequence[:, : begin + length], None).any():
                    self.stopped_at[b] = decoded = length
                    break
            if self.streamer is not None:
                if decoded > self.published[b]:
                    self.streamer.put(self.sequences[b, begin + self.published[b] : begin + decoded].clone())
                if hasattr(self.streamer, "put_draft") and decoded < min(int(shown[b]), int(self.stopped_at[b])):
                    self.streamer.put_draft(self.sequences[b, begin + decoded : begin + int(shown[b])].clone())
            self.published[b] = decoded

    def output(
        self,
        input_ids: torch.LongTensor,
        num_forward_passes: torch.LongTensor,
        trace: list | None,
        generation_config: D2FGenerationConfig,
    ) -> torch.LongTensor | D2FGenerationOutput:
        """Prompts as they were given, responses cut at their end and padded."""
        lengths = self.lengths()  # [B]
        is_response = torch.arange(self.max_new_tokens) < lengths[:, None]
        pad_token_id = generation_config._pad_token_tensor
        if pad_token_id is None:
            if (lengths != lengths[0]).any():
                raise ValueError("`pad_token_id` must be set when rows of a batch end at different lengths.")
            pad_token_id = 0
        responses = self.tokens().masked_fill(~is_response, int(pad_token_id))[:, : int(lengths.max())]
        sequences = torch.cat([input_ids, responses.to(self.device)], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return D2FGenerationOutput(
            sequences=sequences,
            num_forward_passes=num_forward_passes.clone().to(self.device),
            tokens_per_forward=(lengths / num_forward_passes).to(self.device),
            trace=trace,
            **{name: self._per_token(values, is_response) for name, values in self.kept.items()},
        )

    def _per_token(
        self, values: torch.FloatTensor | None, is_response: torch.BoolTensor
    ) -> tuple[torch.FloatTensor, ...]:
        """`values` `(B, R, V)` as transformers has them: one tensor `(B, V)` per token, 0 behind the end of a row."""
        if values is None:
            return ()
        length = int(is_response.sum(-1).max())
        return tuple(values.where(is_response.to(self.device)[..., None], 0.0)[:, :length].unbind(1))
