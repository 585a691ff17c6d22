"""What is particular to LLaDA. What holds for every architecture is in `test_modeling_d2f.py`."""

import torch
from peft import LoraConfig, get_peft_model

from d2f_hf import D2FLLaDAModel
from tiny_models import tiny_model


def test_the_head_is_a_part_of_the_transformer_as_in_the_original_checkpoints():
    model = tiny_model()
    assert isinstance(model.model, D2FLLaDAModel)
    assert model.get_output_embeddings() is model.model.transformer.ff_out
    assert model.get_input_embeddings() is model.model.transformer.wte
    assert not list(model.model.get_layers()[0].attention.parameters()), "the projections belong to the block"


def test_the_head_can_be_trained_along_with_an_adapter_although_blocks_have_a_part_of_its_name():
    """`ff_out` is both the head and the last projection of each block."""
    model = get_peft_model(
        tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["transformer.ff_out"])
    )
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad and "lora" not in name}
    assert trained == {"base_model.model.model.transformer.ff_out.modules_to_save.default.weight"}


def test_an_adapter_on_all_linear_layers_leaves_the_head_out():
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear"))
    adapted = {name.partition(".lora_A")[0] for name in model.state_dict() if ".lora_A" in name}
    modules = tiny_model().named_modules()
    linear = {name for name, module in modules if isinstance(module, torch.nn.Linear) and "blocks" in name}
    assert adapted == {f"base_model.model.{name}" for name in linear}
    assert len(adapted) == 14
    assert not [name for name in adapted if name.endswith("transformer.ff_out")]


def test_a_change_of_the_vocabulary_is_in_the_original_key_too():
    model = tiny_model()
    model.resize_token_embeddings(48, mean_resizing=False)
    assert model.config.embedding_size == model.config.vocab_size == 48
