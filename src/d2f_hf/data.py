"""From examples to batches: `tokenize_example` gives token ids and prompt length, `D2FDataCollator` a batch of them.

A prompt is never part of the loss. A response goes up to and including its end-of-sequence token (EOS), and, as LLaDA
and D2F are trained, further EOS tokens follow it that belong to the sequence and to the loss: a model that denoises
whole blocks has to say what stands behind the end. What is left of a batch is padding, with attention mask 0.
"""

# B batch, L sequence, K block size

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from d2f_hf.noising import mask_tokens, random_mask_ratio, rising_mask_ratios, token_mask_ratios

EOS_TAILS = ("batch", "block", "none")


def tokenize_example(
    example: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int | None = None
) -> dict[str, Any]:
    r"""
    Token ids of an example and how many of them are its prompt. Made for `dataset.map`.

    Three kinds of examples, told apart by their keys in this order:

    - `input_ids` and `prompt_length`: already tokenized, taken as they are.
    - `messages`: a chat whose last message, by the assistant, is the response. The prompt is what the chat template
      renders of the others with `add_generation_prompt=True`, as at inference.
    - `prompt` and `completion`: two strings. Their tokens are put one after the other, without a template and without
      special tokens, so a prompt has to be tokenized with `add_special_tokens=False` at inference too.

    In the last two cases the response ends at its first EOS, and one is appended where there is none.

    Args:
        example (`Mapping[str, Any]`):
            The example.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer with an EOS token; with a chat template for `messages`.
        max_length (`int`, *optional*):
            Longest result in tokens. A longer response is cut; it then has no EOS, and gets no EOS tail in a batch.

    Returns:
        `dict`: `input_ids` (`list[int]`, prompt and response) and `prompt_length` (`int`, tokens of the prompt).

    Raises:
        ValueError: If keys are missing, the prompt or the response is empty, the last message is not the assistant's,
            the tokenizer has no EOS token or no chat template, or the prompt leaves no room below `max_length`.
    """
    if "input_ids" in example:
        input_ids, prompt_length = _tokenized(example)
    else:
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
    return [int(token) for token in example["input_ids"]], int(example["prompt_length"])


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
    """

    block_size: int
    eos_token_id: int
    pad_token_id: int | None = None
    eos_tail: str = "batch"
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"`block_size` must be at least 1, got {self.block_size}.")
        if self.eos_tail not in EOS_TAILS:
            raise ValueError(f"`eos_tail` must be one of {EOS_TAILS}, got {self.eos_tail!r}.")
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
                    lengths[index] += -(lengths[index] - prompt_length) % self.block_size
        longest = max(lengths)
        if self.eos_tail == "batch":
            lengths = [longest if end else length for end, length in zip(ended, lengths, strict=True)]

        # 2. The rest is padding.
        width = longest + -longest % (self.pad_to_multiple_of or 1)
        pad_token_id = self.eos_token_id if self.pad_token_id is None else self.pad_token_id
        input_ids = torch.full((len(rows), width), pad_token_id)  # [B, L]
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            input_ids[index, : len(row)] = torch.tensor(row)
            input_ids[index, len(row) : length] = self.eos_token_id
        attention_mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()  # [B, L]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "prompt_lengths": torch.tensor(prompt_lengths),
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


@dataclass
class D2FNoisingCollator:
    r"""
    A batch with noise: masks response tokens as the objective asks, and keeps what the loss needs to know about it.

    The noise of a row follows from `seed`, `epoch` and the row's own tokens. So a resumed run goes on with the same
    noise and a row is masked in the same way whatever process or batch it is in. (The exception: the ratios of
    `"masked_diffusion"` are spread evenly over a batch, see [`~noising.random_mask_ratio`].)

    Args:
        collate (`D2FDataCollator`):
            Makes the clean batch.
        objective (`str`):
            `"distillation"`: ratios that rise from block to block (Algorithm 1, lines 4-5). `"masked_diffusion"`: one
            ratio for the whole response.
        mask_token_id (`int`):
            Id that stands for a masked token.
        mask_ratio_low (`float`), mask_ratio_high (`float`):
            Bounds of the ratios, see [`~noising.rising_mask_ratios`]; those of `"masked_diffusion"` are uniform in
            (low, high].
        decoding_probability (`float`, *optional*, defaults to 0.0):
            Share of the rows that look as in decoding. `"distillation"`: the blocks before a uniformly drawn one are
            clean, and the ratios rise from there. `"masked_diffusion"`: up to a uniformly drawn place the response is
            clean, the next `block_size` tokens are masked with the row's ratio, and the rest is masked and not in the
            loss.
        causal_probability (`float`, *optional*, defaults to 0.0):
            For `"masked_diffusion"` of a model whose logits are one position ahead: share of the rows with nothing
            masked and causal attention, on which each token is predicted from those before it.
        seed (`int`, *optional*, defaults to 0):
            Seed of the noise.
        epoch (`int`, *optional*, defaults to 0):
            Set by the trainer, so that each epoch has other noise.
    """

    collate: D2FDataCollator
    objective: str
    mask_token_id: int
    mask_ratio_low: float
    mask_ratio_high: float
    decoding_probability: float = 0.0
    causal_probability: float = 0.0
    seed: int = 0
    epoch: int = 0

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        r"""
        Collates and masks.

        Returns:
            `dict[str, torch.Tensor]`: `input_ids` `[B, L]` with masked tokens, `attention_mask` `[B, L]`,
            `prompt_lengths` `[B]`, `is_causal` `[B]` bool, `is_masked` `[B, L]` bool (the tokens to predict),
            `mask_ratios` `[B, L]`, and `labels` `[B, L]`: the true tokens the loss is averaged over (distillation:
            those to predict; masked diffusion: all that could have been), -100 elsewhere.
        """
        batch = self.collate(features)
        input_ids, prompt_lengths = batch["input_ids"], batch["prompt_lengths"]
        sequence_length, block_size = input_ids.shape[1], self.collate.block_size
        lengths = batch["attention_mask"].sum(-1)
        position = torch.arange(sequence_length)
        in_response = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])
        in_loss, is_causal = in_response.clone(), torch.zeros(len(input_ids), dtype=torch.bool)
        noisy_ids, is_masked = input_ids.clone(), torch.zeros_like(in_response)
        ratios = torch.zeros(input_ids.shape)
        generators = [self._generator(list(feature["input_ids"])) for feature in features]
        if self.objective == "masked_diffusion":
            of_batch = self._generator([-1, *features[0]["input_ids"]])
            spread = random_mask_ratio(len(input_ids), generator=of_batch)
            row_ratios = self.mask_ratio_low + (self.mask_ratio_high - self.mask_ratio_low) * spread  # [B]
        for b, generator in enumerate(generators):
            response_length = lengths[b] - prompt_lengths[b]
            if self.objective == "masked_diffusion":
                block_ratios = row_ratios[b].expand(1, -(-int(response_length) // block_size))
            else:
                block_ratios = rising_mask_ratios(
                    -(-response_length[None] // block_size),
                    low=self.mask_ratio_low,
                    high=self.mask_ratio_high,
                    generator=generator,
                )  # [1, N]
            is_decoding, where = torch.rand(2, generator=generator)
            ratios[b] = token_mask_ratios(block_ratios, prompt_lengths[b, None], sequence_length, block_size)[0]
            if is_decoding < self.decoding_probability and self.objective == "masked_diffusion":
                start = prompt_lengths[b] + (where * response_length).long()
                ratios[b, :start] = 0.0
                ratios[b, start + block_size :] = 1.0
                in_loss[b] &= (position >= start) & (position < start + block_size)
            elif is_decoding < self.decoding_probability:
                clean = (where * block_ratios.shape[1]).long() * block_size
                ratios[b] = torch.cat([torch.zeros(int(clean)), ratios[b]])[:sequence_length]
            row = slice(b, b + 1)
            noisy_ids[row], is_masked[row] = mask_tokens(
                input_ids[row], in_response[row], ratios[row], self.mask_token_id, generator
            )
            is_causal[b] = torch.rand((), generator=generator) < self.causal_probability
            if is_causal[b]:
                noisy_ids[b], ratios[b] = input_ids[b], 1.0
                in_loss[b] = is_masked[b] = in_response[b]
        is_masked &= in_loss
        counted = is_masked if self.objective == "distillation" else in_loss
        return {
            "input_ids": noisy_ids,
            "attention_mask": batch["attention_mask"],
            "prompt_lengths": prompt_lengths,
            "is_masked": is_masked,
            "mask_ratios": ratios,
            "is_causal": is_causal,
            "labels": input_ids.masked_fill(~counted, -100),
        }

    def _generator(self, tokens: list[int]) -> torch.Generator:
        text = f"{self.seed} {self.epoch} {tokens}"
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)
