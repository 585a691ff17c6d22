"""Logits processors on masked tokens that stand anywhere in a response.

A processor is made for the token right behind the text that it is given. Here one forward predicts many tokens at
once, and behind an undecoded one nobody knows that text. So each processor gets what it needs to keep its promise:

- those of transformers that look at the scores alone get all tokens at once;
- those of transformers that look at the length of the text get the length up to each token;
- those that do not depend on the tokens right before (a repetition penalty; those of the caller that say so by an
  attribute `depends_on_previous_tokens = False`) get the text that is decoded without a gap, once for each masked
  token. A decoded token that may be remasked (`remask_threshold`) gets it up to its position;
- those that do (n-grams, several-token bad words, prefix constraints) are asked about the first undecoded token of a
  row only, and the others have to wait: what they forbid never comes out, at the price of one token per forward;
- those of the caller that say `depends_on_previous_tokens = True` or nothing count among them, and are called as
  transformers calls them, once per forward with all rows and their padding: they may keep a state for each.
"""

# M masked tokens of the batch, V vocabulary, G rows of a group (`RowGroup`), t response tokens of a text

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils import logging

from .response import Response

logger = logging.get_logger(__name__)

_OF_THE_SCORES = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
_OF_THE_LENGTH = (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)


_OF_THE_TEXT = (  # that without a gap, as compactly as it is stored
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,  # bad words are among them
)
# Those of transformers that keep nothing and hand what they are given to nobody else.
KEEP_NOTHING = (*_OF_THE_SCORES, *_OF_THE_LENGTH, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor)


def is_one_of(processor: Callable, classes: tuple[type, ...]) -> bool:
    """Whether a processor does what one of `classes` does. A subclass that has a `__call__` of its own does not."""
    return next((c for c in type(processor).__mro__ if "__call__" in vars(c)), None) in classes


def declaration(processor: Callable) -> bool | None:
    """What the caller says of a processor: whether it depends on the tokens right before the one that is chosen.

    Raises:
        ValueError: for something else than True or False.
    """
    declared = getattr(processor, "depends_on_previous_tokens", None)
    if declared is not None and not isinstance(declared, bool):
        raise ValueError(
            f"`depends_on_previous_tokens` of a logits processor must be True or False, but {_name(processor)} says "
            f"{declared!r}. Say False only if it does not need the token right before the one that is chosen."
        )
    return declared


def is_known(processor: Callable) -> bool:
    """Whether somebody has said what a processor depends on: the caller, or we for those of transformers."""
    known = (*_OF_THE_SCORES, *_OF_THE_LENGTH, *_OF_THE_TEXT, PrefixConstrainedLogitsProcessor)
    return declaration(processor) is not None or is_one_of(processor, known)


def looks_at_scores_alone(logits_processor: LogitsProcessorList) -> bool:
    """Whether none of the processors looks at the text or its length."""
    return all(type(processor) in _OF_THE_SCORES for processor in logits_processor)


def depends_on_previous_tokens(processor: Callable) -> bool:
    """Whether a processor has to know the tokens right before the one that is chosen.

    One that says nothing has to, and the caller is told how to say it.

    Raises:
        ValueError: for one that calls the model by itself.
    """
    if is_one_of(processor, (UnbatchedClassifierFreeGuidanceLogitsProcessor,)):
        raise ValueError(
            f"`logits_processor` must not call the model by itself, but {_name(processor)} does, for one token after "
            "the other. Leave it out, and take `guidance_scale` with decoding='vanilla'."
        )
    if not is_known(processor):
        logger.warning_once(
            f"{_name(processor)} does not say whether it depends on the tokens right before the one that is chosen, "
            "so one token is decoded per forward. If it does not, set its attribute "
            "`depends_on_previous_tokens = False` for full speed; else set it to True."
        )
        return True
    declared = declaration(processor)
    if declared is not None:
        return declared
    if is_one_of(processor, (SequenceBiasLogitsProcessor,)):
        return any(len(sequence) > 1 for sequence in processor.sequence_bias)
    return is_one_of(processor, (PrefixConstrainedLogitsProcessor, NoRepeatNGramLogitsProcessor))


def refuse_undeclared(processor: Callable) -> None:
    """Refuses a processor that may keep a state for each row, where responses of a stream share it."""
    if not is_known(processor):
        raise ValueError(
            f"`logits_processor` must not keep a state for each row where responses share it, and {_name(processor)} "
            "does not say what it depends on. Give one to each request of a stream, with one response. Or, if it "
            "depends on nothing but the text and the scores it is given, set its attribute "
            "`depends_on_previous_tokens` to True, or to False if it does not need the token right before."
        )


def _name(processor: Callable) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def process_logits(
    scores: torch.FloatTensor,
    row: torch.LongTensor,
    index: torch.LongTensor,
    response: Response,
    logits_processor: LogitsProcessorList,
) -> torch.FloatTensor:
    """`scores` `(M, V)` after the processors, in their order. `row` and `index` `(M,)` say whose they are.

    A row of a padded batch has the length of the longest prompt and its own response, filled up in front.
    """
    if len(logits_processor) == 0 or len(row) == 0:
        return scores
    texts = None
    for processor in logits_processor:
        declared = declaration(processor)
        if declared is None and is_one_of(processor, _OF_THE_SCORES):
            scores = processor(response.sequences[row].to(scores.device), scores)
        elif declared is None and is_one_of(processor, _OF_THE_LENGTH):
            processed = torch.empty_like(scores)
            widths = [response.group(b).input_ids.shape[1] for b in row.tolist()]
            lengths = index + torch.tensor(widths, device="cpu")
            for length in lengths.unique().tolist():
                text = index.new_full((1, length), response.mask_token_id)
                own = lengths == length
                processed[own] = processor(text.to(scores.device).expand(int(own.sum()), -1), scores[own])
            scores = processed
        elif declared is False or (declared is None and is_one_of(processor, _OF_THE_TEXT)):
            texts = _decoded_texts(row, index, response) if texts is None else texts
            processed = []
            for (text, number), own in zip(texts, scores.split([number for _, number in texts]), strict=True):
                text = text.to(scores.device).expand(number, -1)
                processed.append(_checked(processor, processor(text, own), own))
            scores = torch.cat(processed)
        else:
            scores = _processed_by_group(processor, scores, row, index, response)
    return scores


def _processed_by_group(
    processor: Callable, scores: torch.FloatTensor, row: torch.LongTensor, index: torch.LongTensor, response: Response
) -> torch.FloatTensor:
    """`scores` after a processor that is called as transformers calls it: for all rows of a group, in their order.

    The rows of a group started together, and each of them has decoded one token per forward. Those that have ended are
    filled up with the padding token, and what the processor makes of their scores is left alone.
    """
    processed = torch.empty_like(scores)
    own: dict[int, list[int]] = {}  # of the masked tokens, those of each group
    for i, b in enumerate(row.tolist()):
        own.setdefault(id(response.group(b)), []).append(i)
    for tokens in own.values():
        group = response.group(int(row[tokens[0]]))
        [length] = index[tokens].unique().tolist()
        slots = [group.rows.index(b) for b in row[tokens].tolist()]
        text = response.text(group, length).to(scores.device)
        if is_one_of(processor, (PrefixConstrainedLogitsProcessor,)):
            of_tokens = [
                _constrained(processor, slot, text[slot : slot + 1], scores[i : i + 1])
                for slot, i in zip(slots, tokens, strict=True)
            ]
            processed[tokens] = torch.cat(of_tokens)
        else:
            of_group = scores.new_zeros(len(group.rows), scores.shape[1])
            of_group[:, response.mask_token_id] = -torch.inf
            of_group[slots] = scores[tokens]
            processed[tokens] = _checked(processor, processor(text, of_group), of_group)[slots]
    return processed


def _checked(processor: Callable, processed: Any, scores: torch.FloatTensor) -> torch.FloatTensor:
    """What a processor made of `scores` `(A, V)`, in their dtype, whatever it computes in.

    Raises:
        ValueError: for something else than a tensor of their shape.
    """
    if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
        what = (
            f"a tensor {tuple(processed.shape)}" if isinstance(processed, torch.Tensor) else type(processed).__name__
        )
        raise ValueError(
            f"`logits_processor` must return scores of the shape that it is given, {tuple(scores.shape)}, but "
            f"{_name(processor)} gave {what}. Set the scores of tokens that must not come to -inf."
        )
    return processed.to(scores)


def _constrained(
    processor: PrefixConstrainedLogitsProcessor, slot: int, text: torch.LongTensor, scores: torch.FloatTensor
) -> torch.FloatTensor:
    """What the processor does for one row, `text` `(1, L)`. It is not asked about rows that have ended."""
    prompt = slot // processor._num_beams  # beams and returned sequences of a prompt stand one after the other
    constraint = PrefixConstrainedLogitsProcessor(
        lambda _, tokens: processor._prefix_allowed_tokens_fn(prompt, tokens), 1
    )
    return constraint(text, scores)


def _decoded_texts(
    row: torch.LongTensor, index: torch.LongTensor, response: Response
) -> list[tuple[torch.LongTensor, int]]:
    """The text in front of each token, up to the first undecoded one, and how many tokens have it.

    In front of a short prompt are mask tokens, which are in no text, as padding.
    """
    lengths = torch.minimum(response.prefix_length()[row], index)
    ends, numbers = torch.stack([row, lengths]).unique_consecutive(dim=1, return_counts=True)
    texts = []
    for (b, length), number in zip(ends.T.tolist(), numbers.tolist(), strict=True):
        prompt = int(response.prompt_lengths[b])
        text = response.sequences[b, : prompt + length]
        width = response.group(b).input_ids.shape[1]
        texts.append((F.pad(text, (width - prompt, 0), value=response.mask_token_id), number))
    return texts
