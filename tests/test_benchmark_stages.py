"""Where the time of a call goes, and the arithmetic of it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.stages import Stages, mean_stages, measure_stages
from d2f_hf import benchmarking
from d2f_hf.benchmarking import System
from test_benchmarking import EOS, ScriptedModel, prompt
from tiny_models import tiny_model


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(benchmarking.time, "perf_counter", lambda: clock.now)
    return clock


class StagedSampler:
    def __init__(self, clock):
        self.clock = clock

    def __call__(self):
        self.clock.now += 0.5


class StagedModel(ScriptedModel):
    """Its forwards take 4 and then 2 seconds, choosing takes 0.5, all else 0.125 for each of `steps` steps."""

    sampler_class = StagedSampler

    def __init__(self, clock, steps=3):
        super().__init__("staged", [], clock, [3] * steps, 0.0, num_forward_passes=steps)
        self.steps, self.forwards = steps, 0

    def forward(self):
        self.clock.now += 2.0 if self.forwards else 4.0
        self.forwards += 1

    def generate(self, input_ids, attention_mask, return_dict_in_generate, streamer=None, **options):
        self.forwards = 0
        if streamer is not None:
            streamer.put(input_ids)
        sampler = self.sampler_class(self.clock)
        for _ in range(self.steps):
            self.clock.now += 0.125
            self.forward()
            sampler()
            if streamer is not None:
                streamer.put(torch.tensor([3]))
        return super().generate(input_ids, attention_mask, return_dict_in_generate)


def test_stages_are_the_first_forward_the_others_the_choice_and_the_rest(clock):
    (stages,) = measure_stages({"a": System(StagedModel(clock))}, [prompt(1)], warm_up=0)["a"]
    assert stages == Stages(time_to_first_token=4.625, prefill=4.0, decode=4.0, sampling=1.5, host=0.375)
    assert stages.seconds == 9.875


def test_without_a_sampler_choosing_is_part_of_the_host(clock):
    class Autoregressive(ScriptedModel):
        def forward(self):
            self.clock.now += 1.0

        def generate(self, *args, streamer=None, **options):
            self.forward()
            self.clock.now += 0.25
            return super().generate(*args, **options)

    model = Autoregressive("twin", [], clock, [EOS], 0.0)
    (stages,) = measure_stages({"twin": System(model)}, [prompt(1)], warm_up=0)["twin"]
    # No token ever came to the streamer, so the first one is there when all is.
    assert stages == Stages(time_to_first_token=1.25, prefill=1.0, decode=0.0, sampling=0.0, host=0.25)


def test_stages_of_real_models_add_up_and_leave_no_trace():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    twin = LlamaForCausalLM(LlamaConfig(vocab_size=16, eos_token_id=None, pad_token_id=0, **sizes))
    d2f = tiny_model()
    systems = {
        "twin": System(twin, {"max_new_tokens": 5, "do_sample": False}),
        "d2f": System(d2f, {"max_new_tokens": 8}),
        "vanilla": System(d2f, {"max_new_tokens": 8, "decoding": "vanilla"}),
    }
    found = measure_stages(systems, [prompt(1, 2, 3)])
    assert all(min(vars(stages[0]).values()) >= 0.0 for stages in found.values())
    assert found["twin"][0].sampling == 0.0 < found["twin"][0].decode
    for name in ("d2f", "vanilla"):
        (stages,) = found[name]
        assert stages.sampling > 0.0 and stages.time_to_first_token > 0.0
    assert not {"forward", "sampler_class"} & (set(vars(twin)) | set(vars(d2f)))


def test_mean_of_stages_is_taken_stage_by_stage():
    mean = mean_stages([Stages(1.0, 2.0, 3.0, 4.0, 5.0), Stages(3.0, 2.0, 5.0, 0.0, 7.0)])
    assert mean == Stages(2.0, 2.0, 4.0, 2.0, 6.0)
    with pytest.raises(ValueError, match="at least one call"):
        mean_stages([])
