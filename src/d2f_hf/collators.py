"""The collators of `D2FTrainer`: the one that was given or the default, and the noise that is added to its batches."""

from typing import Any

from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from d2f_hf.clean_context import block_alignment_of, has_clean_context
from d2f_hf.data import D2FDataCollator
from d2f_hf.noising import D2FNoisingCollator
from d2f_hf.training_args import D2FTrainingArguments


def given_collator(data_collator: Any) -> tuple[D2FDataCollator | None, int | None]:
    """The collator for clean batches, `None` for the default, and the `pad_to_multiple_of` of the default.

    A stock collator that only pads means the default.
    """
    if type(data_collator) is DataCollatorWithPadding and data_collator.padding in (True, "longest"):
        return None, data_collator.pad_to_multiple_of
    if data_collator is not None and not hasattr(data_collator, "block_size"):
        raise ValueError(
            f"`data_collator` must be a `D2FDataCollator`, got a {type(data_collator).__name__}: the loss needs "
            "to know where prompts end, and noise is added to the clean batch. Leave it out for the default."
        )
    return data_collator, None


def default_collator(
    args: D2FTrainingArguments,
    config: Any,
    block_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
    pad_to_multiple_of: int | None,
) -> D2FDataCollator:
    """The collator for clean batches that is taken when none is given."""
    return D2FDataCollator(
        block_size=block_size,
        eos_token_id=_eos_token_id(tokenizer, config),
        pad_token_id=_first(config.pad_token_id),
        eos_tail=args.eos_tail,
        pad_to_multiple_of=pad_to_multiple_of,
        block_alignment=block_alignment_of(config),
    )


def noising_collator(clean: D2FDataCollator, args: D2FTrainingArguments, config: Any) -> D2FNoisingCollator:
    """The collator for training: clean batches, with the noise that the arguments ask for."""
    return D2FNoisingCollator(
        clean,
        objective=args.objective,
        mask_token_id=config.mask_token_id,
        mask_ratio_low=args.mask_ratio_low,
        mask_ratio_high=args.mask_ratio_high,
        decoding_probability=args.decoding_probability,
        causal_probability=args.causal_probability,
        clean_context=has_clean_context(args, config),
        complementary_masks=args.complementary_masks,
        block_alignment=block_alignment_of(config),
        seed=args.data_seed if args.data_seed is not None else args.seed,
    )


def _eos_token_id(tokenizer: PreTrainedTokenizerBase | None, config: Any) -> int:
    eos_token_id: Any = tokenizer.eos_token_id if tokenizer is not None else _first(config.eos_token_id)
    if eos_token_id is None:
        raise ValueError(
            "The tokenizer or `model.config.eos_token_id` must name the EOS token, which ends a response; neither "
            "does. Set one of them."
        )
    return eos_token_id


def _first(token_id: int | list[int] | None) -> int | None:
    return token_id[0] if isinstance(token_id, list) else token_id
