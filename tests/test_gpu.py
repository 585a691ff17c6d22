"""What only a GPU can show: the same tokens as on a CPU, one wait per step, CUDA graphs. Skipped without one."""

import warnings

import pytest
import torch
from transformers import CompileConfig

from prompts import pad, random_prompts
from tiny_models import FAMILIES, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = {"block_size": 4, "max_new_tokens": 20, "confidence_threshold": 0.06, "return_dict_in_generate": True}


def batch(device: str = "cuda") -> dict[str, torch.Tensor]:
    return {name: values.to(device) for name, values in pad(random_prompts([5, 2, 9, 4], seed=3), "left").items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"decoding": "vanilla", "confidence_threshold": None}, {"decoding": "fast_dllm"}, {"num_branches": 2},
     {"remask_threshold": 0.05}, {"acceptance_rule": "credit"}],
    ids=str,
)  # fmt: skip
def test_the_tokens_are_those_of_the_cpu(family, options):
    expected = tiny_model(family=family).generate(**batch("cpu"), **{**OPTIONS, **options})
    output = tiny_model(family=family).to("cuda").generate(**batch(), **{**OPTIONS, **options})
    assert output.sequences.cpu().equal(expected.sequences)
    assert output.num_forward_passes.cpu().equal(expected.num_forward_passes)


def test_a_step_waits_for_the_gpu_once():
    model = tiny_model().to("cuda")
    inputs = batch()
    expected = model.generate(**inputs, **OPTIONS)
    num_steps = int(expected.num_forward_passes.max())
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.generate(**inputs, **OPTIONS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    # What `generate` checks before and copies after the loop does not grow with the steps.
    assert num_steps <= len(waits) <= num_steps + 20


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"compile_config": CompileConfig()}], ids=str)
def test_steps_replayed_from_a_cuda_graph_decode_the_same(options):
    model = tiny_model().to("cuda")
    expected = model.generate(**batch(), **OPTIONS)
    for _ in range(3):  # compiles, records, replays
        output = model.generate(**batch(), **OPTIONS, **options)
        assert output.sequences.equal(expected.sequences)


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_bfloat16_decodes_on_the_gpu(implementation):
    model = tiny_model().to("cuda", torch.bfloat16)
    model.set_attn_implementation(implementation)
    output = model.generate(**batch(), **OPTIONS)
    assert (output.tokens_per_forward >= 1).all()
