"""`D2FTrainer`: the training step of D2F on the stock `Trainer`, from top to bottom."""

# B batch, L sequence, V vocabulary, M masked tokens of the batch, K block size, N blocks, P averages

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.modeling_outputs import ModelOutput
from transformers.trainer_utils import EvalLoopOutput, has_length

from d2f_hf.clean_context import block_alignment_of, clean_context_sequence, has_clean_context, with_clean_part
from d2f_hf.collators import default_collator, given_collator, noising_collator
from d2f_hf.data import D2FDataCollator, tokenize_dataset
from d2f_hf.loading import load_d2f_model
from d2f_hf.losses import mean_loss, token_cross_entropy, token_divergence, weighted
from d2f_hf.modeling import predicting_positions
from d2f_hf.noising import causal_attention_mask
from d2f_hf.student import (
    base_model,
    check_arguments,
    check_model_init,
    check_models,
    check_optimizer,
    check_what_is_trained,
    make_student,
    without_adapters,
    without_dropout,
)
from d2f_hf.training_args import D2FTrainingArguments
from d2f_hf.training_log import added, losses_of_rows, means, row_averages, sum_per_row, total_of_rows


@dataclass
class D2FTrainingOutput(ModelOutput):
    """What `D2FTrainer.compute_loss` returns besides the loss, and what a `compute_loss_func` gets.

    Args:
        logits (`torch.Tensor` of shape `[M, V]`):
            The student's logits at the masked tokens, in the order of the rows.
        teacher_logits (`torch.Tensor` of shape `[M, V]`, *optional*):
            The teacher's logits at the same tokens. Only for distillation.
        mask_ratios (`torch.Tensor` of shape `[M]`):
            The mask ratio that each of these tokens was masked with.
        averages (`torch.Tensor` of shape `[B, P, 2]`, *optional*):
            Sum and count of each average that is logged, row by row: loss, mask ratio; for distillation also agreement
            and the divergences of block 0, block 1 and so on.
    """

    logits: torch.Tensor | None = None
    teacher_logits: torch.Tensor | None = None
    mask_ratios: torch.Tensor | None = None
    averages: torch.Tensor | None = None


class D2FTrainer(Trainer):
    r"""
    Makes a D2F student of a diffusion language model (Algorithm 1 of arXiv 2508.09192), or trains that model itself.

    With `args.objective="distillation"` the student is the model with a LoRA adapter and block-causal attention, the
    teacher the same weights without the adapter and with bidirectional attention. With `"masked_diffusion"` there is
    no teacher, and the model is trained as it is, bidirectionally; or with `args.clean_context`, which is the default
    for a model with `block_alignment="sequence"`, block by block.

    Besides what the `Trainer` logs, there are, averaged since the last log and with `eval_` in front in evaluation:

    - `mask_ratio`: the mask ratios that the response tokens were masked with.
    - `agreement` (distillation): the share of masked tokens to which student and teacher give the same best token.
    - `divergence_block_0`, `divergence_block_1`, ... (distillation): `args.divergence` of the two per masked token, in
      nats, in the first, second, ... block of a response.

    Evaluation puts the same noise on a row whatever epoch, process or batch it is in. `eval_loss` is the mean over all
    tokens of the dataset. So equal weights give an equal `eval_loss`, whatever the batch size.

    Args:
        model (`PreTrainedModel`, `PeftModel`, `str` or `os.PathLike`, *optional*):
            A model of [`d2f_hf.modeling`], or the folder or Hub id of one, which [`load_d2f_model`] loads. For
            distillation a plain model gets the adapter of `peft_config`. An adapter that was loaded for inference is
            made trainable. `None` with a `model_init`.
        args (`D2FTrainingArguments`, *optional*):
            The arguments.
        train_dataset, eval_dataset (*optional*):
            Datasets of `prompt` and `completion`, of `messages`, or of `input_ids` and `prompt_length`; see
            [`tokenize_example`]. They may be streamed. `eval_dataset` may be a dictionary of them. What is given to
            `evaluate` and `predict` may be the same.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer. Needed unless the datasets are tokenized.
        teacher_model (`PreTrainedModel`, `str` or `os.PathLike`, *optional*):
            Another teacher, which allows to distil without an adapter.
        peft_config (`PeftConfig`, *optional*):
            The adapter. By default the paper's: rank 32, alpha 32, dropout 0.1 on the attention projections.
        data_collator (`D2FDataCollator`, *optional*):
            Makes the clean batches; noise is added to them. By default one with the arguments' `block_size` and
            `eos_tail`. A stock `DataCollatorWithPadding`, which only pads, means the default with its
            `pad_to_multiple_of`.
        callbacks (`list[TrainerCallback]`, *optional*):
            As in `Trainer`.
        kwargs:
            As in `Trainer`. `compute_metrics` gets `predictions`, the logits `[rows, L, V]`, and `label_ids`
            `[rows, L]`: the true tokens at the masked positions, -100 elsewhere and in padding, where the logits are
            -100 too. Logits that predict the next token stand at the token that they predict.
            `preprocess_logits_for_metrics` gets the same for a batch, and can keep the memory low, for instance with
            `lambda logits, labels: logits.argmax(-1)`. `compute_loss_func(outputs, labels, num_items_in_batch)` takes
            the place of the loss, with a [`D2FTrainingOutput`] and the true tokens `[M]`; evaluation calls it row by
            row.

    Raises:
        ValueError: If the model has no mask token, nothing in it can be trained, raw datasets come without a
            tokenizer, or arguments contradict each other.
    """

    # The loss is a sum over the accumulated batch, divided by its number of tokens.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | PeftModel | str | PathLike | None = None,
        args: D2FTrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        teacher_model: PreTrainedModel | str | PathLike | None = None,
        peft_config: PeftConfig | None = None,
        data_collator: D2FDataCollator | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **kwargs,
    ):
        # 1. The arguments.
        if args is None:
            args = D2FTrainingArguments(output_dir="tmp_trainer")
        check_arguments(args, model, kwargs.get("model_init"), teacher_model, peft_config)
        self._clean_collator, self._pad_to_multiple_of = given_collator(data_collator)
        if isinstance(train_dataset, Mapping):
            raise ValueError(
                f"`train_dataset` must be one dataset, got a {type(train_dataset).__name__} of "
                f"{sorted(train_dataset)}. Pass one of them."
            )
        if kwargs.get("compute_loss_func") is not None:
            for name in ("label_weight", "label_smoothing_factor"):
                if getattr(args, name) > 0.0:
                    raise ValueError(
                        f"`{name}` (got {getattr(args, name)}) has no effect with a `compute_loss_func`, which takes "
                        "the place of the loss. Leave one of them out."
                    )

        # 2. The model is checked. One of a `model_init` is made by the Trainer, see `call_model_init`.
        if isinstance(model, (str, PathLike)):
            model = load_d2f_model(model)
        if isinstance(teacher_model, (str, PathLike)):
            teacher_model = load_d2f_model(teacher_model)
        self.teacher_model: Any = teacher_model
        self._peft_config = peft_config
        self._is_for_training = train_dataset is not None
        if model is not None:
            check_models(model, args, teacher_model, peft_config, self._clean_collator)

        # 3. The datasets. All that can fail comes before the model gets its adapter.
        train_dataset = tokenize_dataset(train_dataset, processing_class, args.max_length, "train_dataset")
        eval_dataset = tokenize_dataset(eval_dataset, processing_class, args.max_length, "eval_dataset")
        if has_length(train_dataset) and len(train_dataset) == 0:
            raise ValueError("`train_dataset` must have examples, but it is empty. Leave it out to evaluate only.")
        parts = (train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else (eval_dataset,)))
        is_streamed = any(isinstance(part, IterableDataset) for part in parts)
        if is_streamed and args.accelerator_config.dispatch_batches is None:
            # Otherwise accelerate would concatenate batches of different lengths.
            args.accelerator_config.dispatch_batches = False

        # 4. The Trainer, with the noise, and what is logged.
        use_cache = None
        if model is not None:
            use_cache = model.config.use_cache
            model = self._make_student(model, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=self._clean_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[_AtTheStart(self), *(callbacks or [])],
            **kwargs,
        )
        # The Trainer counts the labels of the whole accumulated batch and passes the count to `compute_loss`.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = False
        if use_cache is not None:  # the Trainer turns it off, and it would be saved so
            self.model.config.use_cache = use_cache
        if self.teacher_model is not None:
            self.teacher_model = self.accelerator.prepare_model(self.teacher_model, evaluation_mode=True)
            # Otherwise an evaluation before training would take the student for one that is prepared already.
            self.accelerator._models.remove(self.teacher_model)
        self._make_collators()
        self._averages: torch.Tensor | None = None  # [P, 2], since the last log
        self._averages_of_rows: list[torch.Tensor] | None = None  # [B, P, 2] each, of an evaluation

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model_init: Any = self.model_init
        check_model_init(model_init)
        is_called_by_trainer = len(inspect.signature(model_init).parameters) <= 1  # with nothing, or the trial
        model = super().call_model_init(trial) if is_called_by_trainer else model_init()
        check_models(model, self.args, self.teacher_model, self._peft_config, self._clean_collator)
        return self._make_student(model, self.args)

    def _make_student(self, model: Any, args: D2FTrainingArguments) -> Any:
        student = make_student(model, args, self.teacher_model, self._peft_config)
        if self._is_for_training:
            check_what_is_trained(student, args, self.teacher_model)
        return student

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # which put other parameters in their place
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            check_what_is_trained(model, self.args, self.teacher_model)
            if self.optimizer is not None:
                check_optimizer(self.optimizer, model)
        return super().create_optimizer(*args, **kwargs)

    def _make_collators(self) -> None:
        """The noise for training and that for evaluation, as the arguments say now."""
        args, config = self.args, base_model(self.accelerator.unwrap_model(self.model)).config
        self.block_size: int = config.block_size if args.block_size is None else args.block_size
        self.right_shift_logits: bool = config.right_shift_logits
        self.clean_context: bool = has_clean_context(args, config)
        self._block_alignment = block_alignment_of(config)
        clean = self._clean_collator
        if clean is None:
            clean = default_collator(args, config, self.block_size, self.processing_class, self._pad_to_multiple_of)
        self.data_collator = noising_collator(clean, args, config)
        self.evaluation_collator = self.data_collator.for_evaluation()

    # ---- the training step ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, D2FTrainingOutput]:
        r"""
        The loss of a batch of [`D2FNoisingCollator`], in which the tokens are masked already (Algorithm 1, lines 4-5).

        1. The teacher, bidirectional, sees the whole noisy sequence. Masked diffusion has none.
        2. The student, block-causal, sees it up to the end of a token's own block. In masked diffusion it is
           bidirectional, or with clean context sees a token's own block and the clean ones before it.
        3. The loss: the divergence of the two over the masked tokens (Eq. 3); with `label_weight`, mixed with the
           student's cross-entropy to the true tokens. In masked diffusion, that cross-entropy alone.
        4. The averages that are logged.
        """
        args, is_masked = self.args, inputs["is_masked"]  # [B, L], with complementary masks [B, 2 L]
        where = is_masked.nonzero(as_tuple=True)  # rows and positions of the masked tokens, [M] each
        mask_ratios, targets = inputs["mask_ratios"][where], inputs["labels"][_tokens_of(where, inputs)]  # [M]
        sequence: dict[str, Any] = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        predicting = predicting_positions(is_masked, self.right_shift_logits)

        # 1. The teacher.
        teacher_logits = None
        if args.objective == "distillation":
            with torch.no_grad(), self._teacher_weights(model) as teacher:
                teacher_logits = teacher(**sequence, logits_to_keep=self._predicting_for_teacher(is_masked)).logits

        # 2. The student.
        if self.clean_context:
            sequence = clean_context_sequence(inputs, self.block_size, self._block_alignment)
            predicting = with_clean_part(predicting, inputs["labels"].shape[1])
        elif args.objective == "distillation":
            sequence.update(prompt_lengths=inputs["prompt_lengths"], block_size=self.block_size)
        elif args.causal_probability > 0.0:
            sequence["attention_mask"] = causal_attention_mask(inputs["is_causal"], inputs["attention_mask"])
        logits = model(**sequence, logits_to_keep=predicting).logits  # [M, V]
        outputs = D2FTrainingOutput(logits=logits, teacher_logits=teacher_logits, mask_ratios=mask_ratios)

        # 3. The loss.
        divergence = None  # [M]
        if teacher_logits is not None:
            divergence = token_divergence(logits, teacher_logits, args.divergence)
        num_items = (inputs["labels"] != -100).sum(-1)  # [B]
        if num_items_in_batch is None:
            num_items_in_batch = num_items.sum()
        if self.compute_loss_func is None:
            token_losses = self._token_losses(divergence, logits, targets, mask_ratios)  # [M]
            loss = mean_loss(token_losses, num_items_in_batch)
            row_losses = sum_per_row(token_losses.detach(), where, is_masked.shape)  # [B]
        elif model.training:
            loss = self.compute_loss_func(outputs, targets, num_items_in_batch=num_items_in_batch)
            row_losses = torch.zeros_like(num_items, dtype=torch.float32)  # the Trainer logs the loss of training
        else:
            row_losses = losses_of_rows(self.compute_loss_func, outputs, targets, where[0], num_items)
            loss = mean_loss(row_losses, num_items_in_batch)
        if args.average_tokens_across_devices and model.training:
            # The processes' gradients are averaged, but the count is that of all processes.
            loss = loss * self.accelerator.num_processes

        # 4. What is logged.
        with torch.no_grad():
            outputs.averages = row_averages(
                inputs, where, row_losses, logits, teacher_logits, divergence, self.block_size
            )
            if model.training:
                self._averages = added(self._averages, outputs.averages.sum(0))
        return (loss, outputs) if return_outputs else loss

    def _predicting_for_teacher(self, is_masked: torch.Tensor) -> torch.Tensor:
        if self.teacher_model is None:
            return predicting_positions(is_masked, self.right_shift_logits)
        teacher = base_model(self.accelerator.unwrap_model(self.teacher_model, keep_torch_compile=False))
        return predicting_positions(is_masked, teacher.config.right_shift_logits)

    @contextmanager
    def _teacher_weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """The teacher. Unless it is another model, inside it the student computes without its adapter and dropout."""
        if self.teacher_model is not None:
            with without_dropout(self.teacher_model):
                yield self.teacher_model
        else:
            student = self.accelerator.unwrap_model(model, keep_torch_compile=False)
            with without_dropout(student), without_adapters(student):
                yield model

    def _token_losses(
        self,
        divergence: torch.Tensor | None,
        logits: torch.Tensor,
        targets: torch.Tensor,
        mask_ratios: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted loss of each masked token, `[M]`."""
        args = self.args
        label_losses = divergence_losses = None
        if args.objective == "masked_diffusion" or args.label_weight > 0.0:
            label_losses = token_cross_entropy(logits, targets, args.label_smoothing_factor)
            # With complementary masks each token is predicted exactly once, whatever the ratio.
            weighting = "uniform" if args.complementary_masks else "inverse_mask_ratio"
            label_losses = weighted(label_losses, mask_ratios, weighting)
        if args.objective == "masked_diffusion":
            return label_losses
        divergence_losses = weighted(divergence, mask_ratios, args.weighting)
        if args.label_weight == 0.0:
            return divergence_losses
        return (1.0 - args.label_weight) * divergence_losses + args.label_weight * label_losses

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Logs what the `Trainer` does; with the loss of training also its averages since the last log."""
        if "loss" in logs and self._averages is not None:
            averages, self._averages = self._averages, None
            if self.accelerator.num_processes > 1:
                averages = self.accelerator.pad_across_processes(averages, dim=0)
                averages = self.accelerator.reduce(averages, reduction="sum")
            logs.update({name: value for name, value in means(averages).items() if name != "loss"})
        super().log(logs, *args, **kwargs)

    # ---- evaluation ----

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """That of the `Trainer`, whose mean of the batches' losses becomes one of all tokens, with the averages."""
        self._averages_of_rows = []
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
            rows = self._averages_of_rows
        finally:
            self._averages_of_rows = None
        if rows:
            metrics: Any = output.metrics
            for name, value in means(total_of_rows(rows, self.args.logging_nan_inf_filter)).items():
                key = f"{metric_key_prefix}_{name}"
                if name == "loss" or key not in metrics:  # a metric of `compute_metrics` may have the name
                    metrics[key] = value
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The loss of an evaluation batch; unless only that is asked for, also its logits and labels.

        Returns:
            The loss, the logits `[B, L, V]` and the labels `[B, L]`, both -100 where no token is masked.
        """
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        loss, averages = loss.detach().mean(), outputs.get("averages")
        if averages is not None and self._averages_of_rows is not None:
            # Gathered by rows, because with several processes the last batch is filled up with rows of the first.
            if self.accelerator.num_processes > 1:
                averages = self.accelerator.pad_across_processes(averages, dim=1)
            self._averages_of_rows.append(self.accelerator.gather_for_metrics(averages))
        if prediction_loss_only:
            return loss, None, None
        all_labels, logits = inputs["labels"], outputs["logits"]
        where = _tokens_of(inputs["is_masked"].nonzero(as_tuple=True), inputs)
        everywhere = logits.new_full((*all_labels.shape, logits.shape[-1]), -100.0)  # [B, L, V]
        everywhere[where] = logits
        labels = torch.full_like(all_labels, -100)
        labels[where] = all_labels[where]
        return loss, everywhere, labels

    # ---- what the Trainer asks for ----

    def get_train_dataloader(self) -> DataLoader:
        if self.model_init is not None:  # a trial of a hyperparameter search may have changed model and arguments
            self._make_collators()
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            # With persistent workers the Trainer would give the loader of the dataset before.
            return self.get_test_dataloader(eval_dataset)
        with self._noise_of_evaluation():
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        test_dataset = tokenize_dataset(test_dataset, self.processing_class, self.args.max_length, "test_dataset")
        with self._noise_of_evaluation():
            return super().get_test_dataloader(test_dataset)

    @contextmanager
    def _noise_of_evaluation(self) -> Iterator[None]:
        for_training, self.data_collator = self.data_collator, self.evaluation_collator
        try:
            yield
        finally:
            self.data_collator = for_training


def _tokens_of(where: tuple[torch.Tensor, ...], inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and positions in the sequence of masked tokens, of which complementary masks have some behind its end."""
    return where[0], where[1] % inputs["labels"].shape[1]


class _AtTheStart(TrainerCallback):
    """What the trainer does when training and each pass over the data begin."""

    def __init__(self, trainer: D2FTrainer):
        self.trainer = trainer
        self.num_passes = 0

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        trainer._averages = None
        # A run that is resumed goes on where it was. Of a stream the Trainer takes the first pass and skips batches,
        # and `state.epoch` is a share of `max_steps` rather than a number of passes.
        self.num_passes = int(state.epoch or 0) if has_length(trainer.train_dataset) else 0
        model = base_model(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
        if model.config.has_causal_mode:  # it is a diffusion model from now on
            model.config.has_causal_mode, model.config.trained_for = False, None
            model.generation_config.decoding = "d2f"
        if args.objective == "distillation" or trainer.clean_context:  # it is saved with what it is trained for
            model.config.trained_for = None
            model.config.block_size = trainer.block_size
            if getattr(model.generation_config, "block_size", None) is not None:  # it would win over that of `config`
                model.generation_config.block_size = trainer.block_size

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.data_collator.epoch = self.num_passes
        self.num_passes += 1
