"""transformers' logits processors on masked tokens that stand anywhere in a response.

A processor is made for the token right behind the text that it is given. Here one forward predicts many tokens at
once, and behind an undecoded one nobody knows that text. So each processor gets what it needs to keep its promise:

- those that look at the scores alone get all tokens at once;
- those that look at the length of the text get the length up to each token;
- those that depend on the tokens right before (n-grams, several-token bad words, prefix constraints) are asked about
  the first undecoded token of a row only, and the others have to wait: what they forbid never comes out, at the price
  of one token per forward;
- all others, the user's own among them, get the text that is decoded without a gap, once for each masked token. A
  decoded token that may become a mask again (`remask_threshold`) gets it up to its place.
"""

# M masked tokens of the batch, V vocabulary

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
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .response import Response

_OF_THE_SCORES = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
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


def depends_on_previous_tokens(processor: LogitsProcessor) -> bool:
    """Whether a processor has to know the tokens right before the one that is chosen."""
    if isinstance(processor, SequenceBiasLogitsProcessor):  # bad words are among them
        return any(len(sequence) > 1 for sequence in processor.sequence_bias)
    return isinstance(processor, (PrefixConstrainedLogitsProcessor, NoRepeatNGramLogitsProcessor))


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
        if isinstance(processor, _OF_THE_SCORES):
            scores = processor(response.sequences[row].to(scores.device), scores)
        elif isinstance(processor, _OF_THE_LENGTH):
            processed = torch.empty_like(scores)
            for i in index.unique().tolist():
                text = index.new_full((1, response.prompt_width + i), response.mask_token_id)
                own = index == i
                processed[own] = processor(text.to(scores.device).expand(int(own.sum()), -1), scores[own])
            scores = processed
        else:
            texts = _decoded_texts(row, index, response) if texts is None else texts
            processed = []
            for (b, text, number), own in zip(texts, scores.split([number for *_, number in texts]), strict=True):
                text = text.to(scores.device).expand(number, -1)
                if isinstance(processor, PrefixConstrainedLogitsProcessor):
                    processed.append(_constrained(processor, b, text, own))
                else:
                    processed.append(processor(text, own))
            scores = torch.cat(processed)
    return scores


def _constrained(
    processor: PrefixConstrainedLogitsProcessor, row: int, text: torch.LongTensor, scores: torch.FloatTensor
) -> torch.FloatTensor:
    """What the processor does, which would take the number of a masked token for that of its prompt."""
    prompt = row // processor._num_beams  # beams and returned sequences of a prompt stand one after the other
    constraint = PrefixConstrainedLogitsProcessor(
        lambda _, tokens: processor._prefix_allowed_tokens_fn(prompt, tokens), 1
    )
    return constraint(text, scores)


def _decoded_texts(
    row: torch.LongTensor, index: torch.LongTensor, response: Response
) -> list[tuple[int, torch.LongTensor, int]]:
    """The text in front of each token, up to the first undecoded one: its row, itself, and how many tokens in a row
    have it. In front of a short prompt are mask tokens, which are in no text, as padding."""
    lengths = torch.minimum(response.prefix_length()[row], index)
    ends, numbers = torch.stack([row, lengths]).unique_consecutive(dim=1, return_counts=True)
    texts = []
    for (b, length), number in zip(ends.T.tolist(), numbers.tolist(), strict=True):
        prompt = int(response.prompt_lengths[b])
        text = response.sequences[b, : prompt + length]
        texts.append((b, F.pad(text, (response.prompt_width - prompt, 0), value=response.mask_token_id), number))
    return texts
