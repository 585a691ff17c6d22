"""Where a mask token comes from, and how an autoregressive model and its tokenizer get one."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from causal_models import VOCAB_SIZE, stock_model
from d2f_hf import add_mask_token, load_d2f_model
from d2f_hf.mask_token import MASK_TOKENS, give_mask_row, read_vocabulary
from tiny_models import tokenizer_of

STOCK = (
    (LlamaConfig, LlamaForCausalLM),
    (MistralConfig, MistralForCausalLM),
    (Qwen2Config, Qwen2ForCausalLM),
    (Qwen3Config, Qwen3ForCausalLM),
)
IDS = torch.arange(3, 15)[None]


def base(folder, tokenizer=None, **options):
    model = stock_model(LlamaConfig, LlamaForCausalLM, **options)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder, model


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS, prompt_lengths=torch.zeros(1, dtype=torch.long), block_size=1).logits


tied_and_untied = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@tied_and_untied
@pytest.mark.parametrize("num_words", [None, 60, VOCAB_SIZE], ids=["no tokenizer", "free rows", "full"])
def test_a_new_mask_token_changes_no_logit_of_another_and_is_never_the_best(tied, num_words, tmp_path):
    tokenizer = None if num_words is None else tokenizer_of(num_words)
    folder, stock = base(tmp_path / "base", tokenizer, tie_word_embeddings=tied)
    model = load_d2f_model(folder)
    mask_token_id = 60 if num_words == 60 else VOCAB_SIZE
    assert model.config.mask_token_id == mask_token_id
    assert model.config.vocab_size == max(VOCAB_SIZE, mask_token_id + 1)
    with torch.no_grad():
        expected = stock(IDS).logits
    others = [i for i in range(VOCAB_SIZE) if i != mask_token_id]
    found = logits(model)
    torch.testing.assert_close(found[..., others], expected[..., others], rtol=0, atol=1e-5)
    assert (found[..., mask_token_id] < found[..., others].amax(-1)).all()
    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    for layer in layers:
        torch.testing.assert_close(layer.weight[mask_token_id], layer.weight[others].mean(0))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied

    if tokenizer is not None:
        assert add_mask_token(model, tokenizer) == mask_token_id == tokenizer.mask_token_id
        assert tokenizer.convert_tokens_to_ids("<|mask|>") == mask_token_id
        assert tokenizer.chat_template == "{{ messages }}"
        tokenizer.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    again = load_d2f_model(tmp_path / "saved")
    assert again.config.mask_token_id == mask_token_id and again.config.has_causal_mode
    assert logits(again).equal(found)
    if tokenizer is not None:
        assert AutoTokenizer.from_pretrained(tmp_path / "saved").mask_token_id == mask_token_id


def test_loading_draws_no_random_numbers(tmp_path):
    """New rows of `resize_token_embeddings` do."""
    folder, _ = base(tmp_path / "base")
    state = torch.get_rng_state()
    load_d2f_model(folder)
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("name", MASK_TOKENS)
def test_a_mask_token_of_the_vocabulary_is_taken(name, tmp_path):
    folder, stock = base(tmp_path / "base", tokenizer_of(50, "<|other|>", name))
    model = load_d2f_model(folder)
    assert model.config.mask_token_id == 51
    assert model.get_input_embeddings().weight.equal(stock.get_input_embeddings().weight), "its row stays"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert add_mask_token(model, tokenizer) == 51 and tokenizer.mask_token == name and len(tokenizer) == 52


def test_what_the_tokenizer_calls_its_mask_token_goes_before_a_name(tmp_path):
    folder, _ = base(tmp_path / "base", tokenizer_of(50, "<mask>", mask_token="<hidden>"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_d2f_model(folder)
    assert model.config.mask_token_id == tokenizer.mask_token_id == tokenizer.convert_tokens_to_ids("<hidden>")


def test_a_mask_token_that_is_no_token_is_not_taken(tmp_path):
    """Some tokenizers name a default that their vocabulary does not have."""
    folder, _ = base(tmp_path / "base", tokenizer_of(50))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mask_token": "[MASK]"}))
    assert load_d2f_model(folder).config.mask_token_id == 50


def test_the_caller_names_a_token_or_an_id(tmp_path):
    folder, stock = base(tmp_path / "base", tokenizer_of(50, "<reserved>", "<mask>"))
    for options, expected in (({"mask_token": "<reserved>"}, 50), ({"mask_token_id": 70}, 70), ({}, 51)):
        model = load_d2f_model(folder, **options)
        assert model.config.mask_token_id == expected
        assert model.get_input_embeddings().weight.equal(stock.get_input_embeddings().weight)
    assert load_d2f_model(folder, mask_token_id=VOCAB_SIZE).config.vocab_size == VOCAB_SIZE + 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask_token": "<nothing>"}, ("`mask_token`", "'<nothing>'", "Leave it out")),
        ({"mask_token": 3}, ("`mask_token`", "3", "`mask_token_id`")),
        ({"mask_token": "w1", "mask_token_id": 1}, ("`mask_token`", "`mask_token_id`", "one of them")),
        ({"mask_token_id": VOCAB_SIZE + 1}, ("`mask_token_id`", str(VOCAB_SIZE + 1))),
        ({"mask_token_id": -1}, ("`mask_token_id`", "-1")),
    ],
    ids=str,
)
def test_a_mask_token_that_cannot_be_is_refused(options, words, tmp_path):
    folder, _ = base(tmp_path / "base", tokenizer_of(50))
    with pytest.raises(ValueError) as error:
        load_d2f_model(folder, **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_without_tokenizer_files_a_token_cannot_be_named(tmp_path):
    folder, _ = base(tmp_path / "base")
    with pytest.raises(ValueError, match="`mask_token`.*needs a tokenizer.json"):
        load_d2f_model(folder, mask_token="<mask>")


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path):
    folder, _ = base(tmp_path / "base", tokenizer_of(VOCAB_SIZE + 3))
    with pytest.raises(ValueError, match="more tokens than the embedding has rows"):
        load_d2f_model(folder)


def test_a_tokenizer_that_would_give_another_id_is_refused_and_unchanged(tmp_path):
    folder, _ = base(tmp_path / "base")
    model, tokenizer = load_d2f_model(folder), tokenizer_of(60)
    with pytest.raises(ValueError, match="mask_token_id=60"):
        add_mask_token(model, tokenizer)
    assert len(tokenizer) == 60
    assert add_mask_token(load_d2f_model(folder, mask_token_id=60), tokenizer) == 60


def test_a_model_without_a_mask_token_gets_that_of_the_tokenizer_or_a_new_one(tmp_path):
    folder, _ = base(tmp_path / "base")
    for tokenizer, expected in ((tokenizer_of(60, "<mask>"), 60), (tokenizer_of(70), 70), (tokenizer_of(80), 80)):
        model = load_d2f_model(folder, mask_token_id=3)
        model.config.mask_token_id = None
        assert add_mask_token(model, tokenizer) == model.config.mask_token_id == tokenizer.mask_token_id == expected


def test_a_row_far_behind_the_last_one_is_refused(tmp_path):
    model = load_d2f_model(base(tmp_path / "base")[0])
    with pytest.raises(ValueError, match="`mask_token_id`"):
        give_mask_row(model, 99)


@pytest.mark.parametrize("kind", ["tokenizer.json", "unigram", "vocab.json", "tokenizer_config.json"])
def test_vocabularies_are_read_from_any_of_the_files(kind, tmp_path):
    added = [{"id": 3, "content": "<mask>", "special": True}]
    contents = {
        "tokenizer.json": {"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": added}},
        "unigram": {
            "tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}, "added_tokens": added}
        },
        "vocab.json": {"vocab.json": {"a": 0, "b": 1, "c": 2}, "added_tokens.json": {"<mask>": 3}},
        "tokenizer_config.json": {"tokenizer_config.json": {"added_tokens_decoder": {"3": {"content": "<mask>"}}}},
    }[kind]
    for name, values in contents.items():
        (tmp_path / name).write_text(json.dumps(values))
    vocabulary = read_vocabulary(str(tmp_path), {})
    assert (vocabulary.mask_token_id, vocabulary.next_id) == (3, 4)


def test_a_folder_without_tokenizer_files_has_no_vocabulary(tmp_path):
    assert read_vocabulary(str(tmp_path), {}) is None


def test_a_hole_in_the_vocabulary_is_not_a_free_id(tmp_path):
    """The number of tokens is then the id of one of them, whose row would have been written over."""
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 2}))
    assert read_vocabulary(str(tmp_path), {}).next_id == 3


def test_a_new_row_is_made_in_any_dtype_and_with_a_device_map_and_not_on_the_disk(tmp_path):
    folder, _ = base(tmp_path / "base")
    for options in ({"dtype": "bfloat16"}, {"device_map": "cpu"}, {"device_map": {"": "cpu"}}):
        model = load_d2f_model(folder, **options)
        assert logits(model).shape[-1] == VOCAB_SIZE + 1 and logits(model).dtype == model.dtype
    with pytest.raises(ValueError, match="`device_map` must leave nothing on the disk"):
        load_d2f_model(folder, device_map={"": "disk"}, offload_folder=str(tmp_path / "offload"))


@torch.no_grad()
def test_a_row_that_a_device_does_not_hold_is_refused(tmp_path):
    model = load_d2f_model(base(tmp_path / "base")[0]).to("meta")
    with pytest.raises(ValueError, match="offloaded or sharded"):
        give_mask_row(model, 3)


WITHOUT_THE_PACKAGE = """
import sys

sys.modules["d2f_hf"] = None  # `import d2f_hf` fails

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

results = {}
for i, folder in enumerate(sys.argv[2:]):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert AutoTokenizer.from_pretrained(folder).mask_token_id == model.config.mask_token_id == 80
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = model(ids, prompt_lengths=torch.zeros(1, dtype=torch.long), block_size=1).logits
    results[str(i)] = logits
    model.generate(ids, max_new_tokens=4, decoding="d2f")
save_file(results, sys.argv[1])
"""


def test_a_saved_autoregressive_base_with_a_new_token_loads_without_the_package(tmp_path):
    """Of each family, tied and untied."""
    expected, folders = {}, []
    for config_class, model_class in STOCK:
        for tied in (False, True):
            folder = tmp_path / f"{model_class.__name__}-{tied}"
            options = {"sliding_window": None} if config_class is MistralConfig else {}
            stock_model(config_class, model_class, tie_word_embeddings=tied, **options).save_pretrained(
                folder / "base"
            )
            model, tokenizer = load_d2f_model(folder / "base"), tokenizer_of(VOCAB_SIZE)
            add_mask_token(model, tokenizer)
            model.save_pretrained(folder / "saved")
            tokenizer.save_pretrained(folder / "saved")
            expected[str(len(folders))] = logits(model)
            folders.append(str(folder / "saved"))
    blocked = {"PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE"}
    environment = {name: value for name, value in os.environ.items() if name not in blocked}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONWARNINGS": "ignore"}
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(tmp_path / "results.safetensors"), *folders]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = load_file(tmp_path / "results.safetensors")
    assert len(results) == 8 and all(results[name].equal(value) for name, value in expected.items())
