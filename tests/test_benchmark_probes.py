"""What is put around forwards and the choice of tokens, and that it is taken away again."""

import pytest
import torch
from d2f_hf.modeling.sampler import Sampler

from benchmarks.probes import replaced_method, wrapped_sampler
from tiny_models import tiny_model


def test_replaced_methods_nest_and_come_back_after_an_error():
    model = tiny_model()
    calls = []

    def logging_as(name):
        return lambda method: lambda *args, **kwargs: (calls.append(name), method(*args, **kwargs))[1]

    with replaced_method(model, "forward", logging_as("outer")):
        with pytest.raises(RuntimeError), replaced_method(model, "forward", logging_as("inner")):
            model(torch.tensor([[1, 2]]))
            raise RuntimeError
        model(torch.tensor([[1, 2]]))
    model(torch.tensor([[1, 2]]))
    assert calls == ["inner", "outer", "outer"]
    assert "forward" not in vars(model)


def test_a_wrapped_sampler_sees_each_choice_and_wraps_what_is_there():
    model, calls = tiny_model(), []

    def logging_as(name):
        return lambda choose: lambda *args: (calls.append((name, len(args))), choose(*args))[1]

    inputs = {"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4, "confidence_threshold": 0.0}
    expected = model.generate(**inputs)
    with wrapped_sampler(model, logging_as("outer")):
        assert issubclass(model.sampler_class, Sampler)
        with pytest.raises(RuntimeError), wrapped_sampler(model, logging_as("inner")):
            assert model.generate(**inputs).equal(expected)
            raise RuntimeError
        assert model.generate(**inputs).equal(expected)
    assert calls == [("inner", 5), ("outer", 5), ("outer", 5)]
    assert model.sampler_class is Sampler and "sampler_class" not in vars(model)
