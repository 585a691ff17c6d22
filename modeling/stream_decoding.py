"""Requests that are answered as they come, by pipelined decoding."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

from .pipelined_decoding import PipelinedDecoder
from .response import Response


def decode_stream(
    make_decoder: Callable[[], PipelinedDecoder],
    requests: Iterable[torch.LongTensor | tuple[torch.LongTensor, int] | None],
    vocab_size: int,
    without_gradients: Callable,
) -> Iterator[tuple[int, torch.LongTensor]]:
    """The responses to `requests`, as they are finished; see `generate_stream_batch`."""
    with without_gradients():
        decoder = make_decoder()
    response = decoder.response
    waiting, number = iter(requests), itertools.count()
    numbers: dict[int, int] = {}  # of the requests that are decoded, by row
    error: Exception | None = None
    while True:
        # 1. Who comes.
        new: dict[int, tuple[torch.LongTensor, int]] = {}
        for row in range(len(response.sequences)):
            if waiting is None or row in numbers:
                continue
            try:
                request = next(waiting)
                if request is None:
                    break
                new[row] = _checked_request(request, response, vocab_size)
                numbers[row] = next(number)
            except StopIteration:
                waiting = None
            except Exception as exception:  # raised once those that are decoded have their response
                waiting, error = None, exception

        # 2. A step for all.
        with without_gradients():
            if new:
                rows = torch.tensor(list(new))
                prompts, limits = zip(*new.values(), strict=True)
                response.replace_rows(rows, prompts, torch.tensor(limits))
                decoder.add_rows(rows)
            if len(decoder.live) > 0:
                decoder.step()
        if waiting is None and not numbers:
            if error is not None:
                raise error
            return

        # 3. Who goes.
        for row in sorted(numbers.keys() - set(decoder.live.tolist())):
            with torch.no_grad():
                length = int(response.lengths()[row])
                tokens = response.tokens(torch.tensor([row]), length)[0]
            yield numbers.pop(row), tokens.clone().to(response.device)


def _checked_request(
    request: torch.LongTensor | tuple[torch.LongTensor, int], response: Response, vocab_size: int
) -> tuple[torch.LongTensor, int]:
    prompt, limit = request if isinstance(request, tuple) else (request, response.max_new_tokens)
    if not isinstance(prompt, torch.Tensor) or not isinstance(limit, int):
        raise ValueError(
            "Each of `requests` must be a tensor of token ids, or such a tensor and an integer in a tuple, got "
            f"{type(request).__name__}. Convert it."
        )
    if prompt.dim() != 1 or not 1 <= len(prompt) <= response.prompt_width:
        raise ValueError(
            f"Each of `requests` must be a prompt of 1 to {response.prompt_width} tokens (`max_prompt_length`), got "
            f"the shape {tuple(prompt.shape)}. Give prompts one by one, without padding."
        )
    if not 0 <= int(prompt.min()) <= int(prompt.max()) < vocab_size:
        raise ValueError(
            f"Each of `requests` must hold ids of the vocabulary (0 .. {vocab_size - 1}), got {int(prompt.min())} to "
            f"{int(prompt.max())}. Use the model's own tokenizer."
        )
    if not 1 <= limit <= response.max_new_tokens:
        raise ValueError(
            f"`max_new_tokens` of a request must be from 1 to the {response.max_new_tokens} of the call, got {limit}."
        )
    return prompt.long().cpu(), limit
