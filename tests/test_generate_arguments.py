"""What `generate` is given besides its options: prompts, devices, adapters, configs. What cannot be is refused."""

import copy
import json

import pytest
import torch
from peft import (
    CPTConfig,
    LoraConfig,
    MultitaskPromptTuningConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
    pipeline,
)

from d2f_hf import D2FGenerationConfig, D2FLLaDAForBlockDiffusion
from prompts import pad, random_prompts
from tiny_models import (
    BLOCK_DECODINGS,
    EOS,
    LETTERS,
    MASK,
    PAD,
    VOCAB_SIZE,
    ScriptedModel,
    letter_tokenizer,
    sure_of,
    tiny_model,
)

# B batch, P prompt tokens

PROMPT = torch.tensor([[1, 2, 3]])


def forbid_forwards(model: torch.nn.Module) -> torch.nn.Module:
    """The model, whose forwards fail from now on."""

    def fail(*_):
        raise AssertionError("a forward ran before the arguments were refused")

    model.register_forward_pre_hook(fail)
    model.get_input_embeddings().register_forward_pre_hook(fail)
    return model


# ---- prompts ----

BAD_PROMPTS = {
    "no rows": (torch.zeros(0, 3, dtype=torch.long), "`input_ids`.*at least one prompt"),
    "no tokens": (torch.zeros(1, 0, dtype=torch.long), "`input_ids`.*BOS"),
    "an empty text": (torch.zeros(1, 0), "`input_ids`.*BOS"),
    "one dimension": (torch.tensor([1, 2, 3]), r"`input_ids`.*\(B, P\).*`input_ids\[None\]`"),
    "a scalar": (torch.tensor(1), r"`input_ids`.*\(B, P\)"),
    "three dimensions": (torch.tensor([[[1, 2]]]), r"`input_ids`.*\(1, 1, 2\)"),
    "floats": (torch.tensor([[1.0, 2.0]]), "`input_ids`.*integers.*float32"),
    "half floats": (torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), "`input_ids`.*integers"),
    "bools": (torch.tensor([[True, False]]), "`input_ids`.*integers.*bool"),
    "a negative id": (torch.tensor([[1, -100]]), "`input_ids`.*vocabulary.*-100"),
    "an id too high": (torch.tensor([[1, VOCAB_SIZE]]), f"`input_ids`.*vocabulary.*{VOCAB_SIZE}"),
    "a list": ([[1, 2, 3]], "`input_ids`.*tensor.*list"),
    "a text": ("hello", "`input_ids`.*tensor.*str.*tokenizer"),
    "texts": (["hello"], "`input_ids`.*tensor.*tokenizer"),
    "an encoding": (BatchEncoding({"input_ids": PROMPT}), r"`input_ids`.*BatchEncoding.*\*\*inputs"),
    "meta": (torch.ones(1, 3, dtype=torch.long, device="meta"), "`input_ids`.*meta"),
}


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_prompts_that_are_no_batch_of_token_ids_are_refused_before_the_first_forward(kind, decoding):
    """Each ended somewhere inside of transformers or the loop, in an error that does not name the argument."""
    prompt, message = BAD_PROMPTS[kind]
    model = forbid_forwards(tiny_model())
    for arguments in ({"inputs": prompt}, {"input_ids": prompt}):
        with pytest.raises(ValueError, match=message):
            model.generate(**arguments, max_new_tokens=4, decoding=decoding)
    with pytest.raises(ValueError, match=message):
        model.generate(prompt, decoding=decoding)


BAD_MASKS = {
    "another length": (torch.ones(1, 2), "`attention_mask`.*shape"),
    "more rows": (torch.ones(2, 3), "`attention_mask`.*shape"),
    "one dimension": (torch.ones(3), "`attention_mask`.*shape"),
    "four dimensions": (torch.ones(1, 1, 3, 3), "`attention_mask`.*shape"),
    "additive": (torch.tensor([[-torch.inf, 0.0, 0.0]]), "`attention_mask`.*1 for tokens"),
    "additive, finite": (torch.tensor([[torch.finfo(torch.float32).min, 0.0, 0.0]]), "`attention_mask`.*1 for tokens"),
    "NaN": (torch.tensor([[torch.nan, 1.0, 1.0]]), "`attention_mask`.*1 for tokens"),
    "positions": (torch.tensor([[1, 2, 3]]), "`attention_mask`.*1 for tokens"),
    "nothing left": (torch.zeros(1, 3), "`attention_mask`.*BOS"),
    "a list": ([[1, 1, 1]], "`attention_mask`.*tensor.*list"),
}


@pytest.mark.parametrize("kind", BAD_MASKS)
def test_attention_masks_that_do_not_say_what_is_padding_are_refused(kind):
    """A mask of 0 and -inf was read as its opposite; others failed without naming the argument."""
    mask, message = BAD_MASKS[kind]
    with pytest.raises(ValueError, match=message):
        forbid_forwards(tiny_model()).generate(PROMPT, attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.long])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_ids_of_any_integer_type_and_masks_of_any_type_are_the_same(dtype, mask_dtype):
    model, inputs = tiny_model(), pad(random_prompts([3, 5]), "left")
    expected = model.generate(**inputs, max_new_tokens=6)
    output = model.generate(
        inputs["input_ids"].to(dtype), attention_mask=inputs["attention_mask"].to(mask_dtype), max_new_tokens=6
    )
    assert output.equal(expected) and output.dtype == torch.long


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_padding_may_be_of_ids_that_the_vocabulary_does_not_have(decoding):
    """Padding of -100 is read by no one, but was looked up in the embeddings by the bidirectional loops."""
    model, prompts = tiny_model(), random_prompts([2, 6])
    options = {"max_new_tokens": 8, "decoding": decoding}
    for side in ("left", "right"):
        expected = model.generate(**pad(prompts, side), **options)[:, 6:]
        inputs = pad(prompts, side)
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        output = model.generate(**inputs, **options)
        assert output[:, 6:].equal(expected) and output[:, :6].equal(inputs["input_ids"])


def test_the_same_prompt_twice_is_refused():
    with pytest.raises(ValueError, match="`inputs` and `input_ids`"):
        tiny_model().generate(PROMPT, input_ids=PROMPT, max_new_tokens=2)


# ---- options ----

BAD_OPTIONS = [
    ({"max_new_tokens": 16.0}, "`max_new_tokens`.*integer.*16.0"),
    ({"max_new_tokens": 16.5}, "`max_new_tokens`.*integer"),
    ({"max_new_tokens": "16"}, "`max_new_tokens`.*integer"),
    ({"max_new_tokens": True}, "`max_new_tokens`.*integer"),
    ({"max_new_tokens": 0}, "`max_new_tokens`.*at least 1"),
    ({"max_new_tokens": -3}, "`max_new_tokens`.*at least 1"),
    ({"max_new_tokens": torch.tensor([4])}, "`max_new_tokens`.*integer"),
    ({"max_length": 20.5}, "`max_length`.*integer"),
    ({"max_length": 20.0}, "`max_length`.*integer"),
    ({"max_length": "20"}, "`max_length`.*integer"),
    ({"max_length": 2}, "max_length"),
    ({"max_length": 3}, "max_length"),
    ({"min_new_tokens": 1.5}, "`min_new_tokens`.*integer"),
    ({"min_new_tokens": -1}, "`min_new_tokens`.*at least 0"),
    ({"min_length": 4.5}, "`min_length`.*integer"),
    ({"num_return_sequences": 0}, "`num_return_sequences`.*at least 1"),
    ({"num_return_sequences": 1.5, "do_sample": True}, "`num_return_sequences`.*integer"),
    ({"num_return_sequences": 2}, "num_return_sequences"),
    ({"use_cache": "no"}, "`use_cache`.*True or False"),
    ({"use_cache": 0}, "`use_cache`.*True or False"),
    ({"do_sample": "False"}, "`do_sample`.*True or False"),
    ({"output_scores": "no", "return_dict_in_generate": True}, "`output_scores`.*True or False"),
    ({"guidance_scale": float("nan"), "decoding": "vanilla"}, "`guidance_scale`.*nan"),
    ({"guidance_scale": float("inf"), "decoding": "vanilla"}, "`guidance_scale`.*inf"),
    ({"guidance_scale": "2", "decoding": "vanilla"}, "`guidance_scale`"),
    ({"top_p": float("nan"), "do_sample": True}, "`top_p`.*nan"),
    ({"temperature": float("nan"), "do_sample": True}, "`temperature`.*nan"),
    ({"repetition_penalty": float("nan")}, "`repetition_penalty`.*nan"),
    ({"max_time": float("nan")}, "`max_time`.*nan"),
    ({"max_time": "30"}, "`max_time`.*seconds.*'30'"),
    ({"stopping_criteria": MaxLengthCriteria(9)}, "`stopping_criteria`.*list"),
    ({"stopping_criteria": [None]}, "`stopping_criteria`.*list of functions"),
    ({"logits_processor": TemperatureLogitsWarper(0.5)}, "`logits_processor`.*list"),
    ({"logits_processor": lambda input_ids, scores: scores}, "`logits_processor`.*list"),
    ({"prefix_allowed_tokens_fn": [1, 2]}, "`prefix_allowed_tokens_fn`.*function"),
    ({"streamer": print}, "`streamer`.*`put`"),
    ({"generator": 0}, "`generator`.*torch.Generator"),
    ({"confidence_threshold": torch.tensor(0.5)}, "`confidence_threshold`"),
    ({"confidence_threshold": "0.5"}, "`confidence_threshold`"),
    ({"confidence_threshold": True}, "`confidence_threshold`"),
    ({"block_size": torch.tensor(4)}, "`block_size`"),
    ({"decoding": ["d2f"]}, "`decoding`"),
    ({"token_ranking": torch.zeros(2)}, "`token_ranking`"),
    ({"eos_token_id": -1}, "`eos_token_id`.*-1.*None"),
    ({"eos_token_id": [EOS, VOCAB_SIZE]}, "`eos_token_id`.*vocabulary"),
    ({"eos_token_id": MASK}, "`eos_token_id`.*mask"),
    ({"eos_token_id": 2.5}, "`eos_token_id`.*integers"),
    ({"eos_token_id": "</s>"}, "`eos_token_id`.*integers"),
    ({"eos_token_id": []}, "`eos_token_id`"),
    ({"pad_token_id": -1}, "`pad_token_id`.*vocabulary"),
    ({"pad_token_id": VOCAB_SIZE}, "`pad_token_id`.*vocabulary"),
    ({"pad_token_id": [PAD]}, "`pad_token_id`"),
    ({"torch_dtype": "auto"}, "`torch_dtype`.*from_pretrained"),
    ({"dtype": torch.bfloat16}, "`dtype`.*from_pretrained"),
    ({"variant": "fp16"}, "`variant`.*from_pretrained"),
    ({"device": "cpu"}, "`device`"),
    ({"seed": 0}, "`seed`.*`generator="),
    ({"adapter_names": ["default"]}, "`adapter_names`"),
    ({"confidence_treshold": 0.5}, "`confidence_treshold`.*`confidence_threshold`"),
    ({"max_new_token": 5}, "`max_new_token`.*`max_new_tokens`"),
    ({"nonsense": 5}, "nonsense"),
    ({"is_causal": True}, "`is_causal`"),
    ({"generation_config": {"max_new_tokens": 4}}, "`generation_config`.*dict"),
    ({"generation_config": "folder"}, "`generation_config`.*str"),
    ({"inputs_embeds": torch.zeros(1, 3, 32)}, "`inputs_embeds`"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:50])
def test_options_that_cannot_be_are_refused_before_the_first_forward(arguments, message):
    """Fractional lengths, NaN and the like went as far as the loop, or changed what it did."""
    with pytest.raises(ValueError, match=message):
        forbid_forwards(tiny_model()).generate(PROMPT, **{"max_new_tokens": None, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (arguments, message)
        for arguments, message in BAD_OPTIONS
        if all(name in vars(D2FGenerationConfig()) for name in arguments) and "num_return_sequences" not in arguments
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_refused_as_a_keyword_is_refused_from_any_config(arguments, message):
    """Attributes that are set later on a config are checked by no one but `generate`."""
    for config_class in (GenerationConfig, D2FGenerationConfig):
        for of_model in (True, False):
            model, config = forbid_forwards(tiny_model()), config_class()
            for name, value in arguments.items():
                setattr(config, name, value)
            if of_model:
                model.generation_config = config
            with pytest.raises(ValueError, match=message):
                model.generate(PROMPT, generation_config=None if of_model else config)


def test_a_threshold_may_be_a_number_of_numpy():
    """Limits of numpy were taken, thresholds of numpy refused."""
    numpy, options = pytest.importorskip("numpy"), {"max_new_tokens": 9, "pad_token_id": PAD}
    expected = tiny_model().generate(PROMPT, confidence_threshold=0.25, **options)
    assert tiny_model().generate(PROMPT, confidence_threshold=numpy.float32(0.25), **options).equal(expected)
    assert tiny_model().open_stream(numpy.int64(2), numpy.int64(5), **options).add(PROMPT[0], seed=numpy.int64(1)) == 0


def test_limits_may_be_integers_of_numpy():
    numpy = pytest.importorskip("numpy")
    model = tiny_model()
    expected = model.generate(PROMPT, max_new_tokens=6, block_size=3)
    assert model.generate(PROMPT, max_new_tokens=numpy.int64(6), block_size=numpy.int32(3)).equal(expected)


def test_an_eos_of_none_decodes_up_to_the_limit():
    model = ScriptedModel(sure_of([EOS] * 20))
    assert model.generate(PROMPT, max_new_tokens=5, eos_token_id=None, pad_token_id=PAD).shape == (1, 8)
    assert model.generate(PROMPT, max_new_tokens=5, eos_token_id=torch.tensor([EOS])).shape == (1, 4)


def test_a_streamer_hears_nothing_of_a_call_that_is_refused():
    class Silent(TextStreamer):
        def put(self, value):
            raise AssertionError("told of a prompt that is not decoded")

    for arguments in ({"inputs": torch.tensor([[1, 99]])}, {"inputs": PROMPT, "max_new_tokens": 1.5}):
        with pytest.raises(ValueError):
            tiny_model().generate(**arguments, streamer=Silent(letter_tokenizer()))


# ---- the model ----


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = D2FLLaDAForBlockDiffusion(tiny_model().config)
    for decoding in BLOCK_DECODINGS:
        with pytest.raises(ValueError, match="meta device.*from_pretrained"):
            model.generate(PROMPT, max_new_tokens=4, decoding=decoding)
    half = tiny_model()
    half.get_output_embeddings().to("meta")
    with pytest.raises(ValueError, match="meta device"):
        half.generate(PROMPT, max_new_tokens=4)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_vocabulary_below_the_mask_token_is_refused(family):
    """The mask token was looked up behind the end of the embeddings, or written to logits that do not have it."""
    model = tiny_model(family=family)
    model.resize_token_embeddings(MASK)
    with pytest.raises(ValueError, match=f"`config.mask_token_id`.*{MASK}"):
        forbid_forwards(model).generate(PROMPT, max_new_tokens=4, eos_token_id=None, pad_token_id=None)
    model = tiny_model(family=family)
    model.config.mask_token_id = VOCAB_SIZE
    with pytest.raises(ValueError, match="`config.mask_token_id`"):
        forbid_forwards(model).generate(PROMPT, max_new_tokens=4)
    model = tiny_model(family=family)
    model.set_output_embeddings(torch.nn.Linear(32, 20, bias=False))
    with pytest.raises(ValueError, match="`config.mask_token_id`"):
        forbid_forwards(model).generate(PROMPT, max_new_tokens=4)


def test_a_model_that_prepares_inputs_of_its_own_is_refused():
    """The loops never call `prepare_inputs_for_generation`, so what it does would be left out silently."""

    class Prepared(D2FLLaDAForBlockDiffusion):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    with pytest.raises(ValueError, match="`prepare_inputs_for_generation`"):
        Prepared(tiny_model().config).generate(PROMPT, max_new_tokens=4)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_a_model_whose_weights_are_offloaded_decodes(where, decoding, tmp_path):
    """Its weights are on "meta" then, and its prompts have to go to where they are fetched."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = tiny_model(), pad(random_prompts([3, 6]), "left")
    expected = model.generate(**inputs, max_new_tokens=8, decoding=decoding)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(weight.is_meta for weight in model.parameters())
    assert model.generate(**inputs, max_new_tokens=8, decoding=decoding).equal(expected)
    if decoding == "d2f":
        prompts = [torch.tensor(prompt) for prompt in random_prompts([3, 6])]
        for number, tokens in model.generate_stream_batch(prompts, 2, 6, max_new_tokens=8):
            assert tokens.tolist() == expected[number, 6:][: len(tokens)].tolist()


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
@pytest.mark.parametrize("way", ["context", "default"])
def test_the_default_device_changes_nothing(decoding, way):
    """The state of decoding is on the host, but was made with factory calls that follow the default device."""
    model, inputs = tiny_model(), pad(random_prompts([3, 6]), "left")
    calls = [
        {"max_new_tokens": 8, "decoding": decoding, "return_dict_in_generate": True, "output_scores": True},
        {"max_new_tokens": 8, "decoding": decoding, "do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
        {"max_new_tokens": 8, "decoding": decoding, "repetition_penalty": 1.3, "min_new_tokens": 3},
    ]
    if decoding == "d2f":
        calls += [{**calls[0], "num_branches": 2}, {**calls[0], "remask_threshold": 0.5, "output_trace": True}]
        calls += [{**calls[1], "num_return_sequences": 2}, {**calls[0], "acceptance_rule": "credit"}]
    if decoding == "vanilla":
        calls += [{**calls[0], "guidance_scale": 1.5, "unmask_schedule": "linear", "ranking_temperature": 0.5}]

    def run():
        torch.manual_seed(0)
        outputs = [model.generate(**inputs, **call) for call in calls]
        return [output if isinstance(output, torch.Tensor) else output.sequences for output in outputs]

    expected = run()
    if way == "context":
        with torch.device("meta"):
            outputs = run()
    else:
        torch.set_default_device("meta")
        try:
            outputs = run()
        finally:
            torch.set_default_device(None)
    assert all(output.equal(tokens) for output, tokens in zip(outputs, expected, strict=True))


def test_the_default_device_changes_nothing_in_a_stream():
    """The answer of a criterion was moved to the default device, which may not be read."""
    model, prompts = tiny_model(), [torch.tensor(prompt) for prompt in random_prompts([3, 6])]

    def run():
        responses = model.generate_stream_batch(
            prompts, 2, 6, max_new_tokens=8, max_time=1000.0, repetition_penalty=1.3
        )
        return sorted((number, tokens.tolist()) for number, tokens in responses)

    expected = run()
    with torch.device("meta"):
        assert run() == expected


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"]
)
@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_every_option_of_sampling_works_in_every_decoding(name, decoding):
    """`top_h` was taken for a processor of the caller, which decodes from left to right or not at all."""
    model = ScriptedModel(torch.zeros(20, VOCAB_SIZE))
    value = 5 if name == "top_k" else 0.5 if name[:3] in ("top", "tem", "min", "typ") else 1e-3
    options = {"do_sample": True, name: value, "confidence_threshold": 0.0, "block_size": 8}
    if decoding == "vanilla":
        options.pop("confidence_threshold")
        options["steps"] = 1
    output = model.generate(PROMPT, max_new_tokens=8, decoding=decoding, return_dict_in_generate=True, **options)
    assert output.sequences.shape[1] <= 11 and output.num_forward_passes.item() <= 2


@pytest.fixture
def warned(monkeypatch) -> list[str]:
    """What is logged as a warning, each text once."""
    said: list[str] = []
    monkeypatch.setattr(
        "d2f_hf.modeling.generate_arguments.logger.warning_once",
        lambda text: None if text in said else said.append(text),
    )
    return said


@pytest.mark.parametrize(
    "trained_for, decoding, way_out",
    [
        ("vanilla", "d2f", "decoding='vanilla' or decoding='fast_dllm'"),
        ("autoregressive", "d2f", "decoding='autoregressive'"),
        ("autoregressive", "vanilla", "decoding='autoregressive'"),
        ("autoregressive", "fast_dllm", "decoding='autoregressive'"),
        ("vanilla", "vanilla", None),
        ("vanilla", "fast_dllm", None),
        ("autoregressive", "autoregressive", None),
        (None, "d2f", None),
        (None, "vanilla", None),
    ],
)
def test_a_decoding_that_the_model_was_never_trained_for_is_warned_of_once(trained_for, decoding, way_out, warned):
    """An original LLaDA without an adapter was decoded by D2F, which is the default, without a word."""
    causal = {"right_shift_logits": True, "has_causal_mode": True} if trained_for == "autoregressive" else {}
    model = tiny_model(trained_for=trained_for, **causal)
    said_before_the_first_forward = []
    model.register_forward_pre_hook(lambda *_: said_before_the_first_forward.append(len(warned)))
    block = {} if decoding == "autoregressive" else {"block_size": 2}
    for _ in range(2):
        model.generate(PROMPT, max_new_tokens=4, decoding=decoding, **block)
    if way_out is None:
        assert warned == []
    else:
        (text,) = warned
        assert type(model).__name__ in text and way_out in text and f"decoding={decoding!r}" in text
        assert "config.trained_for = None" in text and said_before_the_first_forward[0] == 1


def test_a_stream_warns_of_its_decoding_too(warned):
    stream = tiny_model(trained_for="vanilla").open_stream(2, 4, max_new_tokens=4, block_size=2)
    for _ in range(2):
        stream.add(PROMPT[0])
    assert len(warned) == 1


def test_an_adapter_that_is_on_makes_another_model_of_it(warned):
    """What an adapter was trained for is not known. Without it the model is the original again."""
    model = tiny_model(trained_for="vanilla")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    adapted.generate(PROMPT, max_new_tokens=4, block_size=2)
    assert warned == []
    with adapted.disable_adapter():
        adapted.generate(PROMPT, max_new_tokens=4, block_size=2)
    assert len(warned) == 1


# ---- adapters ----

SIZES = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4, "num_layers": 2, "token_dim": 32, "num_attention_heads": 4}
PROMPT_LEARNING = {
    "PROMPT_TUNING": PromptTuningConfig(**SIZES),
    "P_TUNING": PromptEncoderConfig(**SIZES, encoder_hidden_size=32),
    "PREFIX_TUNING": PrefixTuningConfig(**SIZES),
    "MULTITASK_PROMPT_TUNING": MultitaskPromptTuningConfig(**SIZES, num_tasks=2),
    "CPT": CPTConfig(**{**SIZES, "cpt_token_ids": [1, 2, 3, 4], "cpt_tokens_type_mask": [1, 2, 3, 4]}),
}


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
@pytest.mark.parametrize("kind", PROMPT_LEARNING)
def test_adapters_that_learn_prompts_are_refused_by_name(kind, decoding):
    """`generate` gave the base model's tokens, whatever was trained: no loop reads the virtual tokens."""
    base = tiny_model(family="dream")
    expected = base.generate(PROMPT, max_new_tokens=8, decoding=decoding)
    model = get_peft_model(base, copy.deepcopy(PROMPT_LEARNING[kind])).eval()
    tasks = {"task_ids": torch.tensor([0])} if kind.startswith("MULTITASK") else {}
    for _ in range(2):
        with pytest.raises(ValueError, match=kind):
            model.generate(input_ids=PROMPT, max_new_tokens=8, decoding=decoding, **tasks)
    with model.disable_adapter():
        assert model.generate(input_ids=PROMPT, max_new_tokens=8, decoding=decoding).equal(expected)
    assert model.base_model.generate(PROMPT, max_new_tokens=8, decoding=decoding).equal(expected)


def two_adapters(**options):
    """A model with the LoRA adapters "default" and "other", and one whose head has them too with `target_modules`."""
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": ["q_proj", "v_proj"], **options})
    model = get_peft_model(tiny_model(), config).eval()
    model.add_adapter("other", config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.5)
    return model


def num_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(
    "options", [{}, {"num_branches": 2}, {"remask_threshold": 0.1}, {"use_cache": False}], ids=str
)
@pytest.mark.parametrize("names", [["default", "other"], ["__base__", "default"], ["default", "default"]], ids=str)
def test_an_adapter_for_each_row_is_refused_and_the_model_stays_usable(names, options):
    """Rows leave, are packed and share forwards, so the names met other rows. peft left its hooks behind."""
    model, inputs = two_adapters(), pad(random_prompts([3, 6]), "left")
    expected = model.generate(**inputs, max_new_tokens=8)
    for _ in range(2):
        with pytest.raises(ValueError, match="`adapter_names`.*set_adapter.*vanilla"):
            model.generate(**inputs, adapter_names=names, max_new_tokens=8, **options)
        assert num_hooks(model) == 0
        assert model.generate(**inputs, max_new_tokens=8).equal(expected)
    with pytest.raises(ValueError, match="`adapter_names`"):
        model.generate_stream_batch([PROMPT[0]], 1, 3, max_new_tokens=4, adapter_names=names)
    with pytest.raises(ValueError, match="`max_new_tokens`"):
        model.generate(**inputs, adapter_names=names, max_new_tokens=1.5)
    assert num_hooks(model) == 0


@pytest.mark.parametrize("decoding", ["vanilla", "fast_dllm"])
def test_an_adapter_for_each_row_works_where_the_batch_stays_as_it_is(decoding):
    model, prompts = two_adapters(), random_prompts([3, 6, 4])
    names = ["other", "__base__", "default"]
    output = model.generate(**pad(prompts, "left"), adapter_names=names, max_new_tokens=8, decoding=decoding)
    rows = []
    for prompt, name in zip(prompts, names, strict=True):
        arguments = {"input_ids": torch.tensor([prompt]), "max_new_tokens": 8, "decoding": decoding}
        if name == "__base__":
            with model.disable_adapter():
                tokens = model.generate(**arguments)
        else:
            model.set_adapter(name)
            tokens = model.generate(**arguments)
        rows.append(tokens[0, len(prompt) :].tolist())
    assert len({tuple(row) for row in rows}) == 3
    for row, tokens in zip(output[:, 6:].tolist(), rows, strict=True):
        assert row[: len(tokens)] == tokens
    with pytest.raises(ValueError, match="`adapter_names`.*6 rows"):
        model.generate(
            **pad(prompts, "left"),
            adapter_names=names,
            max_new_tokens=8,
            decoding=decoding,
            do_sample=True,
            num_return_sequences=2,
        )
    assert num_hooks(model) == 0


def test_an_adapter_for_each_row_on_the_head_is_refused():
    """The head reads the masked tokens of all rows at once."""
    model = two_adapters(target_modules=["q_proj", "model.transformer.ff_out"])
    with pytest.raises(ValueError, match="`adapter_names`.*head"):
        model.generate(
            input_ids=PROMPT.expand(2, -1), adapter_names=["default", "other"], max_new_tokens=4, decoding="vanilla"
        )
    assert num_hooks(model) == 0


def test_adapters_whose_weights_depend_on_the_input_are_refused(tmp_path):
    """Poly takes a task for each row; X-LoRA and activated LoRA look at the input of the whole forward."""
    model = get_peft_model(
        tiny_model(), PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], n_tasks=2)
    ).eval()
    with pytest.raises(ValueError, match="Adapters whose effect.*peft.tuners.poly"):
        model.generate(input_ids=PROMPT, task_ids=torch.tensor([0]), max_new_tokens=4)
    activated = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[2, 3])
    model = get_peft_model(tiny_model(), activated).eval()
    with pytest.raises(ValueError, match="Adapters whose effect.*`alora_offsets`"):
        model.generate(input_ids=PROMPT, max_new_tokens=4)
    assert num_hooks(model) == 0


# ---- generation configs ----


class OtherConfig(GenerationConfig):
    """As of another model: options of its own, one of which has a name that D2F has too."""

    def __init__(self, **kwargs):
        self.confidence_threshold = kwargs.pop("confidence_threshold", 0.3)
        self.entropy = kwargs.pop("entropy", 1.0)
        super().__init__(**kwargs)


SPECIAL = {"eos_token_id": EOS, "pad_token_id": PAD}
CONFIGS = {
    "plain": lambda: GenerationConfig(**SPECIAL),
    "of the model's config": lambda: GenerationConfig.from_model_config(tiny_model().config),
    "own": lambda: D2FGenerationConfig(**SPECIAL),
    "another model's": lambda: OtherConfig(confidence_threshold=0.9, **SPECIAL),
    "with fields of other decoders": lambda: GenerationConfig(
        length_penalty=2.0,
        early_stopping=True,
        decoder_start_token_id=0,
        block_cache="dual",
        unmask_schedule="even",
        **SPECIAL,
    ),
    "with fields that nobody knows": lambda: GenerationConfig(block_temperature=0.1, **SPECIAL),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_any_generation_config_can_be_assigned_to_a_model(kind, decoding):
    """`model.generation_config = GenerationConfig(...)` ended each call in an AttributeError."""
    expected = tiny_model().generate(PROMPT, max_new_tokens=12, decoding=decoding)
    model = tiny_model()
    model.generation_config = config = CONFIGS[kind]()
    options = {} if decoding == "d2f" else {"decoding": decoding}
    assert model.generate(PROMPT, max_new_tokens=12, **options).equal(expected)
    assert model.generation_config is config
    assert copy.deepcopy(model).generate(PROMPT, max_new_tokens=12, **options).equal(expected)
    model.generation_config.max_new_tokens = 5
    assert model.generate(PROMPT, **options).shape == (1, 8)
    if decoding == "d2f":
        [response] = dict(model.generate_stream_batch([PROMPT[0]], 1, 3, max_new_tokens=12)).values()
        assert response.tolist() == expected[0, 3:].tolist()


@pytest.mark.parametrize(
    "kind", [kind for kind in CONFIGS if kind != "with fields of other decoders"]
)  # transformers saves no such one
def test_a_model_with_any_generation_config_can_be_saved_and_loaded(kind, tmp_path):
    expected = tiny_model().generate(PROMPT, max_new_tokens=12)
    model = tiny_model()
    model.generation_config = CONFIGS[kind]()
    model.save_pretrained(tmp_path)
    loaded = D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path)
    assert type(loaded.generation_config) is D2FGenerationConfig
    assert loaded.generate(PROMPT, max_new_tokens=12).equal(expected)
    loaded.save_pretrained(tmp_path / "again")
    again = D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path / "again")
    assert again.generate(PROMPT, max_new_tokens=12).equal(expected)


def test_options_of_d2f_can_be_set_on_a_plain_config():
    model = ScriptedModel(torch.zeros(9, VOCAB_SIZE))
    model.generation_config = GenerationConfig(max_new_tokens=8, **SPECIAL)
    model.generation_config.confidence_threshold = 0.0
    model.generation_config.block_size = 8
    assert model.generate(PROMPT[:, :1], return_dict_in_generate=True).num_forward_passes.item() == 1
    model.generation_config.confidence_threshold = 2.0
    with pytest.raises(ValueError, match="`confidence_threshold`"):
        model.generate(PROMPT)


FILES = {
    "nothing": {},
    "of another version": {"transformers_version": "9.0.0", "future_option": [1, 2], **SPECIAL},
    "of the original Dream": {"_from_model_config": True, "transformers_version": "4.46.2", **SPECIAL},
    "of another decoder": {"steps": 512, "unmask_schedule": "linear", "length_penalty": 0.6, "guidance_scale": 2.0},
    "with nulls": {"decoding": None, "confidence_threshold": None, "max_length": None, **SPECIAL},
}


@pytest.mark.parametrize("kind", FILES)
def test_generation_config_files_of_any_version_load(kind, tmp_path):
    """Missing and unknown fields are no reason to refuse a model; what is not used by the decoding is left out."""
    model = tiny_model()
    model.generation_config.eos_token_id = None
    expected = {
        eos: model.generate(PROMPT, max_new_tokens=12, eos_token_id=eos, pad_token_id=PAD) for eos in (EOS, None)
    }
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(FILES[kind]))
    loaded = D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path)
    options = {"max_new_tokens": 12, "pad_token_id": PAD}
    output = loaded.generate(PROMPT, **options)
    assert output.equal(expected[loaded.generation_config.eos_token_id])
    given = GenerationConfig.from_pretrained(tmp_path)
    given.update(
        steps=None, unmask_schedule=None, length_penalty=None, guidance_scale=None, eos_token_id=EOS, **options
    )
    assert model.generate(PROMPT, generation_config=given).equal(expected[EOS])
    loaded.save_pretrained(tmp_path / "again")
    assert D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path / "again").generate(PROMPT, **options).equal(output)


def test_a_pipeline_takes_a_model_with_a_plain_config():
    model = ScriptedModel(sure_of([0, 0, 0, *(LETTERS.index(c) for c in "the end."), *[EOS] * 30]))
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    pipe = pipeline("text-generation", model=model, tokenizer=letter_tokenizer())
    [result] = pipe("aaa", max_new_tokens=20, do_sample=False)
    assert result["generated_text"] == "aaathe end."


@pytest.mark.parametrize("value", [None, {}, "generation_config.json"], ids=str)
def test_what_is_no_generation_config_is_refused(value):
    model = forbid_forwards(tiny_model())
    model.generation_config = value
    with pytest.raises(ValueError, match="`model.generation_config`.*from_model_config"):
        model.generate(PROMPT, max_new_tokens=4)


def test_a_config_of_the_call_may_choose_another_decoding_than_that_of_the_model():
    """A `D2FGenerationConfig` was checked together with values of the model's own config that give way to it."""
    model = tiny_model()
    model.generation_config.update(acceptance_rule="factor", confidence_factor=0.8, num_branches=2)
    expected = tiny_model().generate(PROMPT, max_new_tokens=8, decoding="vanilla")
    config = D2FGenerationConfig(decoding="vanilla", max_new_tokens=8, **SPECIAL)
    assert model.generate(PROMPT, generation_config=config).equal(expected)


def test_an_explicit_none_is_no_config_and_no_processor():
    model = tiny_model()
    expected = model.generate(PROMPT, max_new_tokens=6)
    nothing = {"generation_config": None, "logits_processor": None, "stopping_criteria": None, "streamer": None}
    assert model.generate(PROMPT, max_new_tokens=6, attention_mask=None, **nothing).equal(expected)
    assert model.generate(PROMPT, None, LogitsProcessorList(), max_new_tokens=6).equal(expected)


@pytest.mark.parametrize("config_class", [GenerationConfig, D2FGenerationConfig])
def test_a_config_given_to_from_pretrained_is_that_of_the_model(config_class, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    given = config_class(steps=4, max_new_tokens=8, **SPECIAL)
    loaded = D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path, generation_config=given)
    expected = tiny_model().generate(PROMPT, max_new_tokens=8, decoding="vanilla", steps=4)
    assert loaded.generate(PROMPT, decoding="vanilla").equal(expected)
    assert loaded.generate(PROMPT).equal(tiny_model().generate(PROMPT, max_new_tokens=8))


def test_a_prompt_of_nothing_but_the_bos_token_is_made_where_none_is_given():
    model = tiny_model()
    expected = model.generate(torch.tensor([[5]]), max_new_tokens=6)
    assert model.generate(bos_token_id=5, max_new_tokens=6).equal(expected)
    with pytest.raises(ValueError, match="bos_token_id"):
        forbid_forwards(model).generate(max_new_tokens=6)


def test_a_peft_model_takes_a_plain_generation_config():
    model = two_adapters()
    expected = model.generate(input_ids=PROMPT, max_new_tokens=6)
    for owner in (model, model.get_base_model()):
        owner.generation_config = GenerationConfig(max_new_tokens=6, **SPECIAL)
        assert model.generate(input_ids=PROMPT).equal(expected)


@pytest.mark.parametrize("decoding", BLOCK_DECODINGS)
def test_a_model_whose_config_asks_for_tuples_decodes(decoding):
    """`config.return_dict = False` once ended in "'tuple' object has no attribute 'logits'"."""
    model, inputs = tiny_model(), pad(random_prompts([3, 6]), "left")
    expected = model.generate(**inputs, max_new_tokens=8, decoding=decoding)
    model.config.return_dict = False
    assert model.generate(**inputs, max_new_tokens=8, decoding=decoding).equal(expected)
