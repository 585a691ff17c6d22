"""`D2FTrainer`: the training step of D2F on the stock `Trainer`, from top to bottom."""

# B batch, L sequence, V vocabulary, M masked tokens of the batch, K block size, N blocks, P averages

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from transformers.modeling_outputs import ModelOutput
from transformers.trainer_utils import EvalLoopOutput, has_length
from transformers.utils import logging

from d2f_hf.data import D2FDataCollator, tokenize_dataset
from d2f_hf.loading import load_d2f_model
from d2f_hf.losses import mean_loss, token_cross_entropy, token_divergence, weighted
from d2f_hf.modeling import D2FGenerationConfig, predicting_positions
from d2f_hf.noising import D2FNoisingCollator
from d2f_hf.training_args import D2FTrainingArguments

logger = logging.get_logger(__name__)

# Ways to initialise LoRA that take the adapter's first value off the weights under it.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


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
    no teacher, and the model is trained as it is, bidirectionally.

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
        if not isinstance(args, D2FTrainingArguments):
            raise ValueError(f"`args` must be a `D2FTrainingArguments`, got a {type(args).__name__}.")
        if (model is None) == (kwargs.get("model_init") is None):
            raise ValueError(
                "Give exactly one of `model` and `model_init`: a model, its folder or Hub id, or a function that "
                "makes one."
            )
        if teacher_model is not None and args.objective != "distillation":
            raise ValueError(
                f"`teacher_model` is not used with objective={args.objective!r}. Leave it out, or take "
                "objective='distillation'."
            )
        if peft_config is not None and (not isinstance(peft_config, PeftConfig) or peft_config.is_prompt_learning):
            raise ValueError(
                "`peft_config` must be the configuration of an adapter in the model's layers, such as a `LoraConfig`, "
                f"got a {type(peft_config).__name__}."
            )
        self._pad_to_multiple_of: int | None = None
        if type(data_collator) is DataCollatorWithPadding and data_collator.padding in (True, "longest"):
            self._pad_to_multiple_of, data_collator = data_collator.pad_to_multiple_of, None
        if data_collator is not None and not hasattr(data_collator, "block_size"):
            raise ValueError(
                f"`data_collator` must be a `D2FDataCollator`, got a {type(data_collator).__name__}: the loss needs "
                "to know where prompts end, and noise is added to the clean batch. Leave it out for the default."
            )
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
        self._clean_collator = data_collator
        self._is_for_training = train_dataset is not None
        if model is not None:
            self._check_model(model, args)

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
            model = self._student(model, args)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
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

    def _check_model(self, model: Any, args: D2FTrainingArguments) -> None:
        """Refuses models and teachers that do not fit the arguments or each other."""
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "mask_token_id") or _base_model(model).get_output_embeddings() is None:
            raise ValueError(
                f"`model` must be a block-diffusion model with its head, got a {type(model).__name__}. "
                "`load_d2f_model` loads one."
            )
        if config.mask_token_id is None:
            raise ValueError("`model.config.mask_token_id` must be set, got None. Set it to the id of the mask token.")
        if args.causal_probability > 0.0 and not config.right_shift_logits:
            raise ValueError(
                f"`causal_probability` (got {args.causal_probability}) needs a model with "
                "`config.right_shift_logits`: other logits predict a token that they have seen. Leave it out."
            )
        block_size = config.block_size if args.block_size is None else args.block_size
        if self._clean_collator is not None and self._clean_collator.block_size != block_size:
            raise ValueError(
                f"`data_collator.block_size` ({self._clean_collator.block_size}) must be the block size of the "
                f"attention ({block_size}). Give both the same, with `args.block_size`."
            )
        if args.debug and config._attn_implementation != "eager":
            raise ValueError(
                f"`debug` (got {[str(option.value) for option in args.debug]}) needs a model with "
                'attn_implementation="eager": it cannot look at the bool masks of others. Load the model with it.'
            )
        teacher = self.teacher_model
        if teacher is not None:
            for name in ("vocab_size", "mask_token_id"):
                value, expected = getattr(getattr(teacher, "config", None), name, None), getattr(config, name)
                if value != expected:
                    raise ValueError(
                        f"`teacher_model.config.{name}` must be that of the model ({expected}), got {value}. Pass a "
                        "block-diffusion model with the same tokens."
                    )
            if not set(map(id, teacher.modules())).isdisjoint(map(id, model.modules())):
                raise ValueError(
                    "`teacher_model` must not share layers with `model`, because it would change with it. Leave it "
                    "out: the teacher is then the model without its adapter. Or load the teacher a second time."
                )
        if isinstance(model, PeftModel):
            if self._peft_config is not None:
                raise ValueError("`peft_config` must be None for a model that has an adapter already. Leave it out.")
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    f"`model` must have an adapter in its layers, such as LoRA, got one of type "
                    f"{model.active_peft_config.peft_type.value}. Pass the model without it."
                )
        elif getattr(model, "_hf_peft_config_loaded", False) and self._gets_adapter(model, args):
            raise ValueError(
                "`model` must be a plain model or a `PeftModel`, got one with adapters of `add_adapter` or "
                "`load_adapter`, which the teacher would keep. Pass the model without them, and `peft_config`; or "
                "`load_d2f_model(base, adapter, merge=False)`."
            )
        if args.objective == "distillation" and teacher is None:
            for adapter in model.peft_config.values() if isinstance(model, PeftModel) else [self._peft_config]:
                init = getattr(adapter, "init_lora_weights", None)
                if isinstance(init, str) and init.lower().startswith(_CHANGES_THE_BASE):
                    raise ValueError(
                        f"`init_lora_weights` ({init!r}) must leave the model's own weights as they are: the teacher "
                        "is the model without its adapter. Leave it out, or pass a `teacher_model`."
                    )

    def _gets_adapter(self, model: Any, args: D2FTrainingArguments) -> bool:
        """Whether a model gets the adapter of `peft_config`, or that of the paper."""
        is_asked_for = self._peft_config is not None
        is_needed = args.objective == "distillation" and self.teacher_model is None
        return not isinstance(model, PeftModel) and (is_asked_for or is_needed)

    def _student(self, model: Any, args: D2FTrainingArguments) -> Any:
        """The model that is trained, with an adapter where the objective or the caller asks for one."""
        if self._gets_adapter(model, args):
            projections = list(model.config.attention_projections)
            paper = LoraConfig(r=32, lora_alpha=32, lora_dropout=0.1, target_modules=projections)
            model = get_peft_model(model, self._peft_config or paper)
        if isinstance(model, PeftModel):
            if args.gradient_checkpointing:
                model.enable_input_require_grads()
            # peft saves the adapter without the model's configuration, where the block size is.
            model.save_pretrained = functools.partial(_save_adapter_and_block_size, model)
        if self._is_for_training:
            self._check_what_is_trained(model, args)
        return model

    def _check_what_is_trained(self, model: Any, args: D2FTrainingArguments) -> None:
        """Refuses to train nothing, or something else than was asked for."""
        layers = _adapter_layers(model)
        if any(getattr(layer, "merged", False) for layer in layers):
            raise ValueError(
                "`model` must not have a merged adapter, because what is merged is not trained. Call "
                "`model.unmerge_adapter()` first."
            )
        if layers and all(layer.disable_adapters for layer in layers):
            raise ValueError(
                "`model` must have its adapter enabled, but it is disabled. Call "
                "`model.base_model.enable_adapter_layers()` first."
            )
        if isinstance(model, PeftModel) and not any(p.requires_grad for p in model.parameters()):
            # peft loads adapters frozen, unless it is told that they will be trained.
            loaded = [name for name in model.active_adapters if model.peft_config[name].inference_mode]
            if loaded:
                logger.warning_once(
                    f"The adapter {', '.join(loaded)} was loaded for inference, so its weights are frozen. They are "
                    "made trainable."
                )
                model.set_requires_grad(loaded)
                for name in loaded:
                    model.peft_config[name].inference_mode = False
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError(
                "`model` must have parameters to train, but all of them are frozen. Call `requires_grad_(True)` on "
                "those to train" + (", or `model.set_adapter(...)`." if isinstance(model, PeftModel) else ".")
            )
        if args.objective == "distillation" and self.teacher_model is None:
            of_adapters = _parameters_of_adapters(layers)
            other = next((name for name, p in trained if id(p) not in of_adapters), None)
            if other is not None:
                raise ValueError(
                    f"`{other}` must be frozen, because it is not part of an adapter: the teacher, which is the model "
                    "without its adapter, would change with it. Freeze it (`bias='none'` in a `LoraConfig`), add it "
                    "to `modules_to_save`, or pass a `teacher_model`."
                )

    def _make_collators(self) -> None:
        """The noise for training and that for evaluation, as the arguments say now."""
        args, config = self.args, _base_model(self.accelerator.unwrap_model(self.model)).config
        self.block_size: int = config.block_size if args.block_size is None else args.block_size
        self.right_shift_logits: bool = config.right_shift_logits
        clean = self._clean_collator
        if clean is None:
            clean = D2FDataCollator(
                block_size=self.block_size,
                eos_token_id=_eos_token_id(self.processing_class, config),
                pad_token_id=_first(config.pad_token_id),
                eos_tail=args.eos_tail,
                pad_to_multiple_of=self._pad_to_multiple_of,
            )
        self.data_collator = D2FNoisingCollator(
            clean,
            objective=args.objective,
            mask_token_id=config.mask_token_id,
            mask_ratio_low=args.mask_ratio_low,
            mask_ratio_high=args.mask_ratio_high,
            decoding_probability=args.decoding_probability,
            causal_probability=args.causal_probability,
            seed=args.data_seed if args.data_seed is not None else args.seed,
        )
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

        1. The teacher, bidirectional, sees the whole noisy sequence.
        2. The student, block-causal, sees it up to the end of a token's own block.
        3. The divergence of the two over the masked tokens (Eq. 3); with `label_weight`, mixed with the student's
           cross-entropy to the true tokens.

        For masked diffusion: the bidirectional model's cross-entropy to the true tokens.
        """
        args, is_masked = self.args, inputs["is_masked"]  # [B, L]
        where = is_masked.nonzero(as_tuple=True)  # rows and positions of the masked tokens, [M] each
        mask_ratios, targets = inputs["mask_ratios"][where], inputs["labels"][where]  # [M]
        sequence = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        predicting = predicting_positions(is_masked, self.right_shift_logits)
        teacher_logits = divergence = None
        if args.objective == "masked_diffusion":
            if args.causal_probability > 0.0:
                sequence["attention_mask"] = _causal_where(inputs["is_causal"], inputs["attention_mask"])
            logits = model(**sequence, logits_to_keep=predicting).logits  # [M, V]
        else:
            # 1. The teacher.
            with torch.no_grad(), self._teacher_weights(model) as teacher:
                teacher_logits = teacher(**sequence, logits_to_keep=self._predicting_for_teacher(is_masked)).logits
            # 2. The student.
            logits = model(
                **sequence,
                logits_to_keep=predicting,
                prompt_lengths=inputs["prompt_lengths"],
                block_size=self.block_size,
            ).logits  # [M, V]
            divergence = token_divergence(logits, teacher_logits, args.divergence)  # [M]
        outputs = D2FTrainingOutput(logits=logits, teacher_logits=teacher_logits, mask_ratios=mask_ratios)

        # 3. The loss.
        num_items = (inputs["labels"] != -100).sum(-1)  # [B]
        if num_items_in_batch is None:
            num_items_in_batch = num_items.sum()
        if self.compute_loss_func is None:
            token_losses = self._token_losses(divergence, logits, targets, mask_ratios)  # [M]
            loss = mean_loss(token_losses, num_items_in_batch)
            row_losses = _per_row(token_losses.detach(), where, is_masked.shape)  # [B]
        elif model.training:
            loss = self.compute_loss_func(outputs, targets, num_items_in_batch=num_items_in_batch)
            row_losses = torch.zeros_like(num_items, dtype=torch.float32)  # the Trainer logs the loss of training
        else:
            row_losses = self._row_losses(outputs, targets, where[0], num_items)
            loss = mean_loss(row_losses, num_items_in_batch)
        with torch.no_grad():
            averages = [(row_losses, num_items), _mask_ratios_of_rows(inputs)]
            if teacher_logits is not None:
                agrees = (logits.argmax(-1) == teacher_logits.argmax(-1)).float()
                averages.append((_per_row(agrees, where, is_masked.shape), is_masked.sum(-1)))
                averages.extend(self._per_block(divergence.detach(), where, inputs))
            outputs.averages = torch.stack([torch.stack(pair, dim=-1) for pair in averages], dim=1)  # [B, P, 2]
            if model.training:
                self._averages = _added(self._averages, outputs.averages.sum(0))
        if args.average_tokens_across_devices and model.training:
            # The processes' gradients are averaged, but the count is that of all processes.
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

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
            label_losses = weighted(label_losses, mask_ratios, "inverse_mask_ratio")
        if args.objective == "masked_diffusion":
            return label_losses
        divergence_losses = weighted(divergence, mask_ratios, args.weighting)
        if args.label_weight == 0.0:
            return divergence_losses
        return (1.0 - args.label_weight) * divergence_losses + args.label_weight * label_losses

    def _row_losses(
        self, outputs: D2FTrainingOutput, targets: torch.Tensor, row: torch.Tensor, num_items: torch.Tensor
    ) -> torch.Tensor:
        """`compute_loss_func` of each row, times the row's number of items, `[B]`."""
        compute_loss_func: Any = self.compute_loss_func
        losses = []
        for b, count in enumerate(num_items):
            of_row = {name: value[row == b] for name, value in outputs.items()}
            if len(of_row["logits"]) == 0:
                losses.append(torch.zeros((), device=num_items.device))
                continue
            loss = compute_loss_func(D2FTrainingOutput(**of_row), targets[row == b], num_items_in_batch=count)
            losses.append(loss.detach().float() * count)
        return torch.stack(losses)

    def _per_block(
        self, divergence: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], inputs: dict[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sum and number of the divergences `[M]` in each row's block 0, 1, ..., `[B]` each."""
        batch_size, length = inputs["is_masked"].shape
        num_blocks = -(-length // self.block_size)
        offset = (where[1] - inputs["prompt_lengths"][where[0]]).clamp(min=0)
        where, shape = (where[0], offset), (batch_size, num_blocks * self.block_size)
        blocks = (batch_size, num_blocks, self.block_size)
        sums = _scattered(divergence, where, shape).view(blocks).sum(-1)  # [B, N]
        counts = _scattered(torch.ones_like(divergence), where, shape).view(blocks).sum(-1)
        return list(zip(sums.unbind(1), counts.unbind(1), strict=True))

    def _predicting_for_teacher(self, is_masked: torch.Tensor) -> torch.Tensor:
        if self.teacher_model is None:
            return predicting_positions(is_masked, self.right_shift_logits)
        teacher = _base_model(self.accelerator.unwrap_model(self.teacher_model, keep_torch_compile=False))
        return predicting_positions(is_masked, teacher.config.right_shift_logits)

    @contextmanager
    def _teacher_weights(self, model: nn.Module) -> Iterator[nn.Module]:
        """The teacher. Unless it is another model, inside it the student computes without its adapter and dropout."""
        if self.teacher_model is not None:
            with _without_dropout(self.teacher_model):
                yield self.teacher_model
        else:
            student = self.accelerator.unwrap_model(model, keep_torch_compile=False)
            with _without_dropout(student), _without_adapters(student):
                yield model

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """Logs what the `Trainer` does; with the loss of training also its averages since the last log."""
        if "loss" in logs and self._averages is not None:
            averages, self._averages = self._averages, None
            if self.accelerator.num_processes > 1:
                averages = self.accelerator.pad_across_processes(averages, dim=0)
                averages = self.accelerator.reduce(averages, reduction="sum")
            logs.update({name: value for name, value in _means(averages).items() if name != "loss"})
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
            width = max(part.shape[1] for part in rows)
            averages = torch.cat([_padded(part.cpu(), width, dim=1) for part in rows]).double()  # [rows, P, 2]
            finite = averages[:, 0, 0].isfinite()
            if self.args.logging_nan_inf_filter and finite.any():
                averages[~finite, 0] = 0.0
            metrics: Any = output.metrics
            for name, value in _means(averages.sum(0)).items():
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
        is_masked, logits = inputs["is_masked"], outputs["logits"]
        everywhere = logits.new_full((*is_masked.shape, logits.shape[-1]), -100.0)  # [B, L, V]
        everywhere[is_masked] = logits
        return loss, everywhere, inputs["labels"].masked_fill(~is_masked, -100)

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

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model_init: Any = self.model_init
        parameters = inspect.signature(model_init).parameters.values()
        required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if len(parameters) <= 1:
            model = super().call_model_init(trial)
        elif not required:
            model = model_init()
        else:
            raise ValueError(
                "`model_init` must be a function of nothing, or of the trial of a hyperparameter search, got one of "
                f"{', '.join(p.name for p in parameters)}. `functools.partial` or a lambda fixes the others."
            )
        self._check_model(model, self.args)
        return self._student(model, self.args)

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):  # which put other parameters in their place
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            self._check_what_is_trained(model, self.args)
            if self.optimizer is not None:
                held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
                if not any(p.requires_grad and id(p) in held for p in model.parameters()):
                    raise ValueError(
                        "`optimizers` must hold parameters that are trained, but this optimizer holds none of them: "
                        "an adapter is added to the model after it was made. Make the optimizer of a `PeftModel`, or "
                        "pass `optimizer_cls_and_kwargs`."
                    )
        return super().create_optimizer(*args, **kwargs)


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
        if args.objective == "distillation":  # what it is trained for is what it is saved with
            model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            model = _base_model(model)
            model.config.block_size = trainer.block_size
            if getattr(model.generation_config, "block_size", None) is not None:  # it would win over that of `config`
                model.generation_config.block_size = trainer.block_size

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.data_collator.epoch = self.num_passes
        self.num_passes += 1


# ---- the teacher's pass leaves no trace ----


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Puts the modules that are in training mode into evaluation mode, and then back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Turns the adapters off that are on, and then on again, merged where they were, and trained where they were."""
    # Not `model.disable_adapter()`: it makes frozen parameters trainable, and leaves merged adapters unmerged.
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    enabled = [layer for layer in _adapter_layers(model) if not layer.disable_adapters]
    merged = [
        (layer, list(layer.merged_adapters), [(p, p.detach().clone()) for p in layer.get_base_layer().parameters()])
        for layer in enabled
        if isinstance(layer, BaseTunerLayer) and layer.merged
    ]
    for layer in enabled:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in enabled:
            layer.enable_adapters(True)
        for layer, names, weights in merged:
            if not layer.merged:
                layer.merge(adapter_names=names)
            for parameter, value in weights:  # the very same, without the rounding of taking off and putting on
                parameter.data.copy_(value)
        for parameter, value in requires_grad:
            parameter.requires_grad_(value)


def _adapter_layers(model: nn.Module) -> list[Any]:
    """The layers of adapters in a model, and the modules that are trained with them."""
    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def _parameters_of_adapters(layers: list[Any]) -> set[int]:
    """The ids of all parameters of adapters, without those of the model under them."""
    return {
        id(parameter)
        for layer in layers
        for name, parameter in layer.named_parameters()
        if not {"base_layer", "original_module"}.intersection(name.split("."))
    }


def _save_adapter_and_block_size(model: PeftModel, save_directory: str | PathLike, *args, **kwargs) -> None:
    """`PeftModel.save_pretrained`, with block size and special tokens in a generation_config.json in each folder.

    With a config.json, transformers would take the folder for a whole model.
    """
    type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        config = model.get_base_model().config
        names = ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
        tokens = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
        generation_config = D2FGenerationConfig(block_size=config.block_size, **tokens)
        for name in kwargs.get("selected_adapters") or model.peft_config:
            folder = Path(save_directory) if name == "default" else Path(save_directory) / name
            generation_config.to_json_file(folder / "generation_config.json")


# ---- averages ----


def _mask_ratios_of_rows(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and number of the mask ratios of response tokens, `[B]` each. In rows with causal attention they are 0."""
    position = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)
    in_response = (position >= inputs["prompt_lengths"][:, None]) & inputs["attention_mask"].bool()  # [B, L]
    ratios = inputs["mask_ratios"].where(in_response, 0.0)
    if "is_causal" in inputs:
        ratios = ratios.masked_fill(inputs["is_causal"][:, None], 0.0)
    return ratios.sum(-1), in_response.sum(-1)


def _scattered(
    values: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, int] | torch.Size
) -> torch.Tensor:
    """`[B, L]` in float32, with the values `[M]` at their rows and positions and 0 elsewhere."""
    return torch.zeros(shape, dtype=torch.float32, device=values.device).index_put(where, values.float())


def _per_row(
    values: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, int] | torch.Size
) -> torch.Tensor:
    """The sum of values `[M]` in each row, `[B]`. Not `index_add`, whose order of summing varies on a GPU."""
    return _scattered(values, where, shape).sum(-1)


def _padded(averages: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """With zeros for the averages that others have, `width` in all."""
    missing = width - averages.shape[dim]
    return nn.functional.pad(averages, (0, 0, 0, missing))


def _added(total: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """The sum of two `[P, 2]`, of which one may have more blocks."""
    new = new.to(torch.float32 if new.device.type == "mps" else torch.float64)  # counts pass 2 ** 24
    if total is None:
        return new
    width = max(len(total), len(new))
    return _padded(total, width, dim=0) + _padded(new, width, dim=0)


def _means(averages: torch.Tensor) -> dict[str, float]:
    """Names and values of averages `[P, 2]`, without those of no tokens."""
    values = averages.tolist()
    names = ["loss", "mask_ratio", "agreement", *(f"divergence_block_{n}" for n in range(len(values) - 3))]
    return {
        name: total / max(count, 1)
        for name, (total, count) in zip(names, values, strict=False)
        if count > 0 or name == "loss"
    }


def _causal_where(is_causal: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """A `[B, 1, L, L]` mask: padding is not seen, and rows with `is_causal` `[B]` do not see what comes later."""
    length = attention_mask.shape[1]
    no_future = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    allowed = attention_mask.bool()[:, None, :] & (no_future | ~is_causal[:, None, None])  # [B, L, L]
    return allowed[:, None]


# ---- small things ----


def _base_model(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


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
