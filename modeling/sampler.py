"""From logits to tokens: what each masked position becomes, how probable that is, and how it ranks.

A decoding loop is handed a [`Sampler`] and does not know what is in it: logits processors, greedy choice or sampling.
"""

# B rows of the response, V vocabulary, M masked tokens of all rows

import math
from typing import NamedTuple

import torch
from transformers.generation import LogitsProcessorList

from .generation_config_d2f import D2FGenerationConfig
from .logits_process_d2f import depends_on_previous_tokens, process_logits
from .response import Response

# float32 values of logits that are looked at at a time: on a CPU as many as stay in its cache.
SCORES_AT_A_TIME, SCORES_AT_A_TIME_ON_ACCELERATOR = 2**19, 2**23
NOT_FINITE = (
    "The model's logits hold NaN, or no token but infinite ones. Check the weights, the dtype (float16 overflows "
    "easily; bfloat16 does not) and the logits processors."
)


class Prediction(NamedTuple):
    """What is predicted for M masked tokens.

    Args:
        tokens (`torch.LongTensor` of shape `(M,)`): The predicted tokens. On the host, like the next two.
        probability (`torch.FloatTensor` of shape `(M,)`): Their probabilities, after the logits processors.
        ranking (`torch.FloatTensor` of shape `(M,)`): What orders them by `token_ranking`. The same tensor as
            `probability` where that is the ranking.
        scores (`torch.FloatTensor` of shape `(M, V)`, *optional*): What they were chosen from, on the model's device,
            if the response keeps scores.
    """

    tokens: torch.LongTensor
    probability: torch.FloatTensor
    ranking: torch.FloatTensor
    scores: torch.FloatTensor | None = None


class Sampler:
    """Chooses a token for each masked one.

    Args:
        generation_config (`D2FGenerationConfig`): With its defaults filled in.
        logits_processor (`LogitsProcessorList`): Applied to the logits of each masked token.
        generator (`torch.Generator`, *optional*): Source of randomness.
    """

    def __init__(
        self,
        generation_config: D2FGenerationConfig,
        logits_processor: LogitsProcessorList,
        generator: torch.Generator | None = None,
    ):
        self.logits_processor = logits_processor
        self.generator = generator
        self.do_sample: bool = bool(generation_config.do_sample)
        self.token_ranking: str = generation_config.token_ranking or "probability"
        if generation_config.acceptance_rule == "entropy_bound":
            self.token_ranking = "neg_entropy"
        # With remasking the question is also how probable tokens still are that are decoded already.
        self.keeps_decoded_tokens = bool(generation_config.remask_threshold)
        # With it, a token of a draft that is in the response already may be chosen without being the best one.
        self.tolerance: float = generation_config.verification_tolerance or 0.0
        # Whether a token can be chosen only once all before it are decoded. A list, so that each is told of.
        self.left_to_right = any([depends_on_previous_tokens(processor) for processor in logits_processor])

    def __call__(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response: Response
    ) -> Prediction:
        """Chooses from `logits` `(M, V)`, in float32 and after the logits processors.

        The vocabulary is wide, so float32 copies are made of a few rows at a time.

        Args:
            logits (`torch.Tensor` of shape `(M, V)`): Of the masked tokens, as they leave the model's head.
            row, index (`torch.LongTensor` of shape `(M,)`): Row of the response and position in it of each.
            response (`Response`): The tokens around them.

        Raises:
            ValueError: for logits that leave no choice.
        """
        if self.left_to_right:
            return self._choose_first(logits, row, index, response)
        return self._choose_all(logits, row, index, response)

    def _choose_first(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response: Response
    ) -> Prediction:
        """Chooses for the first masked token of each row only. The others have token 0 and probability 0."""
        is_first = torch.ones_like(row, dtype=torch.bool)
        is_first[1:] = row[1:] != row[:-1]  # tokens of a row are next to each other, in their order
        first = is_first.nonzero().squeeze(1)
        own = self._choose_all(logits[first.to(logits.device)], row[first], index[first], response)
        tokens, probability, ranking = (
            values.new_zeros(len(row)).index_copy_(0, first, values)
            for values in (own.tokens, own.probability, own.ranking)
        )
        scores = None
        if own.scores is not None:
            scores = own.scores.new_zeros(logits.shape).index_copy_(0, first.to(logits.device), own.scores)
        return Prediction(tokens, probability, ranking, scores)

    def _choose_all(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response: Response
    ) -> Prediction:
        at_a_time = SCORES_AT_A_TIME if logits.device.type == "cpu" else SCORES_AT_A_TIME_ON_ACCELERATOR
        # A processor that goes from left to right has to see all rows at once.
        if logits.numel() <= at_a_time or self.left_to_right:
            prediction = self.choose(logits, row, index, response)
        else:
            num_rows = max(1, at_a_time // logits.shape[1])
            parts = zip(logits.split(num_rows), row.split(num_rows), index.split(num_rows), strict=True)
            prediction = _concatenated([self.choose(*part, response) for part in parts])
        tokens, probability, ranking, scores = prediction
        if logits.device.type != "cpu":  # in one transfer; float32 holds every token id
            tokens, probability, ranking = torch.stack([tokens.float(), probability, ranking]).cpu()
            tokens = tokens.long()
        if not math.isfinite(probability.sum().item()):
            raise ValueError(NOT_FINITE)
        return Prediction(tokens, probability, ranking, scores)

    def choose(
        self, logits: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, response: Response
    ) -> Prediction:
        """Chooses from few enough `logits` `(M, V)` for one float32 copy. All of the result is on their device."""
        scores = logits.float()
        if scores is logits and "logits" in response.kept:
            scores = scores.clone()
        if len(self.logits_processor) > 0:
            # What they leave must not be the mask token alone.
            scores[:, response.mask_token_id] = -torch.inf
        if response.has_minimum:
            ends = response.early_eos(row, index, scores.shape[1]).to(scores.device)  # [M, E]
            is_early = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(is_early.scatter_(1, ends, True)[:, :-1], -torch.inf)
        scores = process_logits(scores, row, index, response, self.logits_processor)
        current_tokens = None
        if self.keeps_decoded_tokens:
            current_tokens = response.sequences[row, response.prompt_lengths[row] + index].to(scores.device)
        tokens, probability, ranking = sample_tokens(
            scores,
            self.do_sample,
            self.token_ranking,
            forbidden_token_id=response.mask_token_id,  # "not decoded yet" is not something to decode
            generator=self.generator,
            current_tokens=current_tokens,
        )
        if self.tolerance > 0.0:
            drafted = response.sequences[row, response.prompt_lengths[row] + index].to(scores.device)
            probabilities = scores.softmax(-1)
            share = probabilities.gather(-1, drafted[:, None]).squeeze(-1)  # the mask token, no draft, has 0
            is_good = share >= self.tolerance * probabilities.amax(-1)
            tokens, probability = drafted.where(is_good, tokens), share.where(is_good, probability)
        return Prediction(tokens, probability, ranking, scores if "scores" in response.kept else None)


def _concatenated(parts: list[Prediction]) -> Prediction:
    """The predictions of all parts, in their order."""
    tokens, probability, ranking = (torch.cat([part[i] for part in parts]) for i in range(3))
    scores = None if parts[0].scores is None else torch.cat([part.scores for part in parts])
    return Prediction(tokens, probability, ranking, scores)


def sample_tokens(
    scores: torch.FloatTensor,
    do_sample: bool,
    token_ranking: str,
    forbidden_token_id: int | None = None,
    generator: torch.Generator | None = None,
    current_tokens: torch.LongTensor | None = None,
) -> tuple[torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
    """A token for each row of `scores`, its probability, and its rank value, `(M,)` each.

    Args:
        scores (`torch.FloatTensor` of shape `(M, V)`): After the logits processors. The column of
            `forbidden_token_id` is -inf afterwards.
        do_sample (`bool`): Draw a token; otherwise take the most probable one.
        token_ranking (`str`): `"probability"`, `"neg_entropy"`, `"margin"` or `"random"`.
        forbidden_token_id (`int`, *optional*): A token that is not chosen. What the model gives to it counts in the
            probabilities of the others, as in the reference.
        generator (`torch.Generator`, *optional*): Source of randomness.
        current_tokens (`torch.LongTensor` of shape `(M,)`, *optional*): Tokens that are decoded already. They are
            kept; `forbidden_token_id` stands where there is none.
    """
    probabilities = scores.softmax(-1)
    if token_ranking == "neg_entropy":
        ranking = (probabilities * (probabilities + 1e-10).log()).sum(-1)
    elif token_ranking == "margin":
        top_two = probabilities.topk(2, dim=-1).values
        ranking = top_two[:, 0] - top_two[:, 1]
    elif token_ranking == "random":
        ranking = torch.rand(len(scores), generator=generator, device=scores.device)
    if forbidden_token_id is not None:
        scores.select(1, forbidden_token_id).fill_(-torch.inf)
    if do_sample:
        # What `torch.multinomial` does, without its check for NaN, which would hide where the NaN comes from.
        noise = torch.empty_like(probabilities).exponential_(generator=generator)
        tokens = _argmax((probabilities / noise).masked_fill_(scores == -torch.inf, -1.0))
    else:
        tokens = _argmax(scores)
    if current_tokens is not None:
        tokens = tokens.where((current_tokens == forbidden_token_id)[:, None], current_tokens[:, None])
    probability = probabilities.gather(-1, tokens).squeeze(-1)
    return tokens.squeeze(-1), probability, probability if token_ranking == "probability" else ranking


def _argmax(values: torch.FloatTensor) -> torch.LongTensor:
    """`values.argmax(-1, keepdim=True)` of `values` `(M, V)`."""
    num_rows, size = values.shape
    if values.device.type != "cpu" or size < 512 or size % 64 or values.numel() < 2**16:
        return values.max(-1, keepdim=True).indices
    # A CPU finds a largest value several times faster than its index: first that of 64 values each, then indices.
    groups = values.view(num_rows, -1, 64)
    group = groups.amax(-1).max(-1, keepdim=True).indices  # [M, 1]
    inner = groups.gather(1, group[..., None].expand(-1, -1, 64)).squeeze(1).max(-1, keepdim=True).indices
    return group * 64 + inner
