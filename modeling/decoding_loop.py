"""What all decoding loops have alike: the model they feed, and how they are run to their end."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn


class BlockDiffusionModel(Protocol):
    """The part of a model that a decoding loop uses. Calling it is a forward: see `D2FForBlockDiffusion.forward`."""

    config: Any
    base_model: Any

    def __call__(self, **inputs: Any) -> Any: ...

    def get_output_embeddings(self) -> nn.Module: ...


class DecodingLoop(Protocol):
    """A decoding loop: it fills in the tokens of a `Response`, step by step.

    Attributes:
        num_forward_passes (`torch.LongTensor` of shape `(B,)`): Forwards that each row took, once the loop has ended.
        trace (`list[list[dict]]`, *optional*): With `output_trace`, what each forward of each row saw and led to.
        forwards_per_step (`int`): Calls of the model in each step.
    """

    num_forward_passes: torch.LongTensor
    trace: list[list[dict]] | None
    forwards_per_step: int

    def steps(self) -> Iterator[None]:
        """Decodes everything. It yields before each step, in which it calls the model `forwards_per_step` times."""
        ...


def run_to_the_end(
    loop: DecodingLoop, model: BlockDiffusionModel, device: torch.device, somebody_goes_on: Callable[[bool], bool]
) -> None:
    """Takes the steps of `loop`; behind the last one, the forwards that other processes need this process for.

    Args:
        loop (`DecodingLoop`): The loop.
        model (`BlockDiffusionModel`): The model that it calls.
        device (`torch.device`): Of the model's inputs.
        somebody_goes_on (`Callable`): Is told whether this process has finished, and says whether any process has
            not. Where weights are sharded (`synced_gpus`), all processes have to take part in each forward.
    """
    steps = loop.steps()
    is_finished = next(steps, steps) is steps  # goes up to the first step
    while somebody_goes_on(is_finished):
        if is_finished:
            for _ in range(loop.forwards_per_step):
                model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device))
        else:
            is_finished = next(steps, steps) is steps
