"""The state of decoding: the tokens of a batch, of which some are still masked."""

# B batch, R response tokens (the limit), P prompt tokens, M tokens, V vocabulary

import torch
from torch.nn import functional as F
from transformers.generation import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .decoding_rules import first_index
from .generation_config_d2f import D2FGenerationConfig, D2FGenerationOutput


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
        self.prompt_lengths = prompt_lengths
        self.prompt_width = prompts.shape[1]
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens
        self.mask_token_id = mask_token_id
        self.eos_token_ids = eos_token_ids
        self.stopping_criteria = stopping_criteria
        self.streamer = streamer
        self.slots = prompt_lengths[:, None] + torch.arange(max_new_tokens, device=prompts.device)  # [B, R]
        self.sequences = F.pad(prompts, (0, max_new_tokens), value=mask_token_id)
        self.sequences.scatter_(1, self.slots, mask_token_id)
        self.stopped_at = torch.full_like(prompt_lengths, max_new_tokens)  # by a stopping criterion
        self.kept: dict[str, torch.FloatTensor | None] = dict.fromkeys(keep)  # [B, R, V] each, once there is one
        self.published = [0] * len(prompt_lengths)  # tokens that criteria and streamer know

    def tokens(self) -> torch.LongTensor:
        """The response tokens, `(B, R)`."""
        return self.sequences.gather(1, self.slots)

    def is_masked(self) -> torch.BoolTensor:
        """Which response tokens, `(B, R)`, are not decoded."""
        return self.tokens() == self.mask_token_id

    def end_of_text(self) -> torch.LongTensor:
        """Index of the first decoded EOS of each row, `(B,)`, R where there is none."""
        if self.eos_token_ids is None:
            return torch.full_like(self.prompt_lengths, self.max_new_tokens)
        return first_index(torch.isin(self.tokens(), self.eos_token_ids))

    def is_finished(self, is_masked: torch.BoolTensor, end_of_text: torch.LongTensor) -> torch.BoolTensor:
        """Which rows, `(B,)`, have everything decoded up to their first EOS, the limit, or where they were stopped.

        From the results of the methods of these names, of which the loop needs both.
        """
        return first_index(is_masked) >= torch.minimum(end_of_text, self.stopped_at)

    def is_stopped(self) -> torch.BoolTensor:
        """Which rows, `(B,)`, a stopping criterion has ended."""
        return self.stopped_at < self.max_new_tokens

    def prefix_length(self) -> torch.LongTensor:
        """How many response tokens of each row, `(B,)`, are decoded without a gap, up to and including an EOS."""
        return torch.minimum(first_index(self.is_masked()), self.end_of_text() + 1).clamp(max=self.max_new_tokens)

    def accept(
        self,
        accepted: torch.BoolTensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        tokens: torch.LongTensor,
        **values: torch.Tensor,
    ) -> None:
        """Puts the `accepted` of `tokens`, `(M,)` each, at places `index` of the responses of `row`.

        Their `scores` and `logits`, `values` of shape `(M, V)`, are kept as far as they are asked for.
        """
        row, index = row[accepted], index[accepted]
        self.sequences[row, self.prompt_lengths[row] + index] = tokens[accepted]
        for name in self.kept:
            own = values[name][accepted].float()
            if self.kept[name] is None:
                self.kept[name] = own.new_zeros(len(self.sequences), self.max_new_tokens, own.shape[-1])
            self.kept[name][row, index] = own

    def publish(self, shown: torch.LongTensor) -> None:
        """Tells stopping criteria and streamer what is new; drafts reach to `shown` `(B,)` tokens or an EOS."""
        if self.streamer is None and len(self.stopping_criteria) == 0:
            return
        shown = torch.minimum(shown, self.end_of_text() + 1)
        for b, decoded in enumerate(self.prefix_length().tolist()):
            begin = int(self.prompt_lengths[b])
            decoded = min(decoded, int(self.stopped_at[b]))
            if any(
                isinstance(c, MaxTimeCriteria) and c(self.sequences[b : b + 1], None).any()
                for c in self.stopping_criteria
            ):
                self.stopped_at[b] = decoded  # whether or not there is a new token
            for length in range(self.published[b] + 1, decoded + 1):
                if (
                    len(self.stopping_criteria)
                    and self.stopping_criteria(self.sequences[b : b + 1, : begin + length], None).any()
                ):
                    self.stopped_at[b] = decoded = length
                    break
            if self.streamer is not None:
                if decoded > self.published[b]:
                    self.streamer.put(self.sequences[b, begin + self.published[b] : begin + decoded].cpu())
                if hasattr(self.streamer, "put_draft") and decoded < min(int(shown[b]), int(self.stopped_at[b])):
                    self.streamer.put_draft(self.sequences[b, begin + decoded : begin + int(shown[b])].cpu())
            self.published[b] = decoded

    def output(
        self,
        input_ids: torch.LongTensor,
        num_forward_passes: torch.LongTensor,
        trace: list | None,
        generation_config: D2FGenerationConfig,
    ) -> torch.LongTensor | D2FGenerationOutput:
        """Prompts as they were given, responses cut at their end and padded."""
        lengths = torch.minimum(self.end_of_text() + 1, self.stopped_at)  # [B]
        is_response = torch.arange(self.max_new_tokens, device=lengths.device) < lengths[:, None]
        pad_token_id = generation_config._pad_token_tensor
        if pad_token_id is None:
            if (lengths != lengths[0]).any():
                raise ValueError("`pad_token_id` must be set when rows of a batch end at different lengths.")
            pad_token_id = 0
        responses = torch.where(is_response, self.tokens(), pad_token_id)[:, : int(lengths.max())]
        sequences = torch.cat([input_ids, responses], dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        return D2FGenerationOutput(
            sequences=sequences,
            num_forward_passes=num_forward_passes,
            tokens_per_forward=lengths / num_forward_passes,
            trace=trace,
            **{name: self._per_token(values, is_response) for name, values in self.kept.items()},
        )

    @staticmethod
    def _per_token(values: torch.FloatTensor | None, is_response: torch.BoolTensor) -> tuple[torch.FloatTensor, ...]:
        """`values` `(B, R, V)` as transformers has them: one tensor `(B, V)` per token, 0 behind the end of a row."""
        if values is None:
            return ()
        length = int(is_response.sum(-1).max())
        return tuple(values.where(is_response[..., None], 0.0)[:, :length].unbind(1))
