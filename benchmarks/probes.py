"""What is put around the forwards of a model, and around its choice of tokens, while something is measured.

A block-diffusion model chooses tokens by an object of its `sampler_class`, which the decoding loop gets handed in. So
another class there sees or replaces each choice.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(model: Any, name: str, value: Any) -> Iterator[None]:
    """Gives this one `model` another attribute `name` while the context lasts."""
    before = vars(model).get(name)  # another replacement
    setattr(model, name, value)
    try:
        yield
    finally:
        delattr(model, name)
        if before is not None:
            setattr(model, name, before)


@contextlib.contextmanager
def replaced_method(model: Any, name: str, replacement: Callable[[Callable], Callable]) -> Iterator[None]:
    """Puts `replacement(method)` in the place of the method `name` of this one `model` while the context lasts."""
    method = getattr(model, name)
    # `generate` reads the signature of `forward`.
    with replaced(model, name, functools.wraps(method)(replacement(method))):
        yield


@contextlib.contextmanager
def wrapped_sampler(model: Any, wrapper: Callable[[Callable], Callable]) -> Iterator[None]:
    """Puts `wrapper(call)` in the place of the call of this one `model`'s sampler while the context lasts.

    `call(sampler, logits, row, index, response)` is the call of the sampler, and gives its `Prediction`.
    """
    sampler_class = model.sampler_class
    call = functools.wraps(sampler_class.__call__)(wrapper(sampler_class.__call__))
    with replaced(model, "sampler_class", type(sampler_class.__name__, (sampler_class,), {"__call__": call})):
        yield


def without_adapter(model: Any) -> Any:
    """The model itself where `model` is a `PeftModel`, which runs the model's own `generate` and `forward`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def block_diffusion_model(model: Any) -> Any:
    """`model` without its adapter.

    Raises:
        ValueError: for a model that is not a block-diffusion model.
    """
    model = without_adapter(model)
    if not hasattr(model, "sampler_class"):
        raise ValueError(
            f"`system.model` must be a block-diffusion model, but it is a {type(model).__name__}: another one's cache "
            "grows as it is read, so its forwards cannot be run again. `benchmarking.measure` takes all models."
        )
    return model
