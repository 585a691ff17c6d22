"""`d2f info`: against the model that is loaded."""

import pytest
import torch
from d2f_hf.modeling.generation_config_d2f import DECODING_MODES

from cli_runs import ROOT, as_json, d2f, succeeds
from d2f_hf import load_d2f_model
from golden_data import GOLDEN

REFERENCE = ROOT / "examples" / "reference_model"
MODELS = [
    ("reference", REFERENCE / "teacher", REFERENCE / "student"),
    ("reference-twin", REFERENCE / "twin", None),
    (str(GOLDEN / "llada_tiny"), GOLDEN / "llada_tiny", None),
    (str(GOLDEN / "dream_tiny"), GOLDEN / "dream_tiny", None),
    (str(GOLDEN / "block_models" / "sdar_tiny"), GOLDEN / "block_models" / "sdar_tiny", None),
]


@pytest.mark.parametrize("name, base, adapter", MODELS, ids=lambda value: getattr(value, "name", None))
def test_it_says_what_the_loaded_model_is(name, base, adapter):
    found = as_json("info", name)
    model = load_d2f_model(base, adapter)
    assert found["architecture"] == type(model).__name__
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["mask_token_id"] == model.config.mask_token_id
    assert found["block_size"] == (model.generation_config.block_size or model.config.block_size)
    assert found["trained_for"] == model.config.trained_for
    assert found["eos_token_id"] == model.generation_config.eos_token_id
    assert found["options"]["decoding"] == model.generation_config.decoding
    for option, value in found["options"].items():
        assert getattr(model.generation_config, option) == value
    assert (found["adapter"] is None) == (adapter is None)
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize("name, base, adapter", MODELS, ids=lambda value: getattr(value, "name", None))
def test_the_decodings_are_those_that_generate_does(name, base, adapter):
    found = as_json("info", name)["decodings"]
    assert list(found) == list(DECODING_MODES)
    model = load_d2f_model(base, adapter)
    if model.config.mask_token_id is None:
        model.config.mask_token_id = 3
    for decoding, answer in found.items():
        options = {} if decoding in ("autoregressive", "verified") else {"block_size": 4}
        try:
            model.generate(torch.tensor([[5, 6, 7]]), decoding=decoding, max_new_tokens=4, **options)
        except ValueError as error:
            assert answer == "no", error
        else:
            assert answer in ("yes", "untrained")


def test_a_person_reads_one_line_per_fact():
    lines = succeeds("info", "reference").splitlines()
    assert lines[0].split() == ["model", "reference"]
    assert any(line.startswith("decodings ") and "d2f=yes" in line and "verified=no" in line for line in lines)


def test_a_folder_without_a_model_is_one_line(tmp_path):
    result = d2f("info", str(tmp_path))
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    result = d2f("info", "reference", "--adapter", str(tmp_path))
    assert result.exit_code == 1 and "adapter_config.json" in result.stderr
