"""In which mode decoding runs: whoever is not ours never gets a tensor that training refuses."""

import functools

import pytest
import torch
from d2f_hf.modeling.gradient_mode import gradient_mode
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tiny_models import FAMILIES, PAD, letter_tokenizer, tiny_model

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])
OPTIONS = {"max_new_tokens": 5, "pad_token_id": PAD, "eos_token_id": None}


class Seen(list):
    """Everything that somebody else was given."""

    def keep(self, *values):
        self.extend(value for value in values if isinstance(value, torch.Tensor))

    def check(self):
        assert len(self) > 0, "otherwise nothing is tested"
        assert not any(tensor.is_inference() for tensor in self)


class Cached(nn.Module):
    """A layer of somebody else that keeps what it computes first."""

    def __init__(self, inner: nn.Module, seen: Seen):
        super().__init__()
        self.inner, self.seen = inner, seen

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        output = self.inner(x)
        self.seen.keep(x, output)
        return output


class Recording(LogitsProcessor):
    def __init__(self, seen: Seen, declared: bool | None):
        self.seen = seen
        if declared is not None:
            self.depends_on_previous_tokens = declared

    def __call__(self, input_ids, scores):
        self.seen.keep(input_ids, scores)
        return scores


class Watching(StoppingCriteria):
    def __init__(self, seen: Seen):
        self.seen = seen

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.keep(input_ids, *(scores or ()))
        return False


class Listening(BaseStreamer):
    def __init__(self, seen: Seen):
        self.seen = seen

    def put(self, value):
        self.seen.keep(value)

    put_draft = put

    def end(self):
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_known_layers_and_listeners_of_transformers_leave_the_fast_mode(family):
    model = tiny_model(family=family)
    tokenizer = letter_tokenizer()
    known = [
        TemperatureLogitsWarper(2.0), TopKLogitsWarper(3), RepetitionPenaltyLogitsProcessor(2.0), MaxTimeCriteria(9.0),
        TextStreamer(tokenizer), None,
    ]  # fmt: skip
    assert gradient_mode(model, known, torch.Generator()) is torch.inference_mode
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert gradient_mode(adapted.base_model.model) is torch.inference_mode
    with torch.device("cpu"):
        assert gradient_mode(model) is torch.inference_mode


def global_hook(model, seen):
    return torch_module.register_module_forward_hook(lambda _, inputs, output: seen.keep(*inputs, output)).remove


def global_pre_hook(model, seen):
    return torch_module.register_module_forward_pre_hook(lambda _, inputs: seen.keep(*inputs)).remove


def hook(model, seen):
    return model.get_output_embeddings().register_forward_hook(lambda _, inputs, output: seen.keep(output)).remove


def patched_forward(model, seen):
    head = model.get_output_embeddings()
    original = head.forward

    def forward(x):
        output = original(x)
        seen.keep(x, output)
        return output

    head.forward = forward
    return lambda: delattr(head, "forward")


def patched_by_partial(model, seen):
    head = model.get_output_embeddings()
    original = head.forward

    def forward(kept, x):
        kept.keep(x)
        return original(x)

    head.forward = functools.partial(forward, seen)
    return lambda: delattr(head, "forward")


def patched_class(model, seen):
    layer_class = type(model.base_model)
    original = layer_class.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        seen.keep(output.last_hidden_state)
        return output

    layer_class.forward = forward
    return lambda: setattr(layer_class, "forward", original)


def layer_of_somebody_else(model, seen):
    model.set_output_embeddings(Cached(model.get_output_embeddings(), seen))
    return lambda: None


def attention_of_somebody_else(model, seen):
    def attention(module, query, key, value, attention_mask, **kwargs):
        seen.keep(query, key, value)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("seen", attention)
    model.config._attn_implementation = "seen"
    return lambda: None


def weights_of_another_kind(model, seen):
    class Weight(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            output = super().__torch_function__(function, types, args, kwargs or {})
            if function is nn.functional.linear:
                seen.keep(args[0])
                return output.as_subclass(torch.Tensor)
            return output

    head = model.get_output_embeddings()
    weight = nn.Parameter(head.weight.detach().as_subclass(Weight), requires_grad=False)
    del head._parameters["weight"]
    head._parameters["weight"] = weight
    return lambda: None


def function_mode(model, seen):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if function is nn.functional.embedding:
                seen.keep(output)
            return output

    mode = Mode()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def dispatch_mode(model, seen):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.embedding.default:
                seen.keep(output)
            return output

    mode = Mode()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


WAYS = [
    global_hook, global_pre_hook, hook, patched_forward, patched_by_partial, patched_class, layer_of_somebody_else,
    attention_of_somebody_else, weights_of_another_kind, function_mode, dispatch_mode,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whoever_watches_the_model_gets_ordinary_tensors(way):
    """Global hooks, patched forwards and layers that cache on first use once got tensors of inference mode."""
    model, seen = tiny_model(), Seen()
    remove = way(model, seen)
    try:
        model.generate(PROMPT, **OPTIONS)
        list(model.generate_stream_batch([PROMPT[0]], 1, 3, max_new_tokens=5))
    finally:
        remove()
    seen.check()


GUESTS = {
    "undeclared processor": lambda seen: {"logits_processor": LogitsProcessorList([Recording(seen, None)])},
    "left-to-right processor": lambda seen: {"logits_processor": LogitsProcessorList([Recording(seen, True)])},
    "prefix constraint": lambda seen: {"prefix_allowed_tokens_fn": lambda row, text: (seen.keep(text), [1, 2])[1]},
    "declared processor": lambda seen: {"logits_processor": LogitsProcessorList([Recording(seen, False)])},
    "criterion": lambda seen: {"stopping_criteria": StoppingCriteriaList([Watching(seen)])},
    "streamer": lambda seen: {"streamer": Listening(seen)},
}


@pytest.mark.parametrize("guest", GUESTS)
def test_whoever_listens_gets_ordinary_tensors(guest):
    model = tiny_model()
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    needs_d2f = "processor" in guest and guest != "declared processor" or guest == "prefix constraint"
    for decoding in ("d2f",) if needs_d2f else ("d2f", "vanilla", "fast_dllm"):
        seen = Seen()
        model.generate(PROMPT[:1], **OPTIONS, **kept, **GUESTS[guest](seen), decoding=decoding)
        seen.check()


def test_what_keeps_tensors_of_a_call_is_not_in_the_fast_mode():
    model = tiny_model()
    for guest in (
        NoBadWordsLogitsProcessor([[3]]),
        PrefixConstrainedLogitsProcessor(lambda row, text: [1], 1),
        Watching(Seen()),
        Listening(Seen()),
        lambda input_ids, scores: scores,
        type("Mine", (TemperatureLogitsWarper,), {"__call__": lambda self, ids, scores: scores})(2.0),
    ):
        assert gradient_mode(model, [guest]) is torch.no_grad
    assert gradient_mode(model, [], type("Mine", (torch.Generator,), {})()) is torch.no_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gradient_mode(model) is torch.no_grad, "autocast keeps cast weights until it ends"
    with torch.device("meta"):
        assert gradient_mode(tiny_model()) is torch.inference_mode, "where weights are offloaded"
    for rope_type in ("dynamic", "longrope", "somebody's"):
        model.config.rope_parameters["rope_type"] = rope_type
        assert gradient_mode(model) is torch.no_grad


def test_a_training_step_in_the_same_autocast_region_works():
    model = tiny_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.generate(PROMPT, **OPTIONS)
        loss = model(output, prompt_lengths=torch.tensor([3, 3]), labels=output).loss
    loss.backward()


def test_a_subclass_and_a_layer_with_dora_are_not_taken_for_known_ones():
    model = tiny_model()

    class Mine(type(model)):
        pass

    model.__class__ = Mine
    assert gradient_mode(model) is torch.no_grad
    adapted = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], use_dora=True))
    assert gradient_mode(adapted.base_model.model) is torch.no_grad
