"""The student: which models are taken, what of them is trained, how it becomes the teacher, and how it is saved."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.utils import logging

from d2f_hf.clean_context import block_alignment_of, check_objective
from d2f_hf.modeling import D2FGenerationConfig
from d2f_hf.training_args import D2FTrainingArguments

logger = logging.get_logger(__name__)

# Ways to initialise LoRA that take the adapter's first value off the weights under it.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def base_model(model: Any) -> Any:
    """The model under the adapter of peft, if it has one."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def is_its_own_teacher(args: D2FTrainingArguments, teacher_model: Any) -> bool:
    """Whether the teacher is the student without its adapter."""
    return args.objective == "distillation" and teacher_model is None


def gets_adapter(model: Any, args: D2FTrainingArguments, teacher_model: Any, peft_config: PeftConfig | None) -> bool:
    """Whether a model gets the adapter of `peft_config`, or that of the paper."""
    return not isinstance(model, PeftModel) and (peft_config is not None or is_its_own_teacher(args, teacher_model))


# ---- what is given ----


def check_arguments(args: Any, model: Any, model_init: Any, teacher_model: Any, peft_config: Any) -> None:
    """Refuses arguments of the trainer that contradict each other, before any model is loaded."""
    if not isinstance(args, D2FTrainingArguments):
        raise ValueError(f"`args` must be a `D2FTrainingArguments`, got a {type(args).__name__}.")
    if (model is None) == (model_init is None):
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


def check_model_init(model_init: Any) -> None:
    """Refuses a function that cannot be called with nothing, or with the trial of a hyperparameter search."""
    parameters = inspect.signature(model_init).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(parameters) > 1 and required:
        raise ValueError(
            "`model_init` must be a function of nothing, or of the trial of a hyperparameter search, got one of "
            f"{', '.join(p.name for p in parameters)}. `functools.partial` or a lambda fixes the others."
        )


def check_models(
    model: Any,
    args: D2FTrainingArguments,
    teacher_model: Any,
    peft_config: PeftConfig | None,
    data_collator: Any,
) -> None:
    """Refuses models, teachers and adapters that do not fit the arguments or each other."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "mask_token_id") or base_model(model).get_output_embeddings() is None:
        raise ValueError(
            f"`model` must be a block-diffusion model with its head, got a {type(model).__name__}. "
            "`load_d2f_model` loads one."
        )
    if config.mask_token_id is None:
        raise ValueError("`model.config.mask_token_id` must be set, got None. Set it to the id of the mask token.")
    check_objective(args, config)
    if args.causal_probability > 0.0 and not config.right_shift_logits:
        raise ValueError(
            f"`causal_probability` (got {args.causal_probability}) needs a model with "
            "`config.right_shift_logits`: other logits predict a token that they have seen. Leave it out."
        )
    block_size = config.block_size if args.block_size is None else args.block_size
    if data_collator is not None and data_collator.block_size != block_size:
        raise ValueError(
            f"`data_collator.block_size` ({data_collator.block_size}) must be the block size of the "
            f"attention ({block_size}). Give both the same, with `args.block_size`."
        )
    alignment = block_alignment_of(config)
    if getattr(data_collator, "block_alignment", alignment) != alignment:
        raise ValueError(
            f"`data_collator.block_alignment` ({data_collator.block_alignment!r}) must be that of the model "
            f"({alignment!r}). Give it to the collator."
        )
    if args.debug and config._attn_implementation != "eager":
        raise ValueError(
            f"`debug` (got {[str(option.value) for option in args.debug]}) needs a model with "
            'attn_implementation="eager": it cannot look at the bool masks of others. Load the model with it.'
        )
    if teacher_model is not None:
        _check_teacher(teacher_model, model)
    _check_adapter(model, args, teacher_model, peft_config)


def _check_teacher(teacher: Any, model: Any) -> None:
    """Refuses a teacher with other tokens, and one that would be trained with the student."""
    for name in ("vocab_size", "mask_token_id"):
        value, expected = getattr(getattr(teacher, "config", None), name, None), getattr(model.config, name)
        if value != expected:
            raise ValueError(
                f"`teacher_model.config.{name}` must be that of the model ({expected}), got {value}. Pass a "
                "block-diffusion model with the same tokens."
            )
    if block_alignment_of(teacher.config) == "sequence":
        raise ValueError(
            "`teacher_model.config.block_alignment` must be 'prompt', got 'sequence': the teacher sees a sequence in "
            "both directions, and such a model was not trained so."
        )
    if not set(map(id, teacher.modules())).isdisjoint(map(id, model.modules())):
        raise ValueError(
            "`teacher_model` must not share layers with `model`, because it would change with it. Leave it "
            "out: the teacher is then the model without its adapter. Or load the teacher a second time."
        )


def _check_adapter(model: Any, args: D2FTrainingArguments, teacher_model: Any, peft_config: PeftConfig | None) -> None:
    """Refuses an adapter that is given twice, and one without which the model is no teacher."""
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError("`peft_config` must be None for a model that has an adapter already. Leave it out.")
        if model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"`model` must have an adapter in its layers, such as LoRA, got one of type "
                f"{model.active_peft_config.peft_type.value}. Pass the model without it."
            )
    elif getattr(model, "_hf_peft_config_loaded", False) and gets_adapter(model, args, teacher_model, peft_config):
        raise ValueError(
            "`model` must be a plain model or a `PeftModel`, got one with adapters of `add_adapter` or "
            "`load_adapter`, which the teacher would keep. Pass the model without them, and `peft_config`; or "
            "`load_d2f_model(base, adapter, merge=False)`."
        )
    if is_its_own_teacher(args, teacher_model):
        for adapter in model.peft_config.values() if isinstance(model, PeftModel) else [peft_config]:
            init = getattr(adapter, "init_lora_weights", None)
            if isinstance(init, str) and init.lower().startswith(_CHANGES_THE_BASE):
                raise ValueError(
                    f"`init_lora_weights` ({init!r}) must leave the model's own weights as they are: the teacher "
                    "is the model without its adapter. Leave it out, or pass a `teacher_model`."
                )


# ---- what is trained ----


def make_student(model: Any, args: D2FTrainingArguments, teacher_model: Any, peft_config: PeftConfig | None) -> Any:
    """The model that is trained, with an adapter where the objective or the caller asks for one."""
    if gets_adapter(model, args, teacher_model, peft_config):
        projections = list(model.config.attention_projections)
        paper = LoraConfig(r=32, lora_alpha=32, lora_dropout=0.1, target_modules=projections)
        model = get_peft_model(model, peft_config or paper)
    if isinstance(model, PeftModel):
        if args.gradient_checkpointing:
            model.enable_input_require_grads()
        # peft saves the adapter without the model's configuration, where the block size is.
        model.save_pretrained = functools.partial(save_adapter_and_block_size, model)
    return model


def check_what_is_trained(model: Any, args: D2FTrainingArguments, teacher_model: Any) -> None:
    """Refuses to train nothing, or something else than was asked for."""
    layers = adapter_layers(model)
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
    if is_its_own_teacher(args, teacher_model):
        of_adapters = parameters_of_adapters(layers)
        other = next((name for name, p in trained if id(p) not in of_adapters), None)
        if other is not None:
            raise ValueError(
                f"`{other}` must be frozen, because it is not part of an adapter: the teacher, which is the model "
                "without its adapter, would change with it. Freeze it (`bias='none'` in a `LoraConfig`), add it "
                "to `modules_to_save`, or pass a `teacher_model`."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer that was made of other parameters than those that are trained."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(p.requires_grad and id(p) in held for p in model.parameters()):
        raise ValueError(
            "`optimizers` must hold parameters that are trained, but this optimizer holds none of them: "
            "an adapter is added to the model after it was made. Make the optimizer of a `PeftModel`, or "
            "pass `optimizer_cls_and_kwargs`."
        )


def adapter_layers(model: nn.Module) -> list[Any]:
    """The layers of adapters in a model, and the modules that are trained with them."""
    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))]


def parameters_of_adapters(layers: list[Any]) -> set[int]:
    """The ids of all parameters of adapters, without those of the model under them."""
    return {
        id(parameter)
        for layer in layers
        for name, parameter in layer.named_parameters()
        if not {"base_layer", "original_module"}.intersection(name.split("."))
    }


# ---- the teacher's pass leaves no trace ----


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
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
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Turns the adapters off that are on, and then on again, merged where they were, and trained where they were."""
    # Not `model.disable_adapter()`: it makes frozen parameters trainable, and leaves merged adapters unmerged.
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    enabled = [layer for layer in adapter_layers(model) if not layer.disable_adapters]
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


# ---- what is saved ----


def save_adapter_and_block_size(model: PeftModel, save_directory: str | PathLike, *args, **kwargs) -> None:
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
