"""`D2FTrainingArguments`, and what becomes of every argument of `TrainingArguments` and `Trainer`."""

import dataclasses
import inspect

import pytest
import torch
from datasets import Dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments

from d2f_hf import D2FTrainer, D2FTrainingArguments
from tiny_training import arguments, tiny_dataset, tiny_model

OURS = {field.name for field in dataclasses.fields(D2FTrainingArguments)} - {
    field.name for field in dataclasses.fields(TrainingArguments)
}

# Arguments that reach what D2FTrainer overrides: a run of two steps with evaluation takes each of them. What some of
# them must change is tested with the file that they change.
WORKS = {
    "per_device_train_batch_size": 3,
    "per_device_eval_batch_size": 3,
    "num_train_epochs": 2.0,
    "max_steps": 1,
    "gradient_accumulation_steps": 2,
    "average_tokens_across_devices": False,
    "max_grad_norm": 0.0,
    "bf16": True,
    "bf16_full_eval": True,
    "activation_checkpointing": True,
    "gradient_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True,
    "optim": "sgd",
    "optim_args": "momentum=0.5",
    "lr_scheduler_type": "cosine",
    "include_num_input_tokens_seen": "non_padding",
    "eval_strategy": "steps",
    "eval_on_start": True,
    "eval_delay": 1,
    "eval_steps": 1,
    "prediction_loss_only": True,
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "eval_accumulation_steps": 1,
    "include_for_metrics": ["inputs", "loss"],
    "load_best_model_at_end": True,
    "logging_strategy": "epoch",
    "logging_steps": 2,
    "logging_first_step": True,
    "logging_nan_inf_filter": False,
    "save_strategy": "epoch",
    "save_only_model": True,
    "full_determinism": False,
    "seed": 1,
    "data_seed": 2,
    "dataloader_drop_last": True,
    "dataloader_num_workers": 1,
    "dataloader_pin_memory": False,
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "length",
    "use_cache": True,
    "torch_empty_cache_steps": 1,
    "skip_memory_metrics": True,
    "accelerator_config": {"split_batches": True},
    "label_names": ["labels"],
    "remove_unused_columns": False,
}
# With another argument, without which they are refused or have no effect.
TOGETHER_WITH = {
    "activation_checkpointing_kwargs": {"activation_checkpointing": True},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing": True},
    "optim_args": {"optim": "rmsprop"},
    "num_train_epochs": {"max_steps": -1},
    "eval_steps": {"eval_strategy": "steps"},
    "eval_delay": {"eval_strategy": "steps"},
    "load_best_model_at_end": {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1},
    "dataloader_drop_last": {"per_device_eval_batch_size": 3},
}
# Tested below or in the test file of what they change, with what they need.
TESTED_THERE = set(
    "label_smoothing_factor batch_eval_metrics metric_for_best_model torch_compile debug "
    "dataloader_persistent_workers".split()
)
REFUSED = {"remove_unused_columns": True, "label_names": ["answers"], "use_liger_kernel": True}
# About optimizers, workers, devices, files, the Hub and reports. Nothing that D2FTrainer overrides sees them.
UNTOUCHED = set(
    """
    output_dir learning_rate lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules fp16 fp16_full_eval tf32 torch_compile_backend torch_compile_mode liger_kernel_config
    log_on_each_node log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id save_steps save_on_each_node save_total_limit enable_jit_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision greater_is_better
    ignore_data_skip restore_callback_states_from_checkpoint use_cpu parallelism_config ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed
    do_train do_eval do_predict resume_from_checkpoint local_rank dataloader_prefetch_factor dataloader_in_order
    dataloader_multiprocessing_context
    """.split()
)
# What `Trainer` itself takes. All are tested in test_trainer.py, test_student.py and test_collators.py.
OF_TRAINER = set(
    """
    self model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func
    compute_metrics callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics
    """.split()
)


def names() -> set[str]:
    return {field.name for field in dataclasses.fields(TrainingArguments)}


def test_it_is_known_what_becomes_of_every_argument():
    """A new argument of transformers may pass by what D2FTrainer overrides. Put it on one of the lists above."""
    known = WORKS.keys() | TESTED_THERE | REFUSED.keys() | UNTOUCHED
    assert names() - known == set()
    assert set(inspect.signature(Trainer.__init__).parameters) - OF_TRAINER == set()


@pytest.mark.parametrize("name", WORKS)
def test_a_run_takes_the_argument(name, tmp_path):
    """Two steps of distillation, and an evaluation with metrics."""
    if name not in names():
        pytest.skip(f"this version of transformers has no {name}")
    options = {
        "max_steps": 2,
        "label_weight": 0.5,
        **TOGETHER_WITH.get(name, {}),
        name: WORKS[name],
    }
    dataset = tiny_dataset(6)
    dataset = dataset.add_column("length", [len(row) for row in dataset["input_ids"]])
    trainer = D2FTrainer(
        tiny_model(),
        arguments(tmp_path, **options),
        train_dataset=dataset,
        eval_dataset=dataset,
        compute_metrics=lambda prediction: {"rows": float(len(prediction.predictions))},
    )
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps > 0
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0.0 and 0.0 <= metrics["eval_agreement"] <= 1.0
    assert ("eval_rows" in metrics) == (name != "prediction_loss_only")


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_work_is_refused_by_name(name, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        D2FTrainingArguments(str(tmp_path), use_cpu=True, **{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "distil"}, "`objective` must be one of"),
        ({"divergence": "kl"}, "`divergence` must be one of"),
        ({"weighting": "none"}, "`weighting` must be one of"),
        ({"eos_tail": "all"}, "`eos_tail` must be one of"),
        ({"mask_ratio_low": 0.8, "mask_ratio_high": 0.5}, "`mask_ratio_low` and `mask_ratio_high`"),
        ({"mask_ratio_low": 0.0, "mask_ratio_high": 0.0}, "`mask_ratio_low` and `mask_ratio_high`"),
        ({"mask_ratio_high": float("nan")}, "`mask_ratio_low` and `mask_ratio_high`"),
        ({"decoding_probability": -0.1}, "`decoding_probability` must be in"),
        ({"causal_probability": 0.5}, "`causal_probability`"),
        ({"label_weight": 1.5}, "`label_weight` must be in"),
        ({"label_weight": 0.5, "objective": "masked_diffusion"}, "`label_weight` must be in"),
        ({"label_smoothing_factor": 0.1}, "`label_smoothing_factor` .* has no effect .* `label_weight`"),
        ({"label_smoothing_factor": 1.0, "label_weight": 0.5}, "`label_smoothing_factor` must be in"),
        ({"block_size": 0}, "`block_size` must be an integer of at least 1"),
        ({"block_size": 4.5}, "`block_size` must be an integer"),
        ({"block_size": True}, "`block_size` must be an integer"),
        ({"max_length": 1}, "`max_length` must be an integer of at least 2"),
        ({"max_length": 10.0}, "`max_length` must be an integer"),
    ],
)
def test_values_out_of_range_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        D2FTrainingArguments(str(tmp_path), use_cpu=True, **options)


def test_a_sequence_cannot_be_split_across_devices(tmp_path):
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    for name in ("cp_size", "sp_size"):
        if name not in {field.name for field in dataclasses.fields(parallelism.ParallelismConfig)}:
            continue
        config = parallelism.ParallelismConfig()
        setattr(config, name, 2)
        with pytest.raises(ValueError, match=f"`parallelism_config.{name}` must be 1, got 2"):
            D2FTrainingArguments(str(tmp_path), use_cpu=True, parallelism_config=config)


@pytest.mark.parametrize(("objective", "bounds"), [("distillation", (0.2, 0.7)), ("masked_diffusion", (0.0, 1.0))])
def test_the_mask_ratios_of_the_objective_are_the_default(tmp_path, objective, bounds):
    args = D2FTrainingArguments(str(tmp_path), use_cpu=True, objective=objective)
    assert (args.mask_ratio_low, args.mask_ratio_high) == bounds


def test_the_arguments_can_be_parsed_from_a_command_line(tmp_path):
    parser = HfArgumentParser(D2FTrainingArguments)
    command = f"--output_dir {tmp_path} --use_cpu --block_size 16 --mask_ratio_high 0.9 --objective distillation"
    (args,) = parser.parse_args_into_dataclasses(command.split())
    assert (args.block_size, args.mask_ratio_low, args.mask_ratio_high, args.max_length) == (16, 0.2, 0.9, None)


def test_clean_context_can_be_parsed_from_a_command_line(tmp_path):
    """`None` leaves it to the model."""
    parser, command = HfArgumentParser(D2FTrainingArguments), f"--output_dir {tmp_path} --use_cpu"
    for more, expected in (
        ("", (None, False)),
        ("--objective masked_diffusion --clean_context true", (True, False)),
        ("--objective masked_diffusion --clean_context false", (False, False)),
        ("--objective masked_diffusion --complementary_masks", (None, True)),
    ):
        (args,) = parser.parse_args_into_dataclasses(f"{command} {more}".split())
        assert (args.clean_context, args.complementary_masks) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clean_context": "yes"}, "`clean_context` must be one of"),
        ({"clean_context": 1}, "`clean_context` must be one of"),
        ({"complementary_masks": None}, "`complementary_masks` must be one of"),
        (
            {"clean_context": True, "objective": "distillation"},
            "`clean_context` .* needs objective='masked_diffusion'",
        ),
        ({"complementary_masks": True, "objective": "distillation"}, "`complementary_masks` .* needs objective="),
        ({"complementary_masks": True, "clean_context": False}, "`complementary_masks` needs `clean_context`"),
        ({"clean_context": True, "causal_probability": 0.5}, "`causal_probability` must be 0 with clean context"),
        ({"clean_context": True, "decoding_probability": 0.5}, "`decoding_probability` must be 0 with clean context"),
    ],
)
def test_arguments_that_contradict_clean_context_are_refused_before_a_model_is_there(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **{"objective": "masked_diffusion", **options})


def test_our_arguments_are_these():
    assert (
        set(
            "objective block_size max_length mask_ratio_low mask_ratio_high decoding_probability causal_probability "
            "clean_context complementary_masks divergence weighting label_weight eos_tail".split()
        )
        == OURS
    )


def test_no_label_names_are_the_labels_that_the_noise_makes(tmp_path):
    assert D2FTrainingArguments(str(tmp_path), use_cpu=True, label_names=None).label_names == ["labels"]


@pytest.mark.slow
def test_a_compiled_model_gives_the_loss_of_one_that_is_not(tmp_path):
    """The student and the teacher are one compiled model, with the adapter on and off."""
    losses = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        torch.compiler.reset()
        rows = [{"input_ids": [5, 6, 7, 8, 9, 1], "prompt_length": 2}] * 4
        trainer = D2FTrainer(
            tiny_model(), arguments(tmp_path, max_steps=2, **options), train_dataset=Dataset.from_list(rows)
        )
        torch.manual_seed(0)
        trainer.train()
        assert "agreement" in trainer.state.log_history[0]
        losses.append(trainer.state.log_history[-1]["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
