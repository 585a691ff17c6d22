"""What `generate()` is told and what it returns: `D2FGenerationConfig` and `D2FGenerationOutput`."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import ModelOutput

from .acceptance_rules import ACCEPTANCE_RULES

DECODING_MODES = ("d2f", "vanilla", "fast_dllm")
TOKEN_RANKINGS = ("probability", "neg_entropy", "margin", "random")
UNMASK_SCHEDULES = ("even", "linear", "independent")
BLOCK_CACHES = ("none", "prefix", "dual")
_RULE_PARAMETERS = tuple(dict.fromkeys(name for names in ACCEPTANCE_RULES.values() for name in names))

# Arguments that have no meaning in a decoding mode, with what the mode has in their place.
_SAMPLED_TOKENS = "`temperature` with `do_sample=True` draws the tokens"
_D2F_STEPS = {
    "acceptance_rule": "it accepts by a rule of its own",
    **dict.fromkeys(_RULE_PARAMETERS, "it belongs to an `acceptance_rule`"),
    "num_branches": "it decodes one block at a time",
    "remask_threshold": "a token that it accepts stays",
    "compile_config": "only the steps of pipelined decoding are compiled",
}
WITHOUT_MEANING_IN = {
    "d2f": {
        "steps": "it takes as many as it needs; `confidence_threshold` trades speed for quality",
        "unmask_schedule": "the thresholds decide what is accepted",
        "ranking_temperature": _SAMPLED_TOKENS,
        "guidance_scale": "guidance needs a second forward over a prompt that is masked",
        "block_cache": "keys and values of a decoded block never change, so all are kept",
    },
    "vanilla": {"block_cache": "nothing is kept from one forward to the next", **_D2F_STEPS},
    "fast_dllm": {
        "unmask_schedule": "`confidence_threshold` decides what is accepted, or `steps` how much",
        "ranking_temperature": _SAMPLED_TOKENS,
        "guidance_scale": "guidance needs a second forward over a prompt that is masked, and a cache of its own",
        **_D2F_STEPS,
    },
}

# Arguments of transformers' other decoders, with the values that ask for nothing.
_WITHOUT_MEANING = {
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "low_memory": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "token_healing": (None, False),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "watermarking_config": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "force_words_ids": (None,),
    "constraints": (None,),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0, 0.0),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "decoder_start_token_id": (None,),
    "is_assistant": (None, False),
    "prefill_chunk_size": (None,),
    "cache_config": (None,),
}


class D2FGenerationConfig(GenerationConfig):
    """Generation parameters of a block-diffusion model: those of `GenerationConfig`, and the following.

    Each can be given here, as a keyword of `generate`, or in `generation_config.json`. What is `None` here comes from
    the model's own generation config.

    Args:
        decoding (`str`, *optional*): `"d2f"`, pipelined parallel decoding (default); `"vanilla"`, the sampler of the
            original bidirectional model, which is slow but needs no distillation; or `"fast_dllm"`, Fast-dLLM's
            acceleration of the latter by a confidence threshold and an approximate cache.
        block_size (`int`, *optional*): Tokens per response block; the model's `config.block_size` by default.
        block_add_threshold (`float`, *optional*): tau_add. A new block is opened when the decoded ratio of the last
            one reaches it (default 0.1). 1.0 decodes block by block.
        block_activation_threshold (`float`, *optional*): tau_act. A block is fully activated, and from then on accepts
            at least one token per step, when the decoded ratio of the block before it reaches it (default 0.95).
        confidence_threshold (`float`, *optional*): tau_conf. A token is accepted when its probability, after the
            logits processors, is above it (default 0.9). Higher is more careful. DiffusionGemma's parameter of this
            name is a bound on the entropy, where lower is more careful. In `decoding="fast_dllm"` a token is accepted
            when it reaches the threshold (`>=`, not `>`), and the best one of the block in any case; `steps` takes its
            place.
        token_ranking (`str`, *optional*): What ranks the token that a fully activated block must accept if none is
            above `confidence_threshold`: `"probability"` (default), `"neg_entropy"`, or `"margin"` between the best
            two. In vanilla decoding it ranks all that a step accepts, and may be `"random"`. In
            `decoding="fast_dllm"` it ranks what a step of a fixed number of `steps` accepts, or the one token that is
            accepted in any case, and may be `"random"`.
        max_active_blocks (`int`, *optional*): At most so many blocks of a row that are not decoded are open at a
            time. No cap by default. Later blocks are invisible to earlier ones, so it changes when, not what, blocks
            predict.
        acceptance_rule (`str`, *optional*): For `decoding="d2f"`: what a step accepts. `"threshold"` (default), what
            is above `confidence_threshold`, as in the paper; `"credit"`, the same where a token's probability is
            raised by what it earned as the prediction of earlier steps (CreditDecoding); `"factor"`, the more at once,
            the surer all must be (Fast-dLLM's factor rule); `"entropy_bound"`, the surest ones, as far as their
            entropy allows (EB-Sampler). By each of them a fully activated block accepts at least one token.
            `acceptance_rules.py` has definitions and sources.
        semi_activated_threshold (`float`, *optional*): For `"threshold"` and `"credit"`: `confidence_threshold` of the
            blocks that are not fully activated; the same one by default.
        credit_decay, credit_strength (`float`, *optional*): For `"credit"`: the share of its credit that a token keeps
            from step to step, beta (default 0.7), and how much the credit raises its probability, alpha (default
            0.65; 0 not at all). The raised probability also decides which token a fully activated block must accept,
            so `token_ranking` has no meaning.
        confidence_factor (`float`, *optional*): For `"factor"`: f of `(n + 1) * (1 - confidence) < f`, which all n
            accepted tokens of a block satisfy (default 1.0). Higher accepts more. It takes the place of
            `confidence_threshold`.
        entropy_bound (`float`, *optional*): For `"entropy_bound"`: gamma, the sum of the accepted tokens' entropies
            that a block may reach, in nats; without the largest of them where it is fully activated (default 0.1).
            Higher accepts more. It takes the place of `confidence_threshold` and `token_ranking`.
        num_branches (`int`, *optional*): For `decoding="d2f"`: LoPA's look-ahead. Each forward reads that many
            variants of the row, which costs as much as that many rows. All but the first try one more of the most
            probable tokens each, and the one that leaves the model surest of the rest is kept. It counts as one
            forward. Without it, or with 1, there is no look-ahead.
        remask_threshold (`float`, *optional*): For `decoding="d2f"`: decoded tokens of blocks that are not final
            become masks again when the model gives them a probability below it, each place at most once. Streamers
            and stopping criteria are told about a block once it is final. Without it, or with 0, tokens stay. Not
            together with `num_branches`.
        output_trace (`bool`, *optional*): For `return_dict_in_generate`: what each forward saw and what it led to.
        steps (`int`, *optional*): For `decoding="vanilla"`: denoising steps of the whole response; one per token by
            default. Must be a multiple of the number of blocks. In `decoding="fast_dllm"` it selects the fixed number
            of tokens per step in place of `confidence_threshold`; a block that is decoded takes no more steps.
        unmask_schedule (`str`, *optional*): For `decoding="vanilla"`: how many tokens each step of a block accepts.
            `"even"` (default), the same number in each, LLaDA's sampler; `"linear"`, a share 1 - s/t of the masked
            ones where the time falls from t to s, Dream's `maskgit_plus` (ranking by probability), `topk_margin` and
            `entropy`; `"independent"`, each masked token with that probability, Dream's `origin`. Dream's samplers
            have one block, `block_size=max_new_tokens`.
        ranking_temperature (`float`, *optional*): For `decoding="vanilla"`: the tokens that a step accepts are drawn
            with probabilities softmax(rank value / ranking_temperature) rather than the best ones (Dream's
            `alg_temp`). 0 or nothing: the best ones.
        guidance_scale (`float`, *optional*): For `decoding="vanilla"`: classifier-free guidance against the prompt
            masked, logits = u + guidance_scale * (c - u). LLaDA's `cfg_scale` is this less 1.
        block_cache (`str`, *optional*): For `decoding="fast_dllm"`: the keys and values that the first forward of a
            block, which reads the whole sequence, leaves to the others of this block: `"dual"` (default), all but the
            block's own; `"prefix"`, those before the block; or `"none"`. They are approximations, because every token
            sees every other one. With them a block takes two forwards at least, as in the original, even if the first
            decodes all of it. `use_cache=False` means `"none"`.

    Raises:
        ValueError: for a value that is out of range, or an argument that has no meaning here.
    """

    _DEFAULTS = {
        "decoding": "d2f",
        "block_size": None,
        "block_add_threshold": 0.1,
        "block_activation_threshold": 0.95,
        "confidence_threshold": 0.9,
        "token_ranking": "probability",
        "max_active_blocks": None,
        "acceptance_rule": None,
        "semi_activated_threshold": None,
        "credit_decay": None,
        "credit_strength": None,
        "confidence_factor": None,
        "entropy_bound": None,
        "num_branches": None,
        "remask_threshold": None,
        "output_trace": False,
        "steps": None,
        "unmask_schedule": None,
        "ranking_temperature": None,
        "block_cache": None,
    }

    def __init__(self, **kwargs):
        self.decoding: str | None = kwargs.pop("decoding", None)
        self.block_size: int | None = kwargs.pop("block_size", None)
        self.block_add_threshold: float | None = kwargs.pop("block_add_threshold", None)
        self.block_activation_threshold: float | None = kwargs.pop("block_activation_threshold", None)
        self.confidence_threshold: float | None = kwargs.pop("confidence_threshold", None)
        self.token_ranking: str | None = kwargs.pop("token_ranking", None)
        self.max_active_blocks: int | None = kwargs.pop("max_active_blocks", None)
        self.acceptance_rule: str | None = kwargs.pop("acceptance_rule", None)
        self.semi_activated_threshold: float | None = kwargs.pop("semi_activated_threshold", None)
        self.credit_decay: float | None = kwargs.pop("credit_decay", None)
        self.credit_strength: float | None = kwargs.pop("credit_strength", None)
        self.confidence_factor: float | None = kwargs.pop("confidence_factor", None)
        self.entropy_bound: float | None = kwargs.pop("entropy_bound", None)
        self.num_branches: int | None = kwargs.pop("num_branches", None)
        self.remask_threshold: float | None = kwargs.pop("remask_threshold", None)
        self.output_trace: bool | None = kwargs.pop("output_trace", None)
        self.steps: int | None = kwargs.pop("steps", None)
        self.unmask_schedule: str | None = kwargs.pop("unmask_schedule", None)
        self.ranking_temperature: float | None = kwargs.pop("ranking_temperature", None)
        self.block_cache: str | None = kwargs.pop("block_cache", None)
        # A config that says so loses what the base class does not know when it is loaded again.
        kwargs.pop("_from_model_config", None)
        super().__init__(**kwargs)

    def validate(self, *args, **kwargs):
        super().validate(*args, **kwargs)
        for name, values in (
            ("decoding", DECODING_MODES),
            ("token_ranking", TOKEN_RANKINGS),
            ("unmask_schedule", UNMASK_SCHEDULES),
            ("block_cache", BLOCK_CACHES),
            ("acceptance_rule", tuple(ACCEPTANCE_RULES)),
        ):
            value = getattr(self, name)
            if value is not None and value not in values:
                raise ValueError(f"`{name}` must be one of {values}, got {value!r}. Leave it out for the default.")
        for name in ("block_size", "max_active_blocks", "steps", "num_branches"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"`{name}` must be an integer of at least 1, got {value!r}. Leave it out for the default."
                )
        for name in ("block_add_threshold", "block_activation_threshold", "confidence_threshold"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 <= value <= 1.0):
                raise ValueError(
                    f"`{name}` must be a number in [0, 1], got {value!r}. It is a share of decoded tokens or a "
                    f"probability; the default is {self._DEFAULTS[name]}."
                )
        for name in ("semi_activated_threshold", "remask_threshold", "credit_decay"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 <= value <= 1.0):
                raise ValueError(f"`{name}` must be a number in [0, 1], got {value!r}. Leave it out for the default.")
        for name in ("entropy_bound", "credit_strength", "confidence_factor"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0.0 <= value < math.inf):
                raise ValueError(
                    f"`{name}` must be a finite number of at least 0, got {value!r}. Leave it out for the default; "
                    "higher accepts more."
                )
        value = self.ranking_temperature
        if value is not None and not (_is_number(value) and value >= 0.0):
            raise ValueError(
                f"`ranking_temperature` must be a number of at least 0, got {value!r}. 0 takes the best tokens."
            )
        if self.output_trace is not None and not isinstance(self.output_trace, bool):
            raise ValueError(f"`output_trace` must be True or False, got {self.output_trace!r}.")
        for name, neutral in _WITHOUT_MEANING.items():
            value = getattr(self, name, None)
            if value not in neutral:
                raise ValueError(
                    f"`{name}` has no meaning for block diffusion (got {value!r}). Leave it out, or load an "
                    "autoregressive model for it."
                )
        if self.cache_implementation not in (None, "static"):
            raise ValueError(
                f"`cache_implementation` must be left out or be 'static', got {self.cache_implementation!r}: "
                "decoding makes its own preallocated cache."
            )
        for name, instead in WITHOUT_MEANING_IN.get(self.decoding, {}).items():
            value = getattr(self, name)
            if value is not None and not (name == "guidance_scale" and value == 1):
                others = [mode for mode in DECODING_MODES if name not in WITHOUT_MEANING_IN[mode]]
                raise ValueError(
                    f"`{name}` (got {value!r}) has no meaning with decoding={self.decoding!r}: {instead}. "
                    f"{' and '.join(f'decoding={mode!r}' for mode in others)} can take it."
                )
        if self.acceptance_rule is not None:
            self._refuse_what_belongs_to_other_rules(self.acceptance_rule)
        if self.num_branches not in (None, 1) and self.remask_threshold is not None:
            raise ValueError(
                f"`remask_threshold` (got {self.remask_threshold!r}) has no meaning with `num_branches` (got "
                f"{self.num_branches}): branches are compared by what they have not decoded. Leave one of them out."
            )
        if self.decoding == "d2f" and self.token_ranking == "random":
            raise ValueError(
                "`token_ranking` 'random' has no meaning with decoding='d2f'. Leave it out, or take "
                "decoding='vanilla' or decoding='fast_dllm'."
            )
        if self.output_trace and self.decoding in ("vanilla", "fast_dllm"):
            raise ValueError(f"`output_trace` has no meaning with decoding={self.decoding!r}. Leave it out.")
        if self.unmask_schedule == "independent" and self.ranking_temperature:
            raise ValueError(
                f"`ranking_temperature` (got {self.ranking_temperature}) has no meaning with "
                "unmask_schedule='independent', which does not rank. Leave it out."
            )

    def _refuse_what_belongs_to_other_rules(self, rule: str) -> None:
        for name in parameters_of_other_rules(rule):
            value = getattr(self, name)
            if value is not None:
                rules = " or ".join(f"acceptance_rule={other!r}" for other, p in ACCEPTANCE_RULES.items() if name in p)
                raise ValueError(
                    f"`{name}` (got {value!r}) has no meaning with acceptance_rule={rule!r}. Leave it out, or take "
                    f"{rules}."
                )
        of_the_rule = {"entropy_bound": "neg_entropy", "credit": "probability"}.get(rule)
        if of_the_rule is not None and self.token_ranking not in (None, "probability", of_the_rule):
            raise ValueError(
                f"`token_ranking` (got {self.token_ranking!r}) has no meaning with acceptance_rule={rule!r}, which "
                "ranks by itself. Leave it out, or take acceptance_rule='threshold' or 'factor'."
            )

    def acceptance_options(self) -> dict[str, Any]:
        """What `acceptance_rules.accept` has to know: the rule, `confidence_threshold` and the rule's parameters."""
        rule = self.acceptance_rule or "threshold"
        values = {name: getattr(self, name) for name in ("confidence_threshold", *ACCEPTANCE_RULES[rule])}
        return {"acceptance_rule": rule, **{name: value for name, value in values.items() if value is not None}}

    def with_defaults(self) -> "D2FGenerationConfig":
        """This config with the paper's values where it says nothing."""
        for name, value in self._DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self.validate()
        if self.decoding == "d2f":
            self._refuse_what_belongs_to_other_rules(self.acceptance_rule or "threshold")
        return self

    def to_diff_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_diff_dict().items() if k not in self._DEFAULTS or v is not None}

    @classmethod
    def from_model_config(cls, model_config) -> "D2FGenerationConfig":
        """The config of a model that has none yet: its special tokens, and D2F decoding with the paper's values."""
        config = cls.from_dict(GenerationConfig.from_model_config(model_config).to_dict()).with_defaults()
        # Original configurations turn the cache off, because their own code has none.
        config.use_cache = None
        config._original_object_hash = hash(config)
        return config


def parameters_of_other_rules(acceptance_rule: str | None) -> tuple[str, ...]:
    """The parameters that have no meaning with this `acceptance_rule`; `None` is the default, `"threshold"`."""
    return tuple(p for p in _RULE_PARAMETERS if p not in ACCEPTANCE_RULES.get(acceptance_rule or "threshold", ()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
            it) and `accepted`, pairs of position and token; with `remask_threshold` also `remasked`, positions.
        scores, logits (`tuple[torch.FloatTensor]`, *optional*): With `output_scores` or `output_logits`, per response
            token `(B, V)`: what it was chosen from when it was accepted, after the logits processors or before them;
            0 behind the end of a row.
    """

    sequences: torch.LongTensor | None = None
    num_forward_passes: torch.LongTensor | None = None
    tokens_per_forward: torch.FloatTensor | None = None
    trace: list | None = None
    scores: tuple[torch.FloatTensor, ...] | None = None
    logits: tuple[torch.FloatTensor, ...] | None = None
