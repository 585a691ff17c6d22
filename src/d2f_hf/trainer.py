"""`D2FTrainer`: the training step of D2F on the stock `Trainer`, from top to bottom."""

# B batch, L sequence, V vocabulary, M masked tokens of the batch

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback

from d2f_hf.data import D2FDataCollator, D2FNoisingCollator, tokenize_example
from d2f_hf.losses import distillation_loss, masked_diffusion_loss
from d2f_hf.modeling import predicting_positions
from d2f_hf.training_args import D2FTrainingArguments


class D2FTrainer(Trainer):
    r"""
    Makes a D2F student of a diffusion language model (Algorithm 1 of arXiv 2508.09192), or trains the latter itself.

    With `args.objective="distillation"` the student is the model with a LoRA adapter and block-causal attention, the
    teacher the same weights without the adapter and with bidirectional attention. With `"masked_diffusion"` there is
    no teacher, and the model is trained as it is, bidirectionally.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A model of [`d2f_hf.modeling`]. For distillation a plain model gets the adapter of `peft_config`.
        args (`D2FTrainingArguments`):
            The arguments.
        train_dataset, eval_dataset (*optional*):
            Datasets of `prompt` and `completion`, of `messages`, or of `input_ids` and `prompt_length`; see
            [`tokenize_example`].
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer. Needed unless the datasets are tokenized.
        teacher_model (`PreTrainedModel`, *optional*):
            Another teacher, which allows to distil without an adapter.
        peft_config (`LoraConfig`, *optional*):
            The adapter. By default the paper's: rank 32, alpha 32, dropout 0.1 on the attention projections.
        data_collator (`D2FDataCollator`, *optional*):
            Makes the clean batches; noise is added to them. By default one with the arguments' `block_size` and
            `eos_tail`.
        callbacks (`list[TrainerCallback]`, *optional*), kwargs:
            As in `Trainer`.

    Raises:
        ValueError: If the model has no mask token, raw datasets come without a tokenizer, or arguments contradict each
            other.
    """

    # The loss is a sum over the accumulated batch, divided by its number of tokens.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: D2FTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        teacher_model: PreTrainedModel | None = None,
        peft_config: LoraConfig | None = None,
        data_collator: D2FDataCollator | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **kwargs,
    ):
        if not isinstance(args, D2FTrainingArguments):
            raise ValueError(f"`args` must be a `D2FTrainingArguments`, got a {type(args).__name__}.")
        config: Any = model.config
        if not hasattr(config, "mask_token_id"):
            raise ValueError(
                f"`model` must be a block-diffusion model, got a {type(model).__name__}. `load_d2f_model` loads one."
            )
        if config.mask_token_id is None:
            raise ValueError("`model.config.mask_token_id` must be set, got None. Set it to the id of the mask token.")
        # Not into `args`, which may serve another model next.
        self.block_size: int = config.block_size if args.block_size is None else args.block_size
        is_distillation = args.objective == "distillation"
        if args.causal_probability > 0.0 and not config.right_shift_logits:
            raise ValueError(
                f"`causal_probability` (got {args.causal_probability}) needs a model with "
                "`config.right_shift_logits`: other logits predict a token that they have seen. Leave it out."
            )
        if peft_config is not None and isinstance(model, PeftModel):
            raise ValueError("`peft_config` must be None for a model that has an adapter already. Leave it out.")
        if teacher_model is not None and not is_distillation:
            raise ValueError(f"`teacher_model` has no meaning with objective={args.objective!r}. Leave it out.")
        wants_adapter = peft_config is not None or (is_distillation and teacher_model is None)
        if wants_adapter and not isinstance(model, PeftModel):
            default = LoraConfig(
                r=32, lora_alpha=32, lora_dropout=0.1, target_modules=list(config.attention_projections)
            )
            model = get_peft_model(model, peft_config or default)
            if args.gradient_checkpointing:
                model.enable_input_require_grads()
        if data_collator is None:
            data_collator = D2FDataCollator(
                block_size=self.block_size,
                eos_token_id=_eos_token_id(processing_class, config),
                pad_token_id=_first(config.pad_token_id),
                eos_tail=args.eos_tail,
            )
        elif data_collator.block_size != self.block_size:
            raise ValueError(
                f"`data_collator.block_size` ({data_collator.block_size}) must be the block size of the attention "
                f"({self.block_size}). Give both the same, with `args.block_size`."
            )
        noising = D2FNoisingCollator(
            data_collator,
            objective=args.objective,
            mask_token_id=config.mask_token_id,
            mask_ratio_low=args.mask_ratio_low,
            mask_ratio_high=args.mask_ratio_high,
            decoding_probability=args.decoding_probability,
            causal_probability=args.causal_probability,
            seed=args.data_seed if args.data_seed is not None else args.seed,
        )
        self.right_shift_logits: bool = config.right_shift_logits
        super().__init__(
            model=model,
            args=args,
            data_collator=noising,
            train_dataset=_tokenize_dataset(train_dataset, processing_class, args),
            eval_dataset=_tokenize_dataset(eval_dataset, processing_class, args),
            processing_class=processing_class,
            callbacks=[_NewNoiseEachEpoch(noising), *(callbacks or [])],
            **kwargs,
        )
        # The Trainer counts the labels of the whole accumulated batch and passes the count to `compute_loss`.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = False
        if teacher_model is not None:
            teacher_model = self.accelerator.prepare_model(teacher_model.eval(), evaluation_mode=True)
        self.teacher_model = teacher_model

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        r"""
        The loss of a batch of [`D2FNoisingCollator`], in which the tokens are masked already (Algorithm 1, lines 4-5).

        1. The teacher, bidirectional, sees the whole noisy sequence.
        2. The student, block-causal, sees it up to the end of a token's own block.
        3. The divergence of the two over the masked tokens (Eq. 3); with `label_weight`, mixed with the student's
           cross-entropy to the true tokens.

        For masked diffusion: the bidirectional model's cross-entropy to the true tokens.
        """
        is_masked = inputs["is_masked"]  # [B, L]
        mask_ratios = inputs["mask_ratios"][is_masked]  # [M]
        if num_items_in_batch is None:
            num_items_in_batch = (inputs["labels"] != -100).sum()
        sequence = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        sequence["logits_to_keep"] = predicting_positions(is_masked, self.right_shift_logits)
        if self.args.objective == "masked_diffusion":
            if self.args.causal_probability > 0.0:
                sequence["attention_mask"] = _causal_where(inputs["is_causal"], inputs["attention_mask"])
            logits = model(**sequence).logits  # [M, V]
            loss = masked_diffusion_loss(
                logits, inputs["labels"][is_masked], mask_ratios, num_items=num_items_in_batch
            )
        else:
            with torch.no_grad(), self._teacher_weights(model):
                teacher = self.teacher_model if self.teacher_model is not None else model
                teacher_logits = teacher(**sequence).logits  # [M, V]
            logits = model(
                **sequence, prompt_lengths=inputs["prompt_lengths"], block_size=self.block_size
            ).logits  # [M, V]
            loss = distillation_loss(
                logits,
                teacher_logits,
                mask_ratios,
                divergence=self.args.divergence,
                weighting=self.args.weighting,
                num_items=num_items_in_batch,
            )
            if self.args.label_weight > 0.0:
                label_loss = masked_diffusion_loss(
                    logits, inputs["labels"][is_masked], mask_ratios, num_items=num_items_in_batch
                )
                loss = (1.0 - self.args.label_weight) * loss + self.args.label_weight * label_loss
        if self.args.average_tokens_across_devices and model.training:
            # The processes' gradients are averaged, but the count is that of all processes.
            loss = loss * self.accelerator.num_processes
        return (loss, {"logits": logits}) if return_outputs else loss

    def _teacher_weights(self, model: nn.Module) -> AbstractContextManager:
        """Inside it the student computes as the teacher: its adapter is off, and so is dropout."""
        if self.teacher_model is not None:
            return nullcontext()
        return _as_teacher(self.accelerator.unwrap_model(model, keep_torch_compile=False))

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of an evaluation batch; logits at masked tokens have no common shape to gather."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach().mean(), None, None


def _causal_where(is_causal: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """A `[B, 1, L, L]` mask: padding is not seen, and rows with `is_causal` `[B]` do not see what comes later."""
    length = attention_mask.shape[1]
    no_future = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    allowed = attention_mask.bool()[:, None, :] & (no_future | ~is_causal[:, None, None])  # [B, L, L]
    return allowed[:, None]


@contextmanager
def _as_teacher(model: Any) -> Iterator[None]:
    """Turns the adapter and the dropout of a `PeftModel` off."""
    was_training = model.training
    model.eval()
    try:
        with model.disable_adapter():
            yield
    finally:
        model.train(was_training)


class _NewNoiseEachEpoch(TrainerCallback):
    def __init__(self, noising: D2FNoisingCollator):
        self.noising = noising

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.noising.epoch = int(state.epoch or 0)


def _tokenize_dataset(dataset: Any, tokenizer: PreTrainedTokenizerBase | None, args: D2FTrainingArguments) -> Any:
    """The dataset with `input_ids` and `prompt_length`, tokenizing it if it has neither."""
    columns = getattr(dataset, "column_names", None)
    if dataset is None or not columns or "input_ids" in columns:
        return dataset
    if tokenizer is None:
        raise ValueError(
            "`processing_class` must be a tokenizer for a dataset that is not tokenized, got None. "
            "Pass the tokenizer, or map the dataset with `tokenize_example`."
        )
    return dataset.map(
        tokenize_example,
        fn_kwargs={"tokenizer": tokenizer, "max_length": args.max_length},
        remove_columns=columns,
        desc="Tokenizing",
    )


def _first(token_id: int | list[int] | None) -> int | None:
    return token_id[0] if isinstance(token_id, list) else token_id


def _eos_token_id(tokenizer: PreTrainedTokenizerBase | None, config: Any) -> int:
    eos_token_id: Any = tokenizer.eos_token_id if tokenizer is not None else _first(config.eos_token_id)
    if eos_token_id is None:
        raise ValueError(
            "The tokenizer or `model.config.eos_token_id` must name the EOS token, which ends a response; neither "
            "does. Set one of them."
        )
    return eos_token_id
