"""What only a GPU can show: the same tokens as on a CPU, one wait per step, CUDA graphs. Skipped without one."""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters
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
    [
        {},
        {"decoding": "vanilla", "confidence_threshold": None},
        {"decoding": "fast_dllm"},
        {"num_branches": 2},
        {"remask_threshold": 0.05},
        {"acceptance_rule": "credit"},
    ],
    ids=str,
)
def test_the_tokens_are_those_of_the_cpu(family, options):
    expected = tiny_model(family=family).generate(**batch("cpu"), **{**OPTIONS, **options})
    output = tiny_model(family=family).to("cuda").generate(**batch(), **{**OPTIONS, **options})
    assert output.sequences.cpu().equal(expected.sequences)
    assert output.num_forward_passes.cpu().equal(expected.num_forward_passes)


def test_a_step_waits_for_the_gpu_once():
    """What `generate` waits for before and behind the loop is the same for short and long responses."""
    model, inputs = tiny_model().to("cuda"), batch()
    steps, waits = [], []
    for max_new_tokens in (4, 24):
        options = {**OPTIONS, "max_new_tokens": max_new_tokens, "eos_token_id": None}
        steps.append(int(model.generate(**inputs, **options).num_forward_passes.max()))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.generate(**inputs, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in caught))
    assert steps[1] > steps[0] + 4
    assert waits[1] - waits[0] == steps[1] - steps[0]


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"compile_config": CompileConfig()}], ids=str)
def test_steps_replayed_from_a_cuda_graph_decode_the_same(options):
    model = tiny_model().to("cuda")
    expected = model.generate(**batch(), **OPTIONS)
    torch.compiler.reset()
    counters.clear()
    with torch.compiler.set_stance("default"):
        for _ in range(3):  # compiles, records, replays
            num_graphs = counters["stats"]["unique_graphs"]
            output = model.generate(**batch(), **OPTIONS, **options)
            assert output.sequences.equal(expected.sequences)
    assert num_graphs == counters["stats"]["unique_graphs"] > 0, "the last round compiled nothing"
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_bfloat16_on_the_gpu_gives_logits_near_those_of_float32(implementation):
    model = tiny_model().to("cuda")
    inputs = {**batch(), "prompt_lengths": torch.tensor([3, 1, 4, 2], device="cuda"), "block_size": 2}
    expected = model(**inputs).logits
    model.to(torch.bfloat16).set_attn_implementation(implementation)
    torch.testing.assert_close(model(**inputs).logits.float(), expected, atol=0.05, rtol=0.05)
    output = model.generate(**batch(), **OPTIONS)
    assert (output.tokens_per_forward >= 1).all()
