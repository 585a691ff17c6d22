"""One answer is what `generate` gives."""

import pytest
import torch

from cli_runs import QUESTION, reference
from d2f_cli.answering import MAX_NEW_TOKENS, generate_options, respond

FLAGS = [
    ("reference", {}),
    ("reference", {"confidence_threshold": 0.98, "max_new_tokens": 20}),
    ("reference", {"decoding": "vanilla", "max_new_tokens": 16, "block_size": 8}),
    ("reference", {"decoding": "fast_dllm", "max_new_tokens": 16, "block_size": 8}),
    ("reference-twin", {"max_new_tokens": 20}),
    ("reference-twin", {"decoding": "verified", "max_new_tokens": 20}),
]


@pytest.mark.parametrize("name, options", FLAGS, ids=str)
def test_an_answer_is_that_of_generate(name, options):
    loaded = reference(name)
    ids = loaded.prompt(QUESTION)
    answer, response = respond(loaded, ids, options)
    output = loaded.model.generate(ids, **options, return_dict_in_generate=True)
    assert response.decoded == output.sequences[0, ids.shape[1] :].tolist()
    assert answer["response"] == loaded.text(response.decoded)
    assert answer["num_tokens"] == len(response.decoded)
    assert answer["num_forward_passes"] == int(output.num_forward_passes[0])
    assert answer["tokens_per_forward"] == pytest.approx(float(output.tokens_per_forward[0]), abs=1e-3)
    assert answer["tokens_per_second"] == pytest.approx(answer["num_tokens"] / answer["seconds"], rel=0.05)


def test_an_autoregressive_model_of_transformers_makes_a_forward_per_token():
    loaded = reference("reference-twin", as_it_is=True)
    ids = loaded.prompt(QUESTION)
    answer, response = respond(loaded, ids, {"max_new_tokens": 20})
    assert response.decoded == loaded.model.generate(ids, max_new_tokens=20)[0, ids.shape[1] :].tolist()
    assert answer["num_forward_passes"] == answer["num_tokens"] == 20
    assert generate_options(loaded, {}) == {"max_new_tokens": MAX_NEW_TOKENS}


def test_a_seed_repeats_a_sample():
    loaded = reference()
    ids = loaded.prompt(QUESTION)
    options = {"do_sample": True, "temperature": 5.0, "confidence_threshold": 0.0, "max_new_tokens": 24, "seed": 3}
    once, again = (respond(loaded, ids, options)[1].decoded for _ in range(2))
    torch.manual_seed(3)
    del options["seed"]
    expected = loaded.model.generate(ids, **options)[0, ids.shape[1] :].tolist()
    assert once == again == expected != respond(loaded, ids, {**options, "seed": 4})[1].decoded


def test_stop_strings_end_an_answer():
    loaded = reference()
    whole, _ = respond(loaded, loaded.prompt(QUESTION), {})
    word = whole["response"].split()[4]
    answer, _ = respond(loaded, loaded.prompt(QUESTION), {"stop_strings": [word]})
    assert word in answer["response"] and len(answer["response"]) < len(whole["response"])
