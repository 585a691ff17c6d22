"""`D2FGenerationConfig`: its values, where they may come from, and what is refused."""

import json
import re

import pytest
import torch
from d2f_hf.modeling.generation_config_d2f import DECODING_MODES, OPTIONS, parameters_of_other_rules
from transformers import CompileConfig, GenerationConfig

from d2f_hf import D2FGenerationConfig, D2FGenerationOutput, D2FLLaDAForBlockDiffusion
from tiny_models import EOS, PAD, VOCAB_SIZE, ScriptedModel, tiny_model

KNOBS = {
    "decoding": "d2f",
    "block_size": 3,
    "block_add_threshold": 0.5,
    "block_activation_threshold": 0.4,
    "confidence_threshold": 0.3,
    "token_ranking": "margin",
    "max_active_blocks": 5,
    "acceptance_rule": "threshold",
    "semi_activated_threshold": 0.6,
    "num_branches": 3,
    "output_trace": True,
}
CREDIT_KNOBS = {
    "decoding": "d2f",
    "acceptance_rule": "credit",
    "semi_activated_threshold": 0.6,
    "credit_decay": 0.5,
    "credit_strength": 1.5,
    "remask_threshold": 0.2,
}
FACTOR_KNOBS = {"decoding": "d2f", "acceptance_rule": "factor", "confidence_factor": 0.8, "token_ranking": "margin"}
ENTROPY_KNOBS = {"decoding": "d2f", "acceptance_rule": "entropy_bound", "entropy_bound": 0.3}
VANILLA_KNOBS = {
    "decoding": "vanilla",
    "block_size": 3,
    "token_ranking": "random",
    "steps": 6,
    "unmask_schedule": "linear",
    "ranking_temperature": 0.5,
    "guidance_scale": 1.5,
}
FAST_DLLM_KNOBS = {
    "decoding": "fast_dllm",
    "block_size": 3,
    "token_ranking": "random",
    "confidence_threshold": 0.3,
    "block_cache": "prefix",
}
MODES = pytest.mark.parametrize(
    "knobs",
    [KNOBS, CREDIT_KNOBS, FACTOR_KNOBS, ENTROPY_KNOBS, VANILLA_KNOBS, FAST_DLLM_KNOBS],
    ids=lambda knobs: knobs.get("acceptance_rule", knobs["decoding"]),
)


def test_generate_without_arguments_does_d2f_with_the_papers_values():
    config = tiny_model().generation_config
    assert type(config) is D2FGenerationConfig
    assert (config.decoding, config.token_ranking) == ("d2f", "probability")
    thresholds = (config.block_add_threshold, config.block_activation_threshold, config.confidence_threshold)
    assert thresholds == (0.1, 0.95, 0.9)
    output = tiny_model().generate(torch.tensor([[1, 2]]), max_new_tokens=8, return_dict_in_generate=True)
    explicit = tiny_model().generate(
        torch.tensor([[1, 2]]), max_new_tokens=8, decoding="d2f", block_size=4, confidence_threshold=0.9
    )
    assert isinstance(output, D2FGenerationOutput) and output.trace is None
    assert output.sequences.equal(explicit)


@MODES
def test_a_saved_generation_config_comes_back_with_class_and_values(knobs, tmp_path):
    model = tiny_model()
    for name, value in knobs.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert {name: saved[name] for name in knobs} == knobs
    reloaded = D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path).generation_config
    assert type(reloaded) is D2FGenerationConfig
    assert {name: getattr(reloaded, name) for name in knobs} == knobs
    assert D2FGenerationConfig.from_pretrained(tmp_path).to_dict() == reloaded.to_dict()


def test_what_a_saved_config_says_for_vanilla_decoding_does_not_stand_in_the_way_of_d2f():
    model = tiny_model()
    model.generation_config.update(decoding="vanilla", steps=4, unmask_schedule="linear")
    prompt = torch.tensor([[1, 2]])
    output = model.generate(prompt, max_new_tokens=4, decoding="d2f")
    assert output.equal(tiny_model().generate(prompt, max_new_tokens=4))
    with pytest.raises(ValueError, match="`steps`"):
        model.generate(prompt, max_new_tokens=4, decoding="d2f", steps=4)


def test_a_saved_generation_config_says_d2f_and_no_nulls(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["decoding"] == "d2f"
    assert None not in saved.values()
    assert "block_size" not in saved, "it follows the model's block_size"


@pytest.mark.parametrize("way", ["keyword", "plain config", "own config", "model's config"])
@MODES
def test_every_knob_reaches_the_loop_in_every_way(knobs, way, monkeypatch):
    seen = {}

    def record(self, input_ids, generation_config, **kwargs):
        seen.update({name: getattr(generation_config, name) for name in knobs})

    monkeypatch.setattr(ScriptedModel, "_sample", record)
    model = ScriptedModel(torch.zeros(5, VOCAB_SIZE))
    arguments = {"max_new_tokens": 4, "pad_token_id": PAD, "eos_token_id": EOS, **knobs}
    if way == "keyword":
        model.generate(torch.tensor([[0]]), **arguments)
    elif way == "model's config":
        model.generation_config.update(**arguments)
        model.generate(torch.tensor([[0]]))
    else:
        config_class = GenerationConfig if way == "plain config" else D2FGenerationConfig
        model.generate(torch.tensor([[0]]), generation_config=config_class(**arguments))
    assert seen == knobs


BAD_VALUES = [
    ("decoding", "beam"),
    ("token_ranking", "entropy"),
    ("block_size", 0),
    ("block_size", 2.5),
    ("block_size", True),
    ("steps", 0),
    ("max_active_blocks", 0),
    ("max_active_blocks", 1.5),
    ("unmask_schedule", "cosine"),
    ("ranking_temperature", -0.1),
    ("ranking_temperature", "hot"),
    ("block_add_threshold", 1.1),
    ("block_add_threshold", -0.1),
    ("block_activation_threshold", 2),
    ("confidence_threshold", float("nan")),
    ("confidence_threshold", "0.9"),
    ("output_trace", "yes"),
    ("acceptance_rule", "confidence"),
    ("acceptance_rule", 0.9),
    ("semi_activated_threshold", 1.1),
    ("entropy_bound", -0.1),
    ("entropy_bound", float("inf")),
    ("entropy_bound", float("nan")),
    ("confidence_factor", -1),
    ("confidence_factor", "1"),
    ("credit_decay", 1.5),
    ("credit_strength", -0.1),
    ("credit_strength", True),
    ("num_branches", 0),
    ("num_branches", 2.0),
    ("remask_threshold", -0.1),
    ("remask_threshold", "low"),
    ("block_cache", "both"),
    ("block_cache", True),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_an_error_that_names_the_parameter(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        D2FGenerationConfig(**{name: value})
    with pytest.raises(ValueError, match=f"`{name}`"):
        tiny_model().generate(torch.tensor([[1]]), max_new_tokens=2, **{name: value})
    with pytest.raises(ValueError, match=f"`{name}`"):
        config = GenerationConfig(max_new_tokens=2, **{name: value})
        tiny_model().generate(torch.tensor([[1]]), generation_config=config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"confidence_treshold": 0.5}, "confidence_treshold"),
        ({"num_beams": 2}, "beam_search.*`num_beams`"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "`attention_mask`.*shape"),
        ({"attention_mask": torch.ones(2)}, "`attention_mask`.*shape"),
        ({"position_ids": torch.tensor([[0, 1]])}, "`position_ids`"),
        ({"prompt_lengths": torch.tensor([2])}, "`prompt_lengths`"),
        ({"eos_token_id": 39}, "`eos_token_id`.*mask"),
        ({"eos_token_id": 1000}, "`eos_token_id`.*vocabulary"),
        ({"generation_config": D2FGenerationConfig(confidence_treshold=0.5)}, "confidence_treshold"),
        ({"generation_config": GenerationConfig(confidence_treshold=0.5)}, "confidence_treshold"),
        ({"decoding": "vanilla", "output_trace": True, "return_dict_in_generate": True}, "`output_trace`"),
        ({"is_assistant": True}, "`is_assistant`"),
        ({"steps": 4}, "`steps`.*vanilla"),
        ({"max_new_tokens": 0}, "max_new_tokens|max_length"),
        ({"max_new_tokens": None, "max_length": 1}, "max_length"),
        ({"guidance_scale": 1.5}, "`guidance_scale`"),
        ({"unmask_schedule": "linear"}, "`unmask_schedule`.*vanilla"),
        ({"ranking_temperature": 0.5}, "`ranking_temperature`.*vanilla"),
        ({"token_ranking": "random"}, "`token_ranking`.*vanilla"),
        ({"decoding": "vanilla", "confidence_threshold": 0.5}, "`confidence_threshold`.*d2f"),
        ({"decoding": "vanilla", "max_active_blocks": 2}, "`max_active_blocks`.*d2f"),
        ({"decoding": "vanilla", "acceptance_rule": "threshold"}, "`acceptance_rule`.*d2f"),
        ({"decoding": "fast_dllm", "acceptance_rule": "factor"}, "`acceptance_rule`.*d2f"),
        ({"decoding": "vanilla", "entropy_bound": 0.1}, "`entropy_bound`.*d2f"),
        ({"decoding": "fast_dllm", "confidence_factor": 1.0}, "`confidence_factor`.*d2f"),
        ({"decoding": "vanilla", "num_branches": 2}, "`num_branches`.*d2f"),
        ({"decoding": "fast_dllm", "remask_threshold": 0.1}, "`remask_threshold`.*d2f"),
        ({"entropy_bound": 0.1}, "`entropy_bound`.*acceptance_rule='threshold'.*acceptance_rule='entropy_bound'"),
        ({"acceptance_rule": "factor", "credit_decay": 0.5}, "`credit_decay`.*acceptance_rule='credit'"),
        ({"acceptance_rule": "credit", "confidence_factor": 0.5}, "`confidence_factor`.*acceptance_rule='factor'"),
        (
            {"acceptance_rule": "entropy_bound", "semi_activated_threshold": 0.5},
            "`semi_activated_threshold`.*acceptance_rule='threshold' or acceptance_rule='credit'",
        ),
        ({"acceptance_rule": "entropy_bound", "token_ranking": "margin"}, "`token_ranking`.*ranks by itself"),
        ({"acceptance_rule": "credit", "token_ranking": "neg_entropy"}, "`token_ranking`.*ranks by itself"),
        ({"num_branches": 2, "remask_threshold": 0.1}, "`remask_threshold`.*`num_branches`"),
        (
            {"decoding": "vanilla", "unmask_schedule": "independent", "ranking_temperature": 1.0},
            "`ranking_temperature`",
        ),
        ({"decoding": "vanilla", "no_repeat_ngram_size": 2}, "`no_repeat_ngram_size`"),
        ({"decoding": "vanilla", "prefix_allowed_tokens_fn": lambda *_: [1]}, "`prefix_allowed_tokens_fn`"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "`penalty_alpha`"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens`"),
        ({"assistant_model": tiny_model()}, "assisted_generation.*`assistant_model`"),
        ({"dola_layers": "low"}, "`dola_layers`"),
        ({"encoder_repetition_penalty": 1.2}, "`encoder_repetition_penalty`"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "`output_attentions`"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "`output_hidden_states`"),
        ({"cache_implementation": "quantized"}, "`cache_implementation`"),
        ({"cache_implementation": "dynamic"}, "`cache_implementation`"),
        ({"negative_prompt_ids": torch.tensor([[1]])}, "`negative_prompt_ids`"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "`inputs_embeds`|`input_ids`"),
        ({"decoding": "vanilla", "steps": 5, "max_new_tokens": 8, "block_size": 4}, "`steps`"),
        ({"cache": object()}, "`cache`"),
        ({"acceptance_rule": "factor", "confidence_threshold": 0.5}, "`confidence_threshold`"),
        ({"acceptance_rule": "entropy_bound", "confidence_threshold": 0.5}, "`confidence_threshold`"),
        ({"decoding": "vanilla", "compile_config": CompileConfig()}, "`compile_config`"),
        ({"decoding": "fast_dllm", "compile_config": CompileConfig()}, "`compile_config`"),
        ({"use_cache": False, "compile_config": CompileConfig()}, "`compile_config`"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_make_no_sense_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(torch.tensor([[1, 2]]), **{"max_new_tokens": 4, **arguments})


def test_acceptance_options_are_the_rule_the_threshold_and_the_parameters_of_the_rule():
    def options(**arguments):
        return D2FGenerationConfig(decoding="d2f", **arguments).with_defaults().acceptance_options()

    threshold = {"confidence_threshold": 0.9}
    assert options() == {"acceptance_rule": "threshold", **threshold}
    assert options(semi_activated_threshold=0.95) == {**options(), "semi_activated_threshold": 0.95}
    assert options(acceptance_rule="factor") == {"acceptance_rule": "factor", **threshold}
    given = {"acceptance_rule": "credit", "confidence_threshold": 0.8, "credit_decay": 0.0, "credit_strength": 1.0}
    assert options(**given, num_branches=2) == given


def test_a_rule_that_is_not_chosen_does_not_stand_in_the_way_of_other_parameters():
    """`None` comes from the model, so a config without a rule can hold the parameters of any."""
    assert D2FGenerationConfig(entropy_bound=0.1).entropy_bound == 0.1
    with pytest.raises(ValueError, match="`entropy_bound`"):
        D2FGenerationConfig(decoding="d2f", entropy_bound=0.1).with_defaults()
    assert D2FGenerationConfig(num_branches=1, remask_threshold=0.1).num_branches == 1


def test_a_model_with_a_rule_of_its_own_can_decode_in_the_other_modes():
    model = tiny_model()
    model.generation_config.update(acceptance_rule="entropy_bound", entropy_bound=0.2, num_branches=2)
    prompt = torch.tensor([[1, 2]])
    for decoding in ("vanilla", "fast_dllm"):
        output = model.generate(prompt, max_new_tokens=4, decoding=decoding)
        assert output.equal(tiny_model().generate(prompt, max_new_tokens=4, decoding=decoding))


# ---- the declarations ----


def test_every_option_is_an_attribute_with_a_docstring():
    """An option is one declaration and its docstring: nothing else has to know it."""
    documented = set(re.findall(r"(?m)^        ([a-z_]+(?:, [a-z_]+)*) \(`", D2FGenerationConfig.__doc__))
    names = {name for names in documented for name in names.split(", ")}
    assert names - {"guidance_scale"} == set(OPTIONS)
    own = vars(D2FGenerationConfig()).keys() - vars(GenerationConfig()).keys()
    assert own == set(OPTIONS)
    for name, option in OPTIONS.items():
        assert option.default is None or option.check.is_met_by(option.default), name
        assert not set(option.not_used_by) - set(DECODING_MODES), name
        assert len(option.not_used_by) < len(DECODING_MODES), f"nobody uses {name}"


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.not_used_by])
def test_an_option_is_refused_by_each_decoding_that_does_not_use_it(name):
    option, values = OPTIONS[name], {**ENTROPY_KNOBS, **FACTOR_KNOBS, **CREDIT_KNOBS, **FAST_DLLM_KNOBS}
    values |= {"steps_per_block": 2, "sub_block_size": 2, "first_token_alone": True}
    values |= {"draft_length": 5, "num_draft_steps": 2, "draft_layout": "rolling", "verification_tolerance": 0.1}
    value = {**values, **VANILLA_KNOBS, **KNOBS, "block_activation_threshold": 0.4}[name]
    value = 5 if name == "max_active_blocks" else value
    for decoding, instead in option.not_used_by.items():
        others = [mode for mode in DECODING_MODES if mode not in option.not_used_by]
        message = f"`{name}`.*{re.escape(instead)}.*{others[0]}"
        with pytest.raises(ValueError, match=message):
            tiny_model().generate(torch.tensor([[1]]), max_new_tokens=2, decoding=decoding, **{name: value})
        if option.default is None:
            with pytest.raises(ValueError, match=message):
                D2FGenerationConfig(decoding=decoding, **{name: value})


def test_what_measured_below_the_default_is_marked_experimental():
    """`steps_per_block` is how released models are decoded, so it is no experiment."""
    usual, experimental = D2FGenerationConfig.__doc__.split("Experimental:")
    for name in ("acceptance_rule", "num_branches", "remask_threshold", *parameters_of_other_rules("factor")):
        if name == "steps_per_block":
            continue
        assert f"        {name}" in experimental or f", {name} (" in experimental
        assert f"        {name}" not in usual
