"""What `generate()` is told: `D2FGenerationConfig`.

Each option is declared once, by an [`Option`] in the annotation of its attribute. `__init__`, the defaults and the
refusals follow from these declarations.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Annotated, Any

from transformers import CompileConfig, GenerationConfig
from transformers.utils import logging

from .acceptance_rules import ACCEPTANCE_RULES
from .generation_options import (
    AMOUNT,
    FINITE,
    FROM_ZERO,
    SHARE,
    TOKEN_IDS,
    TRUE_OR_FALSE,
    Check,
    Option,
    integer_from,
    is_integer,
    is_number,
    left_out,
    one_of,
)

logger = logging.get_logger(__name__)

DECODING_MODES = ("d2f", "vanilla", "fast_dllm", "autoregressive", "verified")
TOKEN_RANKINGS = ("probability", "neg_entropy", "margin", "random")
UNMASK_SCHEDULES = ("even", "linear", "independent")
BLOCK_CACHES = ("none", "prefix", "dual")
DRAFT_LAYOUTS = ("linear", "rolling")


_ONE_TOKEN_AT_A_TIME = {
    "autoregressive": "it decodes one token after the other",
    "verified": "it accepts what the model chooses from left to right",
}
_OF_DRAFTS = dict.fromkeys(("d2f", "vanilla", "fast_dllm", "autoregressive"), "it has no drafts to verify")


def _of_d2f(instead: str) -> dict[str, str]:
    """`not_used_by` of an option of pipelined decoding, with what the others have in its place."""
    return {"vanilla": instead, "fast_dllm": instead, **_ONE_TOKEN_AT_A_TIME}


_SAMPLED_TOKENS = "`temperature` with `do_sample=True` draws the tokens"
_ONE_BLOCK_AT_A_TIME = _of_d2f("it decodes one block after the other")
_NO_WINDOWS = dict.fromkeys(("vanilla", "fast_dllm"), "it has no windows to tell of")
_OF_A_RULE = _of_d2f("it belongs to an `acceptance_rule`")


class D2FGenerationConfig(GenerationConfig):
    """Generation parameters of a block-diffusion model: those of `GenerationConfig`, and the following.

    Each can be given here, as a keyword of `generate`, or in `generation_config.json`. What is `None` here comes from
    the model's own generation config.

    Args:
        decoding (`str`, *optional*): `"d2f"`, pipelined parallel decoding (default); `"vanilla"`, the sampler of the
            original bidirectional model, which is slow but needs no distillation; `"fast_dllm"`, Fast-dLLM's
            acceleration of it by a confidence threshold and an approximate cache; `"autoregressive"`, one token after
            the other under a causal mask, for a model with `config.has_causal_mode`; or `"verified"`, the same
            response by drafts of many tokens at once, which such a model verifies.
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
        sub_block_size (`int`, *optional*): For `decoding="d2f"`: a block accepts tokens in its first sub-block of so
            many tokens that is not decoded, and in no other (Fast-dLLM v2). Divides `block_size`.
        first_token_alone (`bool`, *optional*): For `decoding="d2f"`: a block whose first token is masked accepts
            nothing but that token, whatever its probability (Fast-dLLM v2, whose models say so). It is off where
            several blocks are in flight (`block_add_threshold` below 1).
        steps_per_block (`int`, *optional*): For `decoding="d2f"` with `acceptance_rule="threshold"`: a fully activated
            block accepts `block_size / steps_per_block` tokens per step at the least, one more in its first steps
            where that is no integer. With `confidence_threshold=1.0` it accepts exactly so many. With `"sequential"`
            it accepts the first so many. One token by default (SDAR's `denoising_steps`).
        draft_length (`int`, *optional*): For `decoding="verified"`: masks that are read behind the text, which give so
            many tokens of a draft (default 32).
        num_draft_steps (`int`, *optional*): For `decoding="verified"`: forwards in which a draft is made (default 1).
        draft_layout (`str`, *optional*): For `decoding="verified"`: `"linear"` (default), one forward drafts and the
            next one verifies; or `"rolling"`, a forward that verifies also drafts what follows, which is of use if all
            of the draft is right.
        verification_tolerance (`float`, *optional*): For `decoding="verified"`: above 0, a token of a draft is also
            accepted where its probability is at least this share of the best one's. 0 (default): the response is
            exactly that of the model.
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
        guidance_scale (`float`, *optional*): For `decoding="vanilla"`: classifier-free guidance against the masked
            prompt, logits = u + guidance_scale * (c - u). LLaDA's `cfg_scale` is this less 1.
        block_cache (`str`, *optional*): For `decoding="fast_dllm"`: the keys and values that the first forward of a
            block, which reads the whole sequence, leaves to the others of this block: `"dual"` (default), all but the
            block's own; `"prefix"`, those before the block; or `"none"`. They are approximations, because every token
            sees every other one. With them a block takes two forwards at least, as in the original, even if the first
            decodes all of it. `use_cache=False` means `"none"`.

    Experimental: measured below the default, or equal to it at best (docs/benchmarks), and free to change.

    Args:
        acceptance_rule (`str`, *optional*): For `decoding="d2f"`: what a step accepts. `"threshold"` (default), what
            is above `confidence_threshold`, as in the paper; `"sequential"`, the first tokens of each fully activated
            block, whatever their probability (SDAR); `"credit"`, as `"threshold"` where a token's probability is
            raised by what it earned as the prediction of earlier steps (CreditDecoding); `"factor"`, the more at once,
            the surer all must be (Fast-dLLM's factor rule); `"entropy_bound"`, the surest ones, as far as their
            entropy allows (EB-Sampler). By each of them a fully activated block accepts at least one token.
            `acceptance_rules.py` has definitions and sources.
        semi_activated_threshold (`float`, *optional*): For `"threshold"` and `"credit"`: `confidence_threshold` of the
            blocks that are not fully activated; the same one by default.
        credit_decay, credit_strength (`float`, *optional*): For `"credit"`: the share of its credit that a token keeps
            from step to step, beta (default 0.7), and how much the credit raises its probability, alpha (default
            0.65; 0 not at all). The raised probability also decides which token a fully activated block must accept,
            so `token_ranking` is not used.
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
            become masks again when the model gives them a probability below it, each position at most once. Streamers
            and stopping criteria are told about a block once it is final. Without it, or with 0, tokens stay. Not
            together with `num_branches`.

    Raises:
        ValueError: for a value that is out of range, or an argument that is not used or not supported here.
    """

    decoding: Annotated[str | None, Option(one_of(*DECODING_MODES), default="d2f")]
    block_size: Annotated[
        int | None, Option(integer_from(1), {"autoregressive": _ONE_TOKEN_AT_A_TIME["autoregressive"]})
    ]
    block_add_threshold: Annotated[float | None, Option(SHARE, _ONE_BLOCK_AT_A_TIME, 0.1)]
    block_activation_threshold: Annotated[float | None, Option(SHARE, _ONE_BLOCK_AT_A_TIME, 0.95)]
    confidence_threshold: Annotated[
        float | None,
        Option(SHARE, {"vanilla": "`steps` says how many tokens each step accepts", **_ONE_TOKEN_AT_A_TIME}, 0.9),
    ]
    token_ranking: Annotated[str | None, Option(one_of(*TOKEN_RANKINGS), _ONE_TOKEN_AT_A_TIME, "probability")]
    max_active_blocks: Annotated[int | None, Option(integer_from(1), _ONE_BLOCK_AT_A_TIME)]
    sub_block_size: Annotated[int | None, Option(integer_from(1), _of_d2f("it accepts by a rule of its own"))]
    first_token_alone: Annotated[bool | None, Option(TRUE_OR_FALSE, _of_d2f("it accepts by a rule of its own"))]
    output_trace: Annotated[bool | None, Option(TRUE_OR_FALSE, _NO_WINDOWS, False)]
    draft_length: Annotated[int | None, Option(integer_from(1), _OF_DRAFTS, 32)]
    num_draft_steps: Annotated[int | None, Option(integer_from(1), _OF_DRAFTS, 1)]
    draft_layout: Annotated[str | None, Option(one_of(*DRAFT_LAYOUTS), _OF_DRAFTS, "linear")]
    verification_tolerance: Annotated[float | None, Option(SHARE, _OF_DRAFTS, 0.0)]
    steps: Annotated[
        int | None,
        Option(
            integer_from(1),
            {
                "d2f": "it takes as many as it needs; `confidence_threshold` trades speed for quality",
                **_ONE_TOKEN_AT_A_TIME,
            },
        ),
    ]
    unmask_schedule: Annotated[
        str | None,
        Option(
            one_of(*UNMASK_SCHEDULES),
            {
                "d2f": "the thresholds decide what is accepted",
                "fast_dllm": "`confidence_threshold` decides what is accepted, or `steps` how much",
                **_ONE_TOKEN_AT_A_TIME,
            },
        ),
    ]
    ranking_temperature: Annotated[
        float | None,
        Option(FROM_ZERO, dict.fromkeys(("d2f", "fast_dllm", "autoregressive", "verified"), _SAMPLED_TOKENS)),
    ]
    block_cache: Annotated[
        str | None,
        Option(
            one_of(*BLOCK_CACHES),
            {
                "d2f": "keys and values of a decoded block never change, so all are kept",
                "vanilla": "nothing is kept from one forward to the next",
                **_ONE_TOKEN_AT_A_TIME,
            },
        ),
    ]
    acceptance_rule: Annotated[
        str | None, Option(one_of(*ACCEPTANCE_RULES), _of_d2f("it accepts by a rule of its own"))
    ]
    steps_per_block: Annotated[int | None, Option(integer_from(1), _OF_A_RULE)]
    semi_activated_threshold: Annotated[float | None, Option(SHARE, _OF_A_RULE)]
    credit_decay: Annotated[float | None, Option(SHARE, _OF_A_RULE)]
    credit_strength: Annotated[float | None, Option(AMOUNT, _OF_A_RULE)]
    confidence_factor: Annotated[float | None, Option(AMOUNT, _OF_A_RULE)]
    entropy_bound: Annotated[float | None, Option(AMOUNT, _OF_A_RULE)]
    num_branches: Annotated[int | None, Option(integer_from(1), _of_d2f("it has no branches to choose from"))]
    remask_threshold: Annotated[float | None, Option(SHARE, _of_d2f("a token that it accepts stays"))]

    def __init__(self, **kwargs):
        for name in OPTIONS:
            setattr(self, name, kwargs.pop(name, None))
        # A config that says so loses what the base class does not know when it is loaded again.
        kwargs.pop("_from_model_config", None)
        super().__init__(**kwargs)

    def validate(self, *args, **kwargs):
        check_values(vars(self))
        super().validate(*args, **kwargs)
        for name, option in PARAMETERS.items():
            value = getattr(self, name, None)
            if value is not None and option.default is None and not (name == "guidance_scale" and value == 1):
                self.refuse_what_is_not_used(name, value)
        if self.output_trace:
            self.refuse_what_is_not_used("output_trace", True)
        if self.acceptance_rule is not None:
            self._refuse_what_belongs_to_other_rules(self.acceptance_rule)
        if self.num_branches not in (None, 1) and self.remask_threshold is not None:
            raise ValueError(
                f"`remask_threshold` (got {self.remask_threshold!r}) is not supported with `num_branches` (got "
                f"{self.num_branches}): branches are compared by what they have not decoded. Leave one of them out."
            )
        if self.decoding == "d2f" and self.token_ranking == "random":
            instead = "Leave it out, or take decoding='vanilla' or decoding='fast_dllm'."
            raise ValueError(f"`token_ranking` 'random' is not supported with decoding='d2f'. {instead}")
        if self.unmask_schedule == "independent" and self.ranking_temperature:
            raise ValueError(
                f"`ranking_temperature` (got {self.ranking_temperature}) is not used by "
                "unmask_schedule='independent', which does not rank. Leave it out."
            )

    def refuse_what_is_not_used(self, name: str, value: Any) -> None:
        """Refuses the `value` of a parameter that `decoding` does not use."""
        not_used_by = PARAMETERS[name].not_used_by
        if self.decoding in not_used_by:
            others = " or ".join(f"decoding={mode!r}" for mode in DECODING_MODES if mode not in not_used_by)
            raise ValueError(
                f"`{name}` (got {value!r}) is not used by decoding={self.decoding!r}: {not_used_by[self.decoding]}. "
                f"Leave it out, or take {others}."
            )

    def _refuse_what_belongs_to_other_rules(self, rule: str) -> None:
        for name in parameters_of_other_rules(rule):
            value = getattr(self, name)
            if value is not None:
                rules = " or ".join(f"acceptance_rule={other!r}" for other, p in ACCEPTANCE_RULES.items() if name in p)
                raise ValueError(
                    f"`{name}` (got {value!r}) is not used by acceptance_rule={rule!r}. Leave it out, or take {rules}."
                )
        of_the_rule = {"entropy_bound": "neg_entropy", "credit": "probability"}.get(rule)
        if of_the_rule is not None and self.token_ranking not in (None, "probability", of_the_rule):
            raise ValueError(
                f"`token_ranking` (got {self.token_ranking!r}) is not used by acceptance_rule={rule!r}, which "
                "ranks by itself. Leave it out, or take acceptance_rule='threshold' or 'factor'."
            )

    def refuse_keywords(self, keywords: Mapping[str, Any]) -> None:
        """Refuses `keywords` of a call that this config, which they went into, does not use.

        Those are the parameters that have a default. In a config they may be the values of another decoding.
        """
        for name, value in keywords.items():
            if value is not None and value is not False and name in OPTIONS:
                self.refuse_what_is_not_used(name, value)
        block_size = keywords.get("block_size")
        if block_size is not None and self.decoding == "verified" and keywords.get("verifier") is None:
            raise ValueError(
                f"`block_size` (got {block_size!r}) is not used by decoding='verified' without a `verifier`. Leave it "
                "out; `draft_length` says how many tokens are drafted."
            )
        threshold = keywords.get("confidence_threshold")
        if threshold is not None and self.acceptance_rule in ("entropy_bound", "factor", "sequential"):
            raise ValueError(
                f"`confidence_threshold` (got {threshold!r}) is not used by acceptance_rule={self.acceptance_rule!r}, "
                "which has a parameter of its own. Leave one of them out."
            )
        if threshold is not None and self.decoding == "fast_dllm" and self.steps is not None:
            raise ValueError(
                f"`confidence_threshold` (got {threshold!r}) is not used with `steps` (got {self.steps}), which fix "
                "how many tokens each step accepts. Leave one of them out."
            )

    def check_block_size(self) -> None:
        """Refuses options that do not go with `block_size`, once that is known."""
        steps, block_size = self.steps_per_block, self.block_size
        if steps is not None and block_size is not None and steps > block_size:
            raise ValueError(
                f"`steps_per_block` must be at most `block_size`, but they are {self.steps_per_block} and "
                f"{self.block_size}: each step accepts a token. Leave it out for one token per step at the least."
            )
        if self.sub_block_size is not None and self.block_size % self.sub_block_size:
            raise ValueError(
                f"`sub_block_size` must divide `block_size`, but they are {self.sub_block_size} and "
                f"{self.block_size}. Leave it out for blocks without parts."
            )

    def acceptance_options(self) -> dict[str, Any]:
        """What `acceptance_rules.accept` has to know: the rule, `confidence_threshold` and the rule's parameters."""
        rule = self.acceptance_rule or "threshold"
        values = {name: getattr(self, name) for name in ("confidence_threshold", *ACCEPTANCE_RULES[rule])}
        return {"acceptance_rule": rule, **{name: value for name, value in values.items() if value is not None}}

    def with_defaults(self) -> "D2FGenerationConfig":
        """This config with the paper's values where it says nothing."""
        for name, option in OPTIONS.items():
            if getattr(self, name) is None:
                setattr(self, name, option.default)
        self.validate()
        if self.decoding == "d2f":
            self._refuse_what_belongs_to_other_rules(self.acceptance_rule or "threshold")
        return self

    def to_diff_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().to_diff_dict().items() if k not in OPTIONS or v is not None}

    @classmethod
    def from_file_of_any_version(cls, config: GenerationConfig) -> "D2FGenerationConfig":
        """What a file says, with the paper's values where it says nothing.

        What is not used by its decoding is left out. The rest is checked by `generate`, so that any model loads.
        """
        loaded = cls()
        vars(loaded).update(vars(config))
        for name, option in OPTIONS.items():
            if getattr(loaded, name) is None:
                setattr(loaded, name, option.default)
        for name in (*parameters_not_used_by(loaded.decoding), *parameters_of_other_rules(loaded.acceptance_rule)):
            if name in OPTIONS and getattr(loaded, name) is not None:
                logger.warning_once(f"`{name}` of generation_config.json is not used by its decoding and left out.")
            setattr(loaded, name, None)
        loaded._original_object_hash = hash(loaded)
        return loaded

    @classmethod
    def from_model_config(cls, model_config) -> "D2FGenerationConfig":
        """The config of a model that has none yet: its special tokens, and D2F decoding with the paper's values."""
        values = GenerationConfig.from_model_config(model_config).to_dict()
        # What a forward gives besides logits is a matter of the model's own configuration.
        others = ("output_attentions", "output_hidden_states", "return_dict_in_generate")
        config = cls.from_dict({name: v for name, v in values.items() if name not in others}).with_defaults()
        # Original configurations turn the cache off, because their own code has none.
        config.use_cache = None
        config._original_object_hash = hash(config)
        return config


# All options, by name, as `D2FGenerationConfig` declares them.
OPTIONS: dict[str, Option] = {
    name: annotation.__metadata__[0] for name, annotation in inspect.get_annotations(D2FGenerationConfig).items()
}
# The same, and the parameters of `GenerationConfig` that are checked here too.
PARAMETERS: dict[str, Option] = {
    **OPTIONS,
    "max_new_tokens": Option(integer_from(1)),
    "max_length": Option(integer_from(1)),
    **dict.fromkeys(("min_new_tokens", "min_length"), Option(integer_from(0))),
    "num_return_sequences": Option(integer_from(1)),
    "max_time": Option(Check("a number of seconds", is_number)),
    **dict.fromkeys(("use_cache", "do_sample", "output_scores", "output_logits"), Option(TRUE_OR_FALSE)),
    "eos_token_id": Option(TOKEN_IDS),
    "pad_token_id": Option(Check("a token id, which is an integer", is_integer)),
    "guidance_scale": Option(
        FINITE,
        {
            "d2f": "guidance needs a second forward over a prompt that is masked",
            "fast_dllm": "guidance needs a second forward over a prompt that is masked, and a cache of its own",
            **dict.fromkeys(("autoregressive", "verified"), "guidance needs a second forward over another prompt"),
        },
    ),
    "compile_config": Option(
        Check("a `CompileConfig`", lambda value: isinstance(value, CompileConfig)),
        dict.fromkeys(("vanilla", "fast_dllm"), "only forwards over windows are compiled"),
    ),
    "cache_implementation": Option(Check("'static' or left out, as D2F makes its own cache", lambda v: v == "static")),
    # Those of transformers' other decoders, with the values that ask for nothing.
    **dict.fromkeys(
        "dola_layers prompt_lookup_num_tokens watermarking_config force_words_ids constraints decoder_start_token_id "
        "prefill_chunk_size cache_config".split(),
        Option(left_out()),
    ),
    **dict.fromkeys(
        "low_memory token_healing output_attentions output_hidden_states early_stopping is_assistant".split(),
        Option(left_out(False)),
    ),
    **dict.fromkeys(("penalty_alpha", "encoder_no_repeat_ngram_size", "diversity_penalty"), Option(left_out(0))),
    **dict.fromkeys(("encoder_repetition_penalty", "num_beam_groups", "length_penalty"), Option(left_out(1))),
}

# Of these, what changes nothing where there are no beams and no encoder. A model's own config may have it.
_OF_BEAMS_AND_ENCODERS = (
    "early_stopping length_penalty num_beam_groups diversity_penalty low_memory is_assistant cache_config "
    "prefill_chunk_size decoder_start_token_id encoder_repetition_penalty encoder_no_repeat_ngram_size"
).split()


def check_values(values: Mapping[str, Any]) -> None:
    """Refuses `values` of parameters, by name, that are not what they must be, whatever the others are."""
    for name, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"`{name}` must be a number, got {value!r}. Leave it out for the default.")
        option = PARAMETERS.get(name)
        if option is not None and value is not None and not option.check.is_met_by(value):
            default = "" if option.default is None else f", {option.default!r}"
            raise ValueError(
                f"`{name}` must be {option.check.must_be}, got {value!r}. Leave it out for the default{default}."
            )


def parameters_of_other_rules(acceptance_rule: str | None) -> tuple[str, ...]:
    """The parameters that this `acceptance_rule` does not use; `None` is the default, `"threshold"`."""
    own = ACCEPTANCE_RULES.get(str(acceptance_rule or "threshold"), ())
    return tuple(dict.fromkeys(name for names in ACCEPTANCE_RULES.values() for name in names if name not in own))


def parameters_not_used_by(decoding: str) -> tuple[str, ...]:
    """The parameters without a default that this `decoding` does not use."""
    not_used = (name for name, o in PARAMETERS.items() if o.default is None and str(decoding) in o.not_used_by)
    return (*not_used, *_OF_BEAMS_AND_ENCODERS)
