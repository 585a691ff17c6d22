"""What is trained: models, teachers and adapters that are taken or refused, a pass without trace, what is saved."""

import json
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from d2f_hf import D2FDataCollator, D2FTrainer, load_d2f_model
from tiny_training import (
    EOS,
    PAD,
    RAW,
    adapted_model,
    arguments,
    changed,
    tiny_dataset,
    tiny_model,
    weights_of,
    without_dropout,
)

# ---- what is given ----


def test_models_and_teachers_that_do_not_fit_are_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="teacher_model"):
        D2FTrainer(model, arguments(tmp_path, objective="masked_diffusion"), teacher_model=tiny_model())
    with pytest.raises(ValueError, match="peft_config"):
        D2FTrainer(get_peft_model(model, without_dropout()), arguments(tmp_path), peft_config=without_dropout())
    with pytest.raises(ValueError, match="data_collator.block_size"):
        other = D2FDataCollator(block_size=8, eos_token_id=EOS, pad_token_id=PAD)
        D2FTrainer(tiny_model(), arguments(tmp_path), data_collator=other)
    nameless = tiny_model()
    nameless.config.mask_token_id = None
    with pytest.raises(ValueError, match="mask_token_id"):
        D2FTrainer(nameless, arguments(tmp_path))


def test_models_of_another_kind_are_refused(tmp_path):
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    for model in (plain, tiny_model().model, torch.nn.Linear(2, 2), 5):
        with pytest.raises(ValueError, match="`model` must be a block-diffusion model with its head, got a"):
            D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset())


def test_causal_rows_need_logits_that_are_one_position_ahead(tmp_path):
    args = arguments(tmp_path, objective="masked_diffusion", causal_probability=0.5)
    with pytest.raises(ValueError, match="causal_probability"):
        D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())


def test_debugging_needs_masks_that_can_be_looked_at(tmp_path):
    """The detector of overflows fails on bool masks, in the first forward."""
    with pytest.raises(ValueError, match="`debug` .*eager"):
        D2FTrainer(tiny_model(), arguments(tmp_path, debug="underflow_overflow"), train_dataset=tiny_dataset())
    model = tiny_model()
    model.set_attn_implementation("eager")
    D2FTrainer(model, arguments(tmp_path, debug="underflow_overflow"), train_dataset=tiny_dataset()).train()


def test_a_teacher_that_would_change_with_the_student_is_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(ValueError, match="`teacher_model` must not share layers with `model`"):
        D2FTrainer(model, arguments(tmp_path), teacher_model=model, peft_config=without_dropout())
    with pytest.raises(ValueError, match=r"wte.weight` must be frozen, because it is not part of an adapter"):
        adapted = adapted_model()
        adapted.get_base_model().model.transformer.wte.requires_grad_(True)
        D2FTrainer(adapted, arguments(tmp_path), train_dataset=tiny_dataset())
    other = tiny_model()
    other.config.mask_token_id = 5
    with pytest.raises(ValueError, match=r"`teacher_model.config.mask_token_id` must be that of the model \(3\)"):
        D2FTrainer(tiny_model(), arguments(tmp_path), teacher_model=other)


def test_adapters_that_the_teacher_would_keep_are_refused(tmp_path):
    from peft import PrefixTuningConfig

    with pytest.raises(ValueError, match="`peft_config` must be the configuration of an adapter in the model's layer"):
        D2FTrainer(tiny_model(), arguments(tmp_path), peft_config=PrefixTuningConfig(num_virtual_tokens=2))
    with pytest.raises(ValueError, match="`peft_config` must be"):
        D2FTrainer(tiny_model(), arguments(tmp_path), peft_config={"r": 8})
    injected = tiny_model()
    injected._hf_peft_config_loaded = True
    with pytest.raises(ValueError, match="`model` must be a plain model or a `PeftModel`"):
        D2FTrainer(injected, arguments(tmp_path))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_changes_the_weights_under_it_is_refused(tmp_path, init):
    """PiSSA and its like take the adapter's first value off the model, so without the adapter it is no teacher."""
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init)
    with pytest.raises(ValueError, match=f"`init_lora_weights` \\('{init}'\\) must leave the model's own weights"):
        D2FTrainer(tiny_model(), arguments(tmp_path), peft_config=config)
    D2FTrainer(tiny_model(), arguments(tmp_path), peft_config=config, teacher_model=tiny_model())


def test_a_refusal_leaves_the_model_without_adapter(tmp_path):
    model = tiny_model()
    for options in ({"train_dataset": RAW}, {"train_dataset": [{"input_ids": [4]}]}, {"data_collator": len}):
        with pytest.raises(ValueError):
            D2FTrainer(model, arguments(tmp_path), **options)
    assert not [name for name, _ in model.named_parameters() if "lora_" in name]


# ---- what is trained ----


def test_a_plain_model_gets_the_adapter_of_the_paper(tmp_path):
    trainer = D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=tiny_dataset())
    student: Any = trainer.model
    adapter = student.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (32, 32, 0.1)
    assert set(adapter.target_modules) == {"q_proj", "k_proj", "v_proj", "attn_out"}


def test_a_separate_teacher_allows_to_train_all_weights(tmp_path):
    student = tiny_model()
    args = arguments(tmp_path)
    trainer = D2FTrainer(student, args, train_dataset=tiny_dataset(), teacher_model=tiny_model(seed=1))
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    trainer.train()
    assert not isinstance(trainer.model, PeftModel)
    moved = [name for name, p in student.named_parameters() if not torch.equal(p, before[name])]
    assert "model.transformer.wte.weight" in moved and "model.transformer.blocks.0.ff_out.weight" in moved


def test_an_adapter_that_was_loaded_for_inference_is_trained(tmp_path):
    """`PeftModel.from_pretrained` loads it frozen. Training went on, logged a loss, and changed nothing."""
    adapted_model().save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    assert not any(p.requires_grad for p in model.parameters())
    D2FTrainer(model, arguments(tmp_path), eval_dataset=tiny_dataset()).evaluate()
    assert not any(p.requires_grad for p in model.parameters())
    before = weights_of(model)
    D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset()).train()
    assert changed(model, before) == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_with_nothing_to_train_is_refused(tmp_path, when):
    def froze(model):
        return model.requires_grad_(False)

    for model, options in (
        (adapted_model(), {}),
        (tiny_model(), {"teacher_model": tiny_model(seed=1)}),
        (tiny_model(), {"args": arguments(tmp_path, objective="masked_diffusion")}),
    ):
        options = {"args": arguments(tmp_path), **options}
        if when == "before":
            with pytest.raises(ValueError, match="`model` must have parameters to train, but all of them are frozen"):
                D2FTrainer(froze(model), train_dataset=tiny_dataset(), **options)
        else:
            trainer = D2FTrainer(model, train_dataset=tiny_dataset(), **options)
            froze(trainer.model)
            with pytest.raises(ValueError, match="`model` must have parameters to train"):
                trainer.train()


def test_merged_and_disabled_adapters_are_not_trained(tmp_path):
    merged, disabled = adapted_model(), adapted_model()
    merged.merge_adapter()
    disabled.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match=r"merged.*unmerge_adapter\(\)"):
        D2FTrainer(merged, arguments(tmp_path), train_dataset=tiny_dataset())
    with pytest.raises(ValueError, match=r"disabled.*enable_adapter_layers\(\)"):
        D2FTrainer(disabled, arguments(tmp_path), train_dataset=tiny_dataset())


def test_what_a_user_froze_stays_frozen(tmp_path):
    model = adapted_model()
    frozen = {name for name, _ in model.named_parameters() if "blocks.0." in name and "lora_" in name}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    before = weights_of(model)
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    D2FTrainer(model, args, train_dataset=tiny_dataset(), eval_dataset=tiny_dataset()).train()
    assert frozen and changed(model, before) == {name for name in before if "lora_" in name} - frozen
    assert not any(p.requires_grad for name, p in model.named_parameters() if name in frozen)


def test_only_the_active_one_of_several_adapters_is_trained(tmp_path):
    model = adapted_model()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["k_proj", "v_proj"], init_lora_weights=False))
    model.set_adapter("second")
    before = weights_of(model)
    trainer = D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset())
    trainer.train()
    assert changed(model, before) == {name for name in before if ".second." in name}
    assert model.active_adapters == ["second"]
    trainer.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "second" / "generation_config.json").read_text())["block_size"] == 4


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    """Made before the adapter is added, it holds frozen weights only, and training changes nothing."""
    model = tiny_model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset(), optimizers=(early, None))
    with pytest.raises(ValueError, match="`optimizers` must hold parameters that are trained"):
        trainer.train()
    model = adapted_model()
    before = weights_of(model)
    good = torch.optim.SGD(model.parameters(), lr=0.1)
    D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset(), optimizers=(good, None)).train()
    assert changed(model, before)


# ---- the teacher's pass leaves no trace ----


def test_the_teacher_has_no_dropout_while_the_student_trains(tmp_path):
    model = tiny_model()
    model.config.attention_dropout = 0.5
    trainer = D2FTrainer(model, arguments(tmp_path), train_dataset=tiny_dataset(), peft_config=without_dropout())
    batch = trainer.data_collator([trainer.train_dataset[0]])
    teacher_logits = []
    student: Any = trainer.model
    for _ in range(2):
        student.train()
        with torch.no_grad(), trainer._teacher_weights(student):
            teacher_logits.append(student(input_ids=batch["input_ids"]).logits)
        assert student.training
    assert torch.equal(*teacher_logits)


@pytest.mark.parametrize("state", ["as it is", "disabled", "partly disabled", "frozen", "merged", "two adapters"])
def test_the_pass_of_the_teacher_leaves_no_trace(tmp_path, state):
    """peft's `disable_adapter` leaves all adapters trainable, and unmerged; `train()` reached modules in eval mode."""
    model = adapted_model(lora_dropout=0.1, modules_to_save=["ln_f"])
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    if state == "two adapters":
        model.add_adapter("second", LoraConfig(r=3, target_modules=["k_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
    elif state == "disabled":
        model.base_model.disable_adapter_layers()
    elif state == "partly disabled":
        layers[0].enable_adapters(False)
    elif state == "frozen":
        layers[1].requires_grad_(False)
    elif state == "merged":
        model.merge_adapter()
    model.train()
    layers[2].eval()

    def traces():
        modules = [
            (name, m.training, getattr(m, "disable_adapters", None), getattr(m, "merged", None), _active(m))
            for name, m in model.named_modules()
        ]
        return modules, [p.requires_grad for p in model.parameters()], model.active_adapters

    def _active(module):
        active = getattr(module, "active_adapters", None)
        return list(active) if isinstance(active, (list, tuple)) else None

    trainer = D2FTrainer(model, arguments(tmp_path))
    batch = trainer.data_collator([tiny_dataset()[0]])
    model.unmerge_adapter() if state == "merged" else None
    with model.disable_adapter():
        expected = model.eval()(batch["input_ids"]).logits
    model.merge_adapter() if state == "merged" else None
    model.train()
    layers[2].eval()
    if state == "frozen":
        layers[1].requires_grad_(False)
    elif state == "partly disabled":
        layers[0].enable_adapters(False)
    before, weights = traces(), weights_of(model)
    with torch.no_grad(), trainer._teacher_weights(model) as teacher:
        found = teacher(batch["input_ids"]).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert traces() == before
    assert changed(model, weights) == set()


def test_a_teacher_of_its_own_is_not_put_into_another_mode(tmp_path):
    teacher = tiny_model(seed=1).train()
    teacher.config.attention_dropout = 0.5
    trainer = D2FTrainer(tiny_model(), arguments(tmp_path), train_dataset=tiny_dataset(), teacher_model=teacher)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    losses = [trainer.compute_loss(trainer.model.train(), batch).item() for _ in range(2)]
    assert losses[0] == losses[1] and all(module.training for module in teacher.modules())


def test_noise_on_embeddings_is_not_the_teachers(tmp_path):
    """NEFTune's hook adds noise where the embedding is in training mode."""
    args = arguments(tmp_path, neftune_noise_alpha=50.0)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), peft_config=without_dropout())
    compute_loss, logits = trainer.compute_loss, []

    def twice(model, inputs, **kwargs):
        for _ in range(2):
            _, outputs = compute_loss(model, inputs, return_outputs=True)
            logits.append((outputs.logits.detach(), outputs.teacher_logits))
        return compute_loss(model, inputs, **kwargs)

    trainer.compute_loss = twice
    trainer.train()
    assert torch.equal(logits[0][1], logits[1][1]) and not torch.equal(logits[0][0], logits[1][0])


# ---- what is saved ----


def test_the_block_size_that_was_trained_is_saved(tmp_path):
    """It was in the arguments alone, so what was saved decoded with another one."""
    args = arguments(tmp_path / "runs", block_size=8, save_strategy="steps", save_steps=3)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())
    assert trainer.model.config.block_size == 4  # until something is trained with it
    trainer.train()
    trainer.save_model(tmp_path / "by_trainer")
    trainer.model.save_pretrained(tmp_path / "by_peft")
    for folder in ("by_trainer", "by_peft", "runs/checkpoint-3"):
        assert (tmp_path / folder / "adapter_config.json").exists()
        assert json.loads((tmp_path / folder / "generation_config.json").read_text())["block_size"] == 8
        PeftModel.from_pretrained(tiny_model(), tmp_path / folder)
        tiny_model().save_pretrained(tmp_path / "base")
        assert load_d2f_model(tmp_path / "base", tmp_path / folder).config.block_size == 8
        assert load_d2f_model(tmp_path / "base", tmp_path / folder, merge=False).config.block_size == 8
    values = json.loads((tmp_path / "by_peft" / "adapter_config.json").read_text())
    values["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "by_peft" / "adapter_config.json").write_text(json.dumps(values))
    # Once there was a config.json in the folder, which transformers took for a whole model.
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "by_peft").config.block_size == 8
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_d2f_model(tmp_path / "merged")
    assert (merged.config.block_size, merged.config.use_cache) == (8, True)


@pytest.mark.parametrize(
    "options, trained_for",
    [
        ({"objective": "distillation"}, None),
        ({"objective": "masked_diffusion", "clean_context": True}, None),
        ({"objective": "masked_diffusion"}, "vanilla"),
    ],
)
def test_an_original_model_is_no_longer_one_once_it_is_trained_in_blocks(options, trained_for, tmp_path):
    """`generate` warns of pipelined decoding of an original model. Its own objective leaves it one."""
    model = tiny_model(trained_for="vanilla")
    trainer = D2FTrainer(model, arguments(tmp_path, **options), train_dataset=tiny_dataset())
    assert model.config.trained_for == "vanilla"
    trainer.train()
    assert model.config.trained_for == trained_for


def test_the_block_size_is_saved_without_an_adapter_too(tmp_path):
    args = arguments(tmp_path / "runs", block_size=8, save_strategy="steps", save_steps=3)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset(), teacher_model=tiny_model())
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    for folder in ("saved", "runs/checkpoint-3"):
        assert load_d2f_model(tmp_path / folder).config.block_size == 8


def test_the_trained_block_size_replaces_that_of_a_generation_config(tmp_path):
    """A block size in the generation config wins over the configuration's, so the model decoded with another one."""
    model = tiny_model()
    model.generation_config.block_size = 4
    trainer = D2FTrainer(
        model,
        arguments(tmp_path, block_size=2, max_steps=1),
        train_dataset=tiny_dataset(),
        teacher_model=tiny_model(),
    )
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    saved = load_d2f_model(tmp_path / "saved")
    assert saved.config.block_size == saved.generation_config.block_size == 2


def test_an_adapter_is_saved_with_the_tokens_it_was_trained_with(tmp_path):
    """Only the block size was saved, so the base's own mask and EOS tokens were taken, without a word."""
    tiny_model().save_pretrained(tmp_path / "base")
    model = load_d2f_model(tmp_path / "base", mask_token_id=7, eos_token_id=[EOS, 5])
    trainer = D2FTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=tiny_dataset())
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    with pytest.raises(ValueError, match="`mask_token_id` must be the one that the adapter was trained with, 7"):
        load_d2f_model(tmp_path / "base", tmp_path / "adapter")
    loaded = load_d2f_model(tmp_path / "base", tmp_path / "adapter", mask_token_id=7)
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == [EOS, 5]


def test_a_bidirectional_model_keeps_its_block_size(tmp_path):
    """The block size of masked diffusion shapes the noise, not the attention."""
    args = arguments(tmp_path, objective="masked_diffusion", block_size=8)
    trainer = D2FTrainer(tiny_model(), args, train_dataset=tiny_dataset())
    trainer.train()
    assert trainer.model.config.block_size == 4
