"""Decoding of block-diffusion models in `model.generate()`: pipelined (D2F) and one block after the other (vanilla).

The pipelined loop is Algorithm 2 of arXiv 2508.09192, for a batch whose rows go at their own pace. One truth is kept:
the tokens, of which some are still masked. Decoded ratios, activation, what is final and what can be committed follow
from it in each step.
"""

# B batch, R response tokens (the limit), N blocks, K block size, W window, S key/value slots, V vocabulary,
# M masked tokens in the window, over all rows

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging

from .block_causal import block_causal_mask, predicting_positions
from .cache_d2f import D2FCache

logger = logging.get_logger(__name__)

DECODING_MODES = ("d2f", "vanilla")
TOKEN_RANKINGS = ("probability", "neg_entropy", "margin")
DEFAULT_MAX_NEW_TOKENS = 256
NOT_FINITE = (
    "The model's logits hold NaN, or no token but infinite ones. Check the weights, the dtype (float16 overflows "
    "easily; bfloat16 does not) and the logits processors."
)


class D2FGenerationConfig(GenerationConfig):
    """Generation parameters of a block-diffusion model: those of `GenerationConfig`, and the following.

    Each can be given here, as a keyword of `generate`, or in `generation_config.json`. What is `None` here comes from
    the model's own generation config.

    Args:
        decoding (`str`, *optional*): `"d2f"`, pipelined parallel decoding (default), or `"vanilla"`, the sampler of
            the original bidirectional model, which is slow but needs no distillation.
        block_size (`int`, *optional*): Tokens per response block; the model's `config.block_size` by default.
        block_add_threshold (`float`, *optional*): tau_add. A new block is opened when the decoded ratio of the last
            one reaches it (default 0.1). 1.0 decodes block by block.
        block_activation_threshold (`float`, *optional*): tau_act. A block is fully activated, and from then on accepts
            at least one token per step, when the decoded ratio of the block before it reaches it (default 0.95).
        confidence_threshold (`float`, *optional*): tau_conf. A token is accepted when its probability, after the
            logits processors, is above it (default 0.9). Higher is more careful. DiffusionGemma's parameter of this
            name is a bound on the entropy, where lower is more careful.
        token_ranking (`str`, *optional*): What ranks the token that a fully activated block must accept if none is
            above `confidence_threshold`: `"probability"` (default), `"neg_entropy"`, or `"margin"` between the best
            two.
        steps (`int`, *optional*): For `decoding="vanilla"`: denoising steps of the whole response; one per token by
            default. Must be a multiple of the number of blocks.
        output_trace (`bool`, *optional*): For `return_dict_in_generate`: what each forward saw and what it led to.

    Raises:
        ValueError: for a value that is out of range.
    """

    _DEFAULTS = {
        "decoding": "d2f",
        "block_size": None,
        "block_add_threshold": 0.1,
        "block_activation_threshold": 0.95,
        "confidence_threshold": 0.9,
        "token_ranking": "probability",
        "steps": None,
        "output_trace": False,
    }

    def __init__(self, **kwargs):
        self.decoding: str | None = kwargs.pop("decoding", None)
        self.block_size: int | None = kwargs.pop("block_size", None)
        self.block_add_threshold: float | None = kwargs.pop("block_add_threshold", None)
        self.block_activation_threshold: float | None = kwargs.pop("block_activation_threshold", None)
        self.confidence_threshold: float | None = kwargs.pop("confidence_threshold", None)
        self.token_ranking: str | None = kwargs.pop("token_ranking", None)
        self.steps: int | None = kwargs.pop("steps", None)
        self.output_trace: bool | None = kwargs.pop("output_trace", None)
        # A config that says so loses what the base class does not know when it is loaded again.
        kwargs.pop("_from_model_config", None)
        super().__init__(**kwargs)

    def validate(self, *args, **kwargs):
        super().validate(*args, **kwargs)
        if self.decoding is not None and self.decoding not in DECODING_MODES:
            raise ValueError(
                f"`decoding` must be one of {DECODING_MODES}, got {self.decoding!r}. Leave it out for 'd2f'."
            )
        if self.token_ranking is not None and self.token_ranking not in TOKEN_RANKINGS:
            raise ValueError(f"`token_ranking` must be one of {TOKEN_RANKINGS}, got {self.token_ranking!r}.")
        for name in ("block_size", "steps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"`{name}` must be an integer of at least 1, got {value!r}. Leave it out for the default."
                )
        for name in ("block_add_threshold", "block_activation_threshold", "confidence_threshold"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0.0 <= value <= 1.0):
                raise ValueError(
                    f"`{name}` must be a number in [0, 1], got {value!r}. It is a share of decoded tokens or a "
                    "probability; the default is " + str(self._DEFAULTS[name]) + "."
                )
        if self.output_trace is not None and not isinstance(self.output_trace, bool):
            raise ValueError(f"`output_trace` must be True or False, got {self.output_trace!r}.")
        if self.steps is not None and self.decoding == "d2f":
            raise ValueError(
                f"`steps` (got {self.steps}) has no meaning with decoding='d2f', which takes as many as it needs. "
                "`confidence_threshold` trades speed for quality; decoding='vanilla' takes `steps`."
            )

    def with_defaults(self) -> "D2FGenerationConfig":
        """This config with the paper's values where it says nothing."""
        for name, value in self._DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.validate()
        return self

    def to_diff_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_diff_dict().items() if k not in self._DEFAULTS or v is not None}

    @classmethod
    def from_model_config(cls, model_config) -> "D2FGenerationConfig":
        """The config of a model that has none yet: its special tokens, and D2F decoding with the paper's values."""
        config = cls.from_dict(GenerationConfig.from_model_config(model_config).to_dict()).with_defaults()
        config._original_object_hash = hash(config)
        return config


@dataclass
class D2FGenerationOutput(ModelOutput):
    """What `generate(return_dict_in_generate=True)` returns.

    Args:
        sequences (`torch.LongTensor` of shape `(B, prompt + response)`): The prompt as it was given, and the response:
            up to and including its first EOS, then padding.
        num_forward_passes (`torch.LongTensor` of shape `(B,)`): Forwards until the row was finished.
        tokens_per_forward (`torch.FloatTensor` of shape `(B,)`): Response tokens, including the EOS, per forward.
        trace (`list[list[dict]]`, *optional*): With `output_trace`, per row and forward: `window_start` and
            `window_length` (positions that were fed, padding left out), `committed_length` (tokens in the cache before
            it) and `accepted`, pairs of position and token.
    """

    sequences: torch.LongTensor | None = None
    num_forward_passes: torch.LongTensor | None = None
    tokens_per_forward: torch.FloatTensor | None = None
    trace: list | None = None


# The rules of the loop. They are functions of tensors, apart from the forward that runs between them.


def as_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """`values` of shape `(B, R)` as blocks `(B, N, K)`; what the last block lacks is 0 or `False`."""
    num_blocks = math.ceil(values.shape[1] / block_size)
    return F.pad(values, (0, num_blocks * block_size - values.shape[1])).view(-1, num_blocks, block_size)


def spread(
    values: torch.Tensor, row: torch.LongTensor, index: torch.LongTensor, shape: tuple[int, int]
) -> torch.Tensor:
    """`values` of tokens `(M,)` at their places `index` of the responses of `row`, 0 or `False` elsewhere: `shape`."""
    return values.new_zeros(shape).index_put((row, index), values)


def decoded_ratio(is_masked: torch.BoolTensor, block_size: int) -> torch.FloatTensor:
    """The share of each block that is decoded, `(B, N)`, from `is_masked` of shape `(B, R)`."""
    block_sizes = as_blocks(torch.ones_like(is_masked[:1]), block_size).sum(-1)  # [1, N]
    return (block_sizes - as_blocks(is_masked, block_size).sum(-1)) / block_sizes


def first_index(condition: torch.BoolTensor) -> torch.LongTensor:
    """The index of the first `True` of each row of `(B, R)`, R where there is none."""
    found = condition.any(-1)
    return torch.where(found, condition.long().argmax(-1), condition.shape[1])


def opened_blocks(
    opened: torch.LongTensor, ratio: torch.FloatTensor, eos_block: torch.LongTensor, block_add_threshold: float
) -> torch.LongTensor:
    """How many blocks each row has in this step (Algorithm 2, adding a block; the first step opens the first one).

    A block is added, at most one a step, when the decoded ratio of the last one has reached `block_add_threshold`.
    With an EOS decoded no block is added, and those after the EOS's block are dropped.

    Args:
        opened (`torch.LongTensor` of shape `(B,)`): Blocks opened before.
        ratio (`torch.FloatTensor` of shape `(B, N)`): Decoded ratio of each block.
        eos_block (`torch.LongTensor` of shape `(B,)`): Block of the first EOS; N or more without one.
        block_add_threshold (`float`): tau_add.
    """
    num_blocks = ratio.shape[1]
    # Before the first block comes the prompt, which is decoded.
    last_ratio = torch.cat([torch.ones_like(ratio[:, :1]), ratio], dim=1).gather(1, opened[:, None]).squeeze(1)
    has_eos = eos_block < num_blocks
    may_add = (opened < num_blocks) & (last_ratio >= block_add_threshold)
    return torch.where(has_eos, torch.minimum(opened, eos_block + 1), opened + may_add)


def fully_activated(ratio: torch.FloatTensor, block_activation_threshold: float) -> torch.BoolTensor:
    """Which blocks, `(B, N)`, accept at least one token: those whose predecessor has reached tau_act.

    Ratios only rise, so a block that is fully activated stays so.
    """
    return torch.cat([torch.ones_like(ratio[:, :1]), ratio[:, :-1]], dim=1) >= block_activation_threshold


def final_length(ratio: torch.FloatTensor, opened: torch.LongTensor, block_size: int) -> torch.LongTensor:
    """How many response tokens, `(B,)`, lie in blocks that are decoded and have only decoded blocks before them."""
    block = torch.arange(ratio.shape[1], device=ratio.device)
    is_final = (ratio == 1.0) & (block < opened[:, None])
    return is_final.long().cumprod(-1).sum(-1) * block_size


def accepted_tokens(
    is_masked: torch.BoolTensor,
    probability: torch.FloatTensor,
    ranking: torch.FloatTensor,
    is_fully_activated: torch.BoolTensor,
    confidence_threshold: float,
) -> torch.BoolTensor:
    """Which masked tokens are accepted (Algorithm 2, decoding a block): the confident ones, else a full block's best.

    Args:
        is_masked (`torch.BoolTensor` of shape `(B, N, K)`): Tokens that have a prediction.
        probability (`torch.FloatTensor` of shape `(B, N, K)`): Probability of the predicted token.
        ranking (`torch.FloatTensor` of shape `(B, N, K)`): What orders the tokens of a block if none is confident.
        is_fully_activated (`torch.BoolTensor` of shape `(B, N)`): See [`fully_activated`].
        confidence_threshold (`float`): tau_conf; a token is confident above it.

    Returns:
        `torch.BoolTensor` of shape `(B, N, K)`.
    """
    is_confident = is_masked & (probability > confidence_threshold)
    must_accept = is_fully_activated & is_masked.any(-1) & ~is_confident.any(-1)  # [B, N]
    best = ranking.masked_fill(~is_masked, -torch.inf).argmax(-1, keepdim=True)
    is_best = torch.zeros_like(is_masked).scatter(-1, best, must_accept[..., None])
    return is_confident | is_best


def choose_tokens(
    scores: torch.FloatTensor, do_sample: bool, token_ranking: str
) -> tuple[torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
    """A token for each row of `scores` `(M, V)`, its probability, and its rank value, `(M,)` each."""
    log_normalizer = scores.logsumexp(-1, keepdim=True)
    if do_sample:
        # What `torch.multinomial` does, without its check for NaN, which would hide where the NaN comes from.
        probabilities = (scores - log_normalizer).exp()
        tokens = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
        best = scores.gather(-1, tokens)
    else:
        best, tokens = scores.max(-1, keepdim=True)
    probability = (best - log_normalizer).exp().squeeze(-1)
    if token_ranking == "probability":
        ranking = probability
    elif token_ranking == "neg_entropy":
        probabilities = (scores - log_normalizer).exp()
        ranking = (probabilities * (probabilities + 1e-10).log()).sum(-1)
    else:
        top_two = (scores.topk(2, dim=-1).values - log_normalizer).exp()
        ranking = top_two[:, 0] - top_two[:, 1]
    return tokens.squeeze(-1), probability, ranking


class D2FGenerationMixin(GenerationMixin):
    """`generate()` for block-diffusion models. Everything around the loop is transformers' own.

    The model's `forward` takes `input_ids`, a finished `attention_mask`, `position_ids`, `cache` and a bool
    `logits_to_keep`; its config has `block_size`, `mask_token_id` and `right_shift_logits`.
    """

    generation_config_class: type[D2FGenerationConfig]  # the model class sets it
    _supported_generation_modes = [GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE]

    def adjust_generation_fn(self, generation_config, *args, **kwargs):
        # The base class loads generation_config.json as a plain GenerationConfig.
        if generation_config is not None:
            generation_config = self.generation_config_class.from_dict(generation_config.to_dict())
        super().adjust_generation_fn(generation_config, *args, **kwargs)
        if not isinstance(self.generation_config, self.generation_config_class):
            config = self.generation_config_class.from_dict(self.generation_config.to_dict()).with_defaults()
            config._original_object_hash = hash(config)
            self.generation_config = config

    def _prepare_generation_config(self, generation_config, *args, **kwargs):
        given = (generation_config, self.generation_config)
        no_length = all(c is None or (c.max_length is None and c.max_new_tokens is None) for c in given)
        no_length = no_length and kwargs.get("max_length") is None and kwargs.get("max_new_tokens") is None
        config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)
        config = self.generation_config_class.from_dict(config.to_dict()).with_defaults()
        if no_length:
            config.max_new_tokens = DEFAULT_MAX_NEW_TOKENS
        return config, model_kwargs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if model_kwargs.get("cache") is not None or model_kwargs.get("past_key_values") is not None:
            raise ValueError(
                "`cache` cannot be passed to `generate`: keys and values of the prompt depend on all of it, so a "
                "cache does not carry over to another prompt. Leave it out; D2F makes its own."
            )

    def _get_logits_processor(self, generation_config, *args, **kwargs):
        for name in ("guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"):
            if getattr(generation_config, name, None) not in (None, 0, 1):
                raise ValueError(f"`{name}` is not available for block diffusion. Leave it out.")
        for name, value in (
            ("watermarking_config", generation_config.watermarking_config),
            ("prefix_allowed_tokens_fn", kwargs.get("prefix_allowed_tokens_fn")),
        ):
            if value is not None:
                raise ValueError(
                    f"`{name}` is not available for block diffusion: it needs the token right before the one that is "
                    "chosen, which may be undecoded. Leave it out, or write a `LogitsProcessor`."
                )
        # Processors never see the padding of a row, so they need no mask to leave it out.
        return super()._get_logits_processor(generation_config, *args, **{**kwargs, "model_kwargs": None})

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: D2FGenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        attention_mask: torch.Tensor | None = None,
        **model_kwargs,
    ) -> torch.LongTensor | D2FGenerationOutput:
        """What `generate` calls for greedy search and sampling once its inputs are prepared."""
        if input_ids.shape[1] == 0 or model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "`input_ids` must hold at least one prompt token, got none (`inputs_embeds` cannot take their place). "
                "Start an empty prompt with the BOS token."
            )
        is_token = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        prompt_lengths = is_token.sum(-1)
        if (prompt_lengths == 0).any():
            raise ValueError(
                "`attention_mask` must leave at least one prompt token in each row, but a row has none. "
                "Start an empty prompt with the BOS token."
            )
        if self.config.mask_token_id is None:
            raise ValueError("`config.mask_token_id` must be set to decode by diffusion, but it is None.")
        if (is_token & (input_ids == self.config.mask_token_id)).any():
            raise ValueError(
                f"`input_ids` must not hold the mask token ({self.config.mask_token_id}), for only response tokens "
                "are decoded. Take it out of the prompt, or mask it in `attention_mask` if it is padding."
            )
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(
                f"`streamer` takes one sequence, but the batch has {len(input_ids)}. Generate one at a time."
            )
        if generation_config.output_scores or generation_config.output_logits:
            raise ValueError(
                "`output_scores` and `output_logits` are not available for block diffusion. Leave them out."
            )
        if generation_config.output_trace and not generation_config.return_dict_in_generate:
            logger.warning_once("`output_trace` has no effect without `return_dict_in_generate=True`.")
        # Rows are stored compactly: the prompt from position 0 without padding, the response right after it.
        order = (~is_token).long().argsort(dim=1, stable=True)
        response = Response(
            prompts=input_ids.gather(1, order),
            prompt_lengths=prompt_lengths,
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            min_new_tokens=(generation_config.min_length or 0) - input_ids.shape[1],
            mask_token_id=self.config.mask_token_id,
            eos_token_ids=generation_config._eos_token_tensor,
            stopping_criteria=StoppingCriteriaList(
                c for c in stopping_criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
            ),
            streamer=streamer,
        )
        # The smallest length is a matter of a token's place in the response, not of how much is decoded by now.
        logits_processor = LogitsProcessorList(
            p
            for p in logits_processor
            if not isinstance(p, (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor))
        )
        decode = self._decode_pipelined if generation_config.decoding == "d2f" else self._decode_vanilla
        num_forward_passes, trace = decode(response, logits_processor, generation_config, synced_gpus)
        if streamer is not None:
            streamer.end()
        return response.output(input_ids, num_forward_passes, trace, generation_config)

    @torch.no_grad()
    def _decode_pipelined(
        self,
        response: "Response",
        logits_processor: LogitsProcessorList,
        generation_config: D2FGenerationConfig,
        synced_gpus: bool,
    ) -> tuple[torch.LongTensor, list | None]:
        """Decodes `response` by pipelined parallel decoding (Algorithm 2), all rows in one forward per step.

        1. Open a block where the last one is decoded far enough; see which blocks are fully activated.
        2. The window of a row: from its first token that is not in the cache to the end of its last open block.
        3. Forward, which commits the blocks at the start of the window that it reads fully decoded. The prompt is
           block 0 and final from the start, so the first forward prefills it.
        4. Accept tokens, all from the logits of this one forward.

        Returns:
            Forwards of each row `(B,)`, and the trace.
        """
        block_size = self._block_size(generation_config)
        look_back = int(self.config.right_shift_logits)  # the token before the window predicts its first one
        prompt_lengths, limit = response.prompt_lengths, response.max_new_tokens
        device = prompt_lengths.device
        cache = D2FCache(self.config.num_hidden_layers, response.sequences.shape[1])
        opened = torch.zeros_like(prompt_lengths)
        committed = torch.zeros_like(prompt_lengths)  # tokens whose keys and values are in the cache for good
        num_forward_passes = torch.zeros_like(prompt_lengths)
        trace = [[] for _ in prompt_lengths] if generation_config.output_trace else None
        is_finite = torch.ones((), dtype=torch.bool, device=device)

        while True:
            # 1. Which blocks there are.
            is_masked = response.is_masked()  # [B, R]
            is_active = ~response.is_finished(is_masked)
            ratio = decoded_ratio(is_masked, block_size)  # [B, N]
            end_of_text = response.end_of_text()
            # Without an EOS that is the limit, which lies inside the last block if that one is short.
            eos_block = torch.where(end_of_text < limit, end_of_text // block_size, ratio.shape[1])
            opened = opened_blocks(opened, ratio, eos_block, generation_config.block_add_threshold)
            is_fully_activated = fully_activated(ratio, generation_config.block_activation_threshold)

            # 2. The window.
            end = prompt_lengths + (opened * block_size).clamp(max=limit)
            start = (committed - look_back).clamp(min=0)
            fed = (end - start) * is_active
            width, num_slots, any_active, was_finite = torch.stack(
                [fed.max(), end.max(), is_active.any(), is_finite]
            ).tolist()  # shapes of this step; the host also waits where masked tokens are picked out below
            if not was_finite:
                raise ValueError(NOT_FINITE)
            if not self._has_unfinished_sequences(not any_active, synced_gpus, device):
                break
            offset = torch.arange(max(width, 1), device=device)
            is_fed = offset < fed[:, None]  # [B, W]
            position = (start[:, None] + offset).clamp(max=response.sequences.shape[1] - 1)
            window = response.sequences.gather(1, position)
            in_response = is_fed & (position >= prompt_lengths[:, None])
            is_masked_here = in_response & (window == response.mask_token_id)
            slot = torch.arange(num_slots, device=device)[None]
            allowed = block_causal_mask(position, prompt_lengths, block_size, slot, slot < end[:, None])

            # 3. Forward.
            cache.set_window(torch.where(is_fed, position, cache.padding_slot), num_slots)
            logits = self(
                input_ids=window,
                attention_mask=allowed,
                position_ids=position,
                cache=cache,
                logits_to_keep=predicting_positions(is_masked_here, self.config.right_shift_logits),
            ).logits  # [M, V]
            if not any_active:
                continue  # other processes are still decoding and need this one in their collectives
            num_forward_passes += is_active
            fed_from = committed
            committed = torch.where(
                is_active,
                prompt_lengths + final_length(ratio, opened, block_size).clamp(max=limit),
                committed,
            )

            # 4. Accept.
            row, column = is_masked_here.nonzero(as_tuple=True)
            index = position[row, column] - prompt_lengths[row]  # in the response
            tokens, probability, ranking = self._predict(
                logits, row, index, response, logits_processor, generation_config
            )
            is_finite = probability.isfinite().all()
            has_prediction = torch.ones_like(row, dtype=torch.bool)
            accepted = accepted_tokens(
                *(
                    as_blocks(spread(values, row, index, is_masked.shape), block_size)
                    for values in (has_prediction, probability, ranking)
                ),
                is_fully_activated,
                generation_config.confidence_threshold,
            ).flatten(1)[row, index]
            if trace is not None:
                _record(trace, is_active, fed_from, end, row, position[row, column], tokens, accepted)
            response.write(row[accepted], index[accepted], tokens[accepted])
            response.publish(shown=(opened * block_size).clamp(max=limit))
        return num_forward_passes, trace

    @torch.no_grad()
    def _decode_vanilla(
        self,
        response: "Response",
        logits_processor: LogitsProcessorList,
        generation_config: D2FGenerationConfig,
        synced_gpus: bool,
    ) -> tuple[torch.LongTensor, None]:
        """Decodes `response` as the original LLaDA does: bidirectional, without cache, a fixed number of steps.

        All response tokens are masked from the start and seen by all. Blocks are decoded from left to right, each in
        its share of the steps; a step accepts the most probable tokens of the block ("low-confidence remasking").
        """
        prompt_lengths, limit = response.prompt_lengths, response.max_new_tokens
        block_size = min(self._block_size(generation_config), limit)
        num_blocks = math.ceil(limit / block_size)
        steps = generation_config.steps
        if steps is not None and (steps % num_blocks or limit % block_size):
            raise ValueError(
                f"`steps` must be a multiple of the number of blocks and `max_new_tokens` one of `block_size`, got "
                f"{steps} steps for {limit} tokens in blocks of {block_size}. Without `steps` each token takes one."
            )
        device = prompt_lengths.device
        position = torch.arange(response.sequences.shape[1], device=device)[None]
        is_token = position < (prompt_lengths + limit)[:, None]
        num_forward_passes = 0
        for start in range(0, limit, block_size):
            size = min(block_size, limit - start)
            block_steps = steps // num_blocks if steps is not None else size
            index = position - prompt_lengths[:, None]  # in the response
            in_block = (index >= start) & (index < start + size)
            for step in range(block_steps):
                num_accepted = size // block_steps + (step < size % block_steps)
                is_masked_here = in_block & (response.sequences == response.mask_token_id)  # [B, T]
                logits = self(
                    input_ids=response.sequences,
                    attention_mask=is_token,
                    logits_to_keep=predicting_positions(is_masked_here, self.config.right_shift_logits),
                ).logits
                num_forward_passes += 1
                row, column = is_masked_here.nonzero(as_tuple=True)
                index = column - prompt_lengths[row]  # in the response
                tokens, probability, _ = self._predict(
                    logits, row, index, response, logits_processor, generation_config
                )
                if not probability.isfinite().all():
                    raise ValueError(NOT_FINITE)
                # Each row has the same number of masked tokens in the block.
                num_rows, num_masked = len(prompt_lengths), len(row) // len(prompt_lengths)
                best = probability.view(num_rows, num_masked).topk(num_accepted, dim=-1).indices
                best = (best + torch.arange(num_rows, device=device)[:, None] * num_masked).flatten()
                response.write(row[best], index[best], tokens[best])
                response.publish(shown=torch.full_like(prompt_lengths, limit))
        return torch.full_like(prompt_lengths, num_forward_passes), None

    def _block_size(self, generation_config: D2FGenerationConfig) -> int:
        return self.config.block_size if generation_config.block_size is None else generation_config.block_size

    def _predict(
        self,
        logits: torch.Tensor,
        row: torch.LongTensor,
        index: torch.LongTensor,
        response: "Response",
        logits_processor: LogitsProcessorList,
        generation_config: D2FGenerationConfig,
    ) -> tuple[torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
        """Token, probability and rank value for each masked token, from `logits` `(M, V)`.

        `row` and `index`, `(M,)` each, say whose token it is and its place in the response.
        """
        scores = logits.float()
        scores[:, response.mask_token_id] = -torch.inf  # "not decoded yet" is not something to decode
        if response.min_new_tokens > 0 and response.eos_token_ids is not None:
            is_early = torch.zeros_like(scores, dtype=torch.bool)
            is_early[:, response.eos_token_ids] = (index < response.min_new_tokens)[:, None]
            scores = scores.masked_fill(is_early, -torch.inf)
        if len(logits_processor) > 0 and len(row) > 0:
            # A processor sees the part of the row that is decoded without a gap, once for each masked token.
            # Processors that count tokens do so from the length of the longest prompt, so a shorter one is filled up;
            # the mask token means nothing to the others.
            decoded = response.prefix_length()
            processed = []
            for b in row.unique_consecutive().tolist():
                own = scores[row == b]
                prefix = response.sequences[b, : response.prompt_lengths[b] + decoded[b]]
                missing = response.prompt_width - int(response.prompt_lengths[b])
                prefix = F.pad(prefix, (missing, 0), value=response.mask_token_id)
                processed.append(logits_processor(prefix.expand(len(own), -1), own))
            scores = torch.cat(processed)
        return choose_tokens(scores, generation_config.do_sample, generation_config.token_ranking)


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

    def is_finished(self, is_masked: torch.BoolTensor) -> torch.BoolTensor:
        """Which rows, `(B,)`, have everything decoded up to their first EOS, the limit, or where they were stopped."""
        return first_index(is_masked) >= torch.minimum(self.end_of_text(), self.stopped_at)

    def prefix_length(self) -> torch.LongTensor:
        """How many response tokens of each row, `(B,)`, are decoded without a gap, up to and including an EOS."""
        return torch.minimum(first_index(self.is_masked()), self.end_of_text() + 1).clamp(max=self.max_new_tokens)

    def write(self, row: torch.LongTensor, index: torch.LongTensor, tokens: torch.LongTensor) -> None:
        """Puts `tokens` at places `index` of the responses of `row`, all of shape `(M,)`."""
        self.sequences[row, self.prompt_lengths[row] + index] = tokens

    def publish(self, shown: torch.LongTensor) -> None:
        """Tells stopping criteria and streamer what is new; drafts reach to `shown` `(B,)` tokens or an EOS."""
        if self.streamer is None and len(self.stopping_criteria) == 0:
            return
        shown = torch.minimum(shown, self.end_of_text() + 1)
        for b, decoded in enumerate(self.prefix_length().tolist()):
            begin = int(self.prompt_lengths[b])
            decoded = min(decoded, int(self.stopped_at[b]))
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
        )


def _record(
    trace: list[list[dict]],
    is_active: torch.BoolTensor,
    start: torch.LongTensor,
    end: torch.LongTensor,
    row: torch.LongTensor,
    position: torch.LongTensor,
    tokens: torch.LongTensor,
    accepted: torch.BoolTensor,
) -> None:
    """Appends one forward to the trace of each active row."""
    for b, row_trace in enumerate(trace):
        if is_active[b]:
            chosen = (row == b) & accepted
            row_trace.append(
                {
                    "window_start": int(start[b]),
                    "window_length": int(end[b] - start[b]),
                    "committed_length": int(start[b]),
                    "accepted": list(zip(position[chosen].tolist(), tokens[chosen].tolist(), strict=True)),
                }
            )
