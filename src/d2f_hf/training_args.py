"""The arguments of `D2FTrainer`."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from d2f_hf.clean_context import check_clean_context
from d2f_hf.data import EOS_TAILS
from d2f_hf.losses import DIVERGENCES, WEIGHTINGS

OBJECTIVES = ("distillation", "masked_diffusion")
# Released adapters were trained with 0.2 to 0.7 (the paper says 0.3 to 0.7); LLaDA's own objective uses all of (0, 1].
DEFAULT_MASK_RATIOS = {"distillation": (0.2, 0.7), "masked_diffusion": (0.0, 1.0)}


@dataclass
class D2FTrainingArguments(TrainingArguments):
    r"""
    The arguments of [`D2FTrainer`]: those of `TrainingArguments`, and the following.

    Those of `TrainingArguments` work as there, with these exceptions. `remove_unused_columns`, `label_names`,
    `use_liger_kernel` and a `parallelism_config` that splits sequences are refused. `label_smoothing_factor` smooths
    the true tokens, so for distillation it needs a `label_weight`. `use_cache` has no effect.

    Args:
        objective (`str`, *optional*, defaults to `"distillation"`):
            `"distillation"`: the asymmetric distillation of D2F (Algorithm 1 of arXiv 2508.09192).
            `"masked_diffusion"`: LLaDA's own objective (arXiv 2502.09992), which makes a bidirectional teacher.
        block_size (`int`, *optional*):
            Tokens per response block K; the model's `config.block_size` by default. Distillation with another one
            writes it into the model's configuration when it starts, so that the model is saved with what it was
            trained for.
        max_length (`int`, *optional*):
            Longest prompt and response together, in tokens; responses are cut there, also those of datasets that are
            tokenized already. No limit by default.
        mask_ratio_low (`float`, *optional*), mask_ratio_high (`float`, *optional*):
            Bounds of the mask ratios: 0.2 and 0.7 by default for distillation, 0 and 1 for masked diffusion.
        decoding_probability (`float`, *optional*, defaults to 0.0):
            Share of the rows that look as in decoding: clean up to some position, noisy from there. See
            [`D2FNoisingCollator`].
        causal_probability (`float`, *optional*, defaults to 0.0):
            For masked diffusion of a model that starts from an autoregressive one: share of the rows that are trained
            as that one was, with causal attention and nothing masked, so that it is not forgotten.
        clean_context (`bool`, *optional*):
            For masked diffusion: each response block has a mask ratio of its own, and sees itself and the *clean*
            blocks before it, as in decoding block by block. The model is fed noisy and clean sequence together, twice
            as many tokens. By default this is so for a model with `block_alignment="sequence"`, which can be trained
            in no other way, and not so for others, which are trained bidirectionally.
        complementary_masks (`bool`, *optional*, defaults to `False`):
            With clean context: each row has a second noisy sequence with the masks where the first has none. Each
            response token is then predicted exactly once, and all weigh the same. It is fed three times as many tokens
            instead of two. Fast-dLLM v2 was trained so.
        divergence (`str`, *optional*, defaults to `"cross_entropy"`):
            For distillation, see [`~losses.token_divergence`].
        weighting (`str`, *optional*, defaults to `"inverse_mask_ratio"`):
            For distillation, see [`~losses.distillation_loss`].
        label_weight (`float`, *optional*, defaults to 0.0):
            For distillation: weight w of the true tokens. The loss is (1 - w) times the divergence from the teacher
            plus w times the cross-entropy to the true tokens / mask ratio. Not in the paper.
        eos_tail (`str`, *optional*, defaults to `"batch"`):
            How far EOS tokens follow a response, see [`D2FDataCollator`]. In evaluation `"batch"` means `"block"`, so
            that the loss of a row does not depend on its batch.

    Raises:
        ValueError: If a value is unknown or out of range.
    """

    objective: str = field(default="distillation", metadata={"help": "'distillation' or 'masked_diffusion'."})
    block_size: int | None = field(default=None, metadata={"help": "Tokens per response block."})
    max_length: int | None = field(default=None, metadata={"help": "Longest prompt and response together, in tokens."})
    mask_ratio_low: float | None = field(default=None, metadata={"help": "Lower bound of the mask ratios."})
    mask_ratio_high: float | None = field(default=None, metadata={"help": "Upper bound of the mask ratios."})
    decoding_probability: float = field(default=0.0, metadata={"help": "Share of the rows that look as in decoding."})
    causal_probability: float = field(
        default=0.0, metadata={"help": "Masked diffusion: share of the rows trained autoregressively."}
    )
    clean_context: bool | None = field(
        default=None, metadata={"help": "Masked diffusion: noisy blocks see the clean blocks before them."}
    )
    complementary_masks: bool = field(
        default=False, metadata={"help": "Clean context: each response token is masked in one of two sequences."}
    )
    divergence: str = field(default="cross_entropy", metadata={"help": f"One of {', '.join(DIVERGENCES)}."})
    weighting: str = field(default="inverse_mask_ratio", metadata={"help": f"One of {', '.join(WEIGHTINGS)}."})
    label_weight: float = field(default=0.0, metadata={"help": "Distillation: weight of the true tokens."})
    eos_tail: str = field(default="batch", metadata={"help": "'batch', 'block' or 'none'."})
    # The dataset's columns are not arguments of the model's forward: the collator turns them into such.
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay False."})
    label_names: list[str] | None = field(default_factory=lambda: ["labels"])

    def __post_init__(self):
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f"`objective` must be one of {OBJECTIVES}, got {self.objective!r}. Leave it out to distil."
            )
        if self.divergence not in DIVERGENCES:
            raise ValueError(
                f"`divergence` must be one of {DIVERGENCES}, got {self.divergence!r}. Leave it out for the default."
            )
        if self.weighting not in WEIGHTINGS:
            raise ValueError(
                f"`weighting` must be one of {WEIGHTINGS}, got {self.weighting!r}. Leave it out for the default."
            )
        if self.eos_tail not in EOS_TAILS:
            raise ValueError(
                f"`eos_tail` must be one of {EOS_TAILS}, got {self.eos_tail!r}. Leave it out for the default."
            )
        if self.remove_unused_columns:
            raise ValueError(
                "`remove_unused_columns` must be False, got True: it would drop the columns that the collator needs. "
                "Leave it out."
            )
        if self.label_names is None:
            self.label_names = ["labels"]
        if self.label_names != ["labels"]:
            raise ValueError(
                f"`label_names` must be ['labels'], got {self.label_names!r}: the labels are the tokens that were "
                "masked, and are made with the noise. Leave it out."
            )
        if self.use_liger_kernel:
            raise ValueError(
                "`use_liger_kernel` must be False, got True: Liger has no kernels for block-diffusion models. "
                "Leave it out."
            )
        for name in ("cp_size", "sp_size"):
            size = getattr(self.parallelism_config, name, None)
            if size is not None and size > 1:
                raise ValueError(
                    f"`parallelism_config.{name}` must be 1, got {size}: sequences cannot be split across devices, "
                    "because the teacher's tokens see all of their sequence. Split parameters or data instead."
                )
        low, high = DEFAULT_MASK_RATIOS[self.objective]
        self.mask_ratio_low = low if self.mask_ratio_low is None else self.mask_ratio_low
        self.mask_ratio_high = high if self.mask_ratio_high is None else self.mask_ratio_high
        if not 0.0 <= self.mask_ratio_low <= self.mask_ratio_high <= 1.0 or self.mask_ratio_high == 0.0:
            raise ValueError(
                "`mask_ratio_low` and `mask_ratio_high` must satisfy 0 <= low <= high <= 1 and high > 0, "
                f"got {self.mask_ratio_low} and {self.mask_ratio_high}. They are shares of masked tokens."
            )
        for name in ("decoding_probability", "causal_probability"):
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"`{name}` must be in [0, 1], got {share}. It is a share of rows.")
        if not 0.0 <= self.label_weight <= 1.0 or (self.label_weight > 0.0 and self.objective != "distillation"):
            raise ValueError(
                f"`label_weight` must be in [0, 1], and 0 unless objective='distillation', got {self.label_weight} "
                f"with objective={self.objective!r}. Leave it out for the paper's loss."
            )
        if self.causal_probability > 0.0 and self.objective != "masked_diffusion":
            raise ValueError(
                f"`causal_probability` (got {self.causal_probability}) is not supported with "
                f"objective={self.objective!r}. Leave it out."
            )
        if not 0.0 <= self.label_smoothing_factor < 1.0:
            raise ValueError(
                f"`label_smoothing_factor` must be in [0, 1), got {self.label_smoothing_factor}. It is a share of "
                "probability."
            )
        if self.label_smoothing_factor > 0.0 and self.objective == "distillation" and self.label_weight == 0.0:
            raise ValueError(
                f"`label_smoothing_factor` (got {self.label_smoothing_factor}) has no effect on the divergence from "
                "the teacher. Set `label_weight` above 0, which mixes in the true tokens, or leave it out."
            )
        for name, allowed in (("clean_context", (None, True, False)), ("complementary_masks", (True, False))):
            if not any(getattr(self, name) is value for value in allowed):
                raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(self, name)!r}. Leave it out.")
        if self.clean_context is not None or self.complementary_masks:  # otherwise the model decides
            check_clean_context(self, self.clean_context is not False)
        for name, least, default in (("block_size", 1, "the model's own"), ("max_length", 2, "no limit")):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(
                    f"`{name}` must be an integer of at least {least}, got {value!r}. Leave it out for {default}."
                )
