"""From examples to clean batches: `tokenize_example` gives token ids and prompt length, `D2FDataCollator` a batch.

A prompt is never part of the loss. A response goes up to and including its end-of-sequence token (EOS), and, as LLaDA
and D2F are trained, further EOS tokens follow it that belong to the sequence and to the loss: a model that denoises
whole blocks has to say what stands behind the end. What is left of a batch is padding, with attention mask 0.
"""

# B batch, L sequence, K block size

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from d2f_hf.modeling.configuration_d2f import BLOCK_ALIGNMENTS

EOS_TAILS = ("batch", "block", "none")


def tokenize_example(
    example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, max_length: int | None = None
) -> dict[str, Any]:
    r"""
    Token ids of an example and how many of them are its prompt. Made for `dataset.map`.

    Three kinds of examples, told apart by their keys in this order:

    - `input_ids` and `prompt_length`: already tokenized, and only cut at `max_length`.
    - `messages`: a chat whose last message, by the assistant, is the response. The prompt is what the chat template
      renders of the others with `add_generation_prompt=True`, as at inference.
    - `prompt` and `completion`: two strings. Their tokens are put one after the other, without a template and without
      special tokens, so a prompt has to be tokenized with `add_special_tokens=False` at inference too.

    In the last two cases the response ends at its first EOS, and one is appended where there is none. A key whose
    value is `None` counts as missing.

    Args:
        example (`Mapping[str, Any]`):
            The example.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Tokenizer with an EOS token; with a chat template for `messages`. Not used for `input_ids`.
        max_length (`int`, *optional*):
            Longest result in tokens. A longer response is cut; it then has no EOS, and gets no EOS tail in a batch.

    Returns:
        `dict`: `input_ids` (`list[int]`, prompt and response) and `prompt_length` (`int`, tokens of the prompt).

    Raises:
        ValueError: If keys are missing, the prompt or the response is empty, the last message is not the assistant's,
            the tokenizer has no EOS token or no chat template, or the prompt leaves no room below `max_length`.
    """
    # Columns of a dataset of mixed examples are `None` where an example lacks them.
    example = {key: value for key, value in example.items() if value is not None}
    if "input_ids" in example:
        input_ids, prompt_length = _tokenized(example)
    else:
        if tokenizer is None:
            raise ValueError(
                "`processing_class` must be a tokenizer for a dataset that is not tokenized, got None. "
                "Pass the tokenizer, or map the dataset with `tokenize_example`."
            )
        if "messages" in example:
            prompt, response = _render_messages(example["messages"], tokenizer)
        elif "prompt" in example and "completion" in example:
            prompt, response = example["prompt"], example["completion"]
            if not isinstance(prompt, str) or not isinstance(response, str):
                raise ValueError(
                    f"`prompt` and `completion` must be strings, got {type(prompt).__name__} and "
                    f"{type(response).__name__}. Give a list of messages as `messages`."
                )
        else:
            raise ValueError(
                "An example must have `prompt` and `completion`, or `messages`, or `input_ids` and `prompt_length`, "
                f"got {sorted(example)}. Rename its columns."
            )
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_ids = tokenizer(response, add_special_tokens=False)["input_ids"]
        input_ids = prompt_ids + _end_with_eos(response_ids, tokenizer)
        prompt_length = len(prompt_ids)

    if prompt_length < 1:
        raise ValueError(
            "The prompt of an example must have at least one token, got none. "
            "Start it with a BOS token, or leave the example out."
        )
    if max_length is not None and prompt_length >= max_length:
        raise ValueError(
            f"The prompt of an example must be shorter than `max_length` ({max_length}), got {prompt_length} tokens. "
            "Raise `max_length`, or leave the example out."
        )
    if prompt_length >= len(input_ids):
        raise ValueError(
            f"`prompt_length` must leave at least one response token, got {prompt_length} of {len(input_ids)} tokens. "
            "Leave the example out."
        )
    return {"input_ids": input_ids[:max_length], "prompt_length": prompt_length}


def _tokenized(example: Mapping[str, Any]) -> tuple[list[int], int]:
    if "prompt_length" not in example:
        raise ValueError(
            f"A tokenized example must have `input_ids` and `prompt_length`, got {sorted(example)}. "
            "Add the number of prompt tokens, or give `prompt` and `completion`."
        )
    try:
        input_ids, prompt_length = [int(token) for token in example["input_ids"]], int(example["prompt_length"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            "`input_ids` of a tokenized example must be a list of integers and `prompt_length` an integer, got "
            f"{example['input_ids']!r} and {example['prompt_length']!r}: {error}. Map the raw dataset with "
            "`tokenize_example`, which gives both."
        ) from error
    if prompt_length != example["prompt_length"]:
        raise ValueError(
            f"`prompt_length` must be an integer, got {example['prompt_length']!r}. It is a number of tokens."
        )
    return input_ids, prompt_length


def _render_messages(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Prompt and response of a chat as text."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            "`messages` must be a chat of at least two messages that ends with one of the assistant, "
            f"got the roles {[message['role'] for message in messages]}. Cut the chat after an answer."
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            "`messages` need a tokenizer with a chat template, this one has none. "
            "Set `tokenizer.chat_template`, or give `prompt` and `completion`."
        )
    # Without return_dict the result type depends on the version of transformers.
    options: Any = {"tokenize": False, "return_dict": False}
    prompt = str(tokenizer.apply_chat_template(list(messages[:-1]), add_generation_prompt=True, **options))
    chat = str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=False, **options))
    # Prompt and response are tokenized apart, so that the prompt has the tokens that it has at inference.
    if not chat.startswith(prompt):
        raise ValueError(
            "`messages` must render so that the chat starts with its own prompt, but this chat template changes "
            f"earlier text when the answer is added: prompt {prompt!r}, chat {chat!r}. "
            "Render the chat yourself and give `prompt` and `completion`."
        )
    return prompt, chat[len(prompt) :]


def _end_with_eos(response_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos_token_id: Any = tokenizer.eos_token_id  # declared wider than the `int | None` that it is
    if eos_token_id is None:
        raise ValueError(
            "`tokenizer` must have an EOS token, which ends the response; this one has none. "
            "Set `tokenizer.eos_token`."
        )
    # A generation stops at the first EOS, so what a template writes behind it, often a newline, is never generated.
    if eos_token_id in response_ids:
        return response_ids[: response_ids.index(eos_token_id) + 1]
    return response_ids + [eos_token_id]


def tokenize_dataset(
    dataset: Any, tokenizer: PreTrainedTokenizerBase | None, max_length: int | None = None, name: str = "dataset"
) -> Any:
    r"""
    A dataset whose examples are results of [`tokenize_example`]. One that already is so is returned as it is.

    Args:
        dataset:
            A `datasets.Dataset`, which is tokenized at once; a `datasets.IterableDataset`, tokenized as it is read; a
            dataset of torch or a list of examples, tokenized as it is read; a dictionary of those; or `None`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer. Needed unless the dataset is tokenized.
        max_length (`int`, *optional*):
            Longest example in tokens. Responses are cut there, also those of tokenized examples.
        name (`str`):
            The dataset's name in error messages.

    Raises:
        ValueError: If it is no dataset, or an example cannot be tokenized. Where the examples are not read at once,
            the first one is tried.
    """
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):
        return {
            key: tokenize_dataset(part, tokenizer, max_length, f"{name}[{key!r}]") for key, part in dataset.items()
        }
    options = {"tokenizer": tokenizer, "max_length": max_length}
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if hasattr(dataset, "map") and hasattr(dataset, "column_names"):
        is_streamed = not hasattr(dataset, "__getitem__") or is_iterable
        first = next(iter(dataset), None)
        columns = dataset.column_names or list(first or ())
        if first is None or not _must_change(first, options, name):
            return dataset
        # What is in a tokenized dataset besides, such as the lengths to group by, stays.
        removed = None if "input_ids" in columns else columns
        progress_bar = {} if is_streamed else {"desc": "Tokenizing"}
        return dataset.map(tokenize_example, fn_kwargs=options, remove_columns=removed, **progress_bar)
    if is_iterable:  # it may be a stream that can be read only once, so its first example is not tried
        return _TokenizedStream(dataset, options)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"`{name}` must be a dataset of `datasets` or torch, or a list of examples, got a "
            f"{type(dataset).__name__}. `datasets.IterableDataset.from_generator` makes one of a generator function."
        )
    if len(dataset) == 0 or not _must_change(dataset[0], options, name):
        return dataset
    return _TokenizedRows(dataset, options)


def _must_change(example: Any, options: dict[str, Any], name: str) -> bool:
    """Whether examples like this one have to be tokenized or cut. Errors of the first example come before training."""
    if not isinstance(example, Mapping):
        raise ValueError(
            f"The examples of `{name}` must be dictionaries, got a {type(example).__name__}. Give them `prompt` and "
            "`completion`, or `messages`, or `input_ids` and `prompt_length`."
        )
    is_tokenized = example.get("input_ids") is not None
    if is_tokenized and options["max_length"] is None:
        _tokenized(example)
        return False
    tokenize_example(example, **options)
    return True


class _TokenizedRows(torch.utils.data.Dataset):
    """A dataset of torch, or a list, whose examples are tokenized as they are read."""

    def __init__(self, dataset: Any, options: dict[str, Any]):
        self.dataset, self.options = dataset, options

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return tokenize_example(self.dataset[index], **self.options)


class _TokenizedStream(torch.utils.data.IterableDataset):
    """An iterable dataset of torch whose examples are tokenized as they are read."""

    def __init__(self, dataset: Any, options: dict[str, Any]):
        self.dataset, self.options = dataset, options

    def __len__(self) -> int:
        return len(self.dataset)  # a TypeError where the stream has no length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for example in self.dataset:
            yield tokenize_example(example, **self.options)

    def set_epoch(self, epoch: int) -> None:
        """Passes on what the `DataLoader` of accelerate says at the start of an epoch."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


@dataclass
class D2FDataCollator:
    r"""
    A right-padded batch of tokenized examples, with the EOS tail that a diffusion model is trained on.

    With two prompt tokens `p`, response tokens `a`, EOS `e`, padding `.` and blocks of four, two rows become

        batch   p p|a a a e|e e e e        block   p p|a a a e|. . . .        none   p p|a a a e|. .
                p p|a a a a|a e e e                p p|a a a a|a e e e               p p|a a a a|a e

    Only a response that ends with EOS gets a tail: one that was cut at `max_length` does not end there.

    Args:
        block_size (`int`):
            Tokens per response block K.
        eos_token_id (`int`):
            The token that ends a response and fills its tail.
        pad_token_id (`int`, *optional*):
            The token in padding, which no other token sees. Defaults to `eos_token_id`.
        eos_tail (`str`, *optional*, defaults to `"batch"`):
            How far EOS tokens follow a response, inside the sequence and the loss: `"batch"` fills the last block and
            goes on to the end of the longest row, `"block"` only fills the last block (so no block is all tail),
            `"none"` adds none.
        pad_to_multiple_of (`int`, *optional*):
            Pads L up to a multiple of this number.
        block_alignment (`str`, *optional*, defaults to `"prompt"`):
            Where blocks start, as in the model's configuration: behind the prompt, or with the `"sequence"`.
    """

    block_size: int
    eos_token_id: int
    pad_token_id: int | None = None
    eos_tail: str = "batch"
    pad_to_multiple_of: int | None = None
    block_alignment: str = "prompt"

    def __post_init__(self) -> None:
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"`block_size` must be at least 1, and an integer, got {self.block_size!r}.")
        if self.eos_tail not in EOS_TAILS:
            raise ValueError(f"`eos_tail` must be one of {EOS_TAILS}, got {self.eos_tail!r}.")
        if self.block_alignment not in BLOCK_ALIGNMENTS:
            raise ValueError(
                f"`block_alignment` must be one of {BLOCK_ALIGNMENTS}, got {self.block_alignment!r}. "
                "Take that of the model's configuration."
            )
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ValueError(
                f"`pad_to_multiple_of` must be at least 1, got {self.pad_to_multiple_of}. Use `None` for no rounding."
            )

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        r"""
        Collates results of [`tokenize_example`]; other keys are ignored.

        Args:
            features (`Sequence[Mapping[str, Any]]`):
                Examples with `input_ids` and `prompt_length`.

        Returns:
            `dict[str, torch.Tensor]`: int64 tensors `input_ids` and `attention_mask` of shape `[B, L]` and
            `prompt_lengths` of shape `[B]`. Every row starts at position 0; the response, which the loss covers, is
            every position from the prompt's end on that has attention mask 1.

        Raises:
            ValueError: If there is no example, a key is missing, or a prompt or response is empty.
        """
        if not features:
            raise ValueError("`features` must hold at least one example, got none.")
        rows, prompt_lengths = zip(*(self._row(feature) for feature in features), strict=True)

        # 1. Fill the last block of every ended response, then all ended responses up to the longest row.
        ended = [row[-1] == self.eos_token_id for row in rows]
        lengths = [len(row) for row in rows]
        if self.eos_tail != "none":
            for index, prompt_length in enumerate(prompt_lengths):
                if ended[index]:
                    start = prompt_length if self.block_alignment == "prompt" else 0
                    lengths[index] += -(lengths[index] - start) % self.block_size
        longest = max(lengths)
        if self.eos_tail == "batch":
            lengths = [longest if end else length for end, length in zip(ended, lengths, strict=True)]

        # 2. The rest is padding.
        width = longest + -longest % (self.pad_to_multiple_of or 1)
        pad_token_id = self.eos_token_id if self.pad_token_id is None else self.pad_token_id
        input_ids = torch.full((len(rows), width), pad_token_id, device="cpu")  # [B, L]
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            input_ids[index, : len(row)] = torch.tensor(row, device="cpu")
            input_ids[index, len(row) : length] = self.eos_token_id
        position = torch.arange(width, device="cpu")
        attention_mask = (position < torch.tensor(lengths, device="cpu")[:, None]).long()  # [B, L]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "prompt_lengths": torch.tensor(prompt_lengths, device="cpu"),
        }

    @staticmethod
    def _row(feature: Mapping[str, Any]) -> tuple[list[int], int]:
        if "input_ids" not in feature or "prompt_length" not in feature:
            raise ValueError(
                f"Each example of a batch must have `input_ids` and `prompt_length`, got {sorted(feature)}. "
                "Map the dataset with `tokenize_example`, and keep its columns (`remove_unused_columns=False`)."
            )
        input_ids, prompt_length = _tokenized(feature)
        if not 1 <= prompt_length < len(input_ids):
            raise ValueError(
                "`prompt_length` must leave at least one prompt and one response token, "
                f"got {prompt_length} of {len(input_ids)} tokens. Leave the example out."
            )
        return input_ids, prompt_length
