"""What is particular to Dream: grouped heads, biases, and logits that predict the next token.

What holds for every architecture is in `test_modeling_d2f.py`.
"""

import pytest
import torch
from d2f_hf.modeling import predicting_positions

from d2f_hf import D2FDreamModel
from reference_decoding import reference_decode
from tiny_models import EOS, MASK, PAD, plain_logits, tiny_model

# B batch, L sequence

BLOCK_SIZE = 3
PROMPTS = [[7], [3, 1, 4, 1]]  # the shortest that there can be: its one token predicts the first of the response


def padded(rows: list[list[int]], side: str) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`rows` as one batch and its attention mask, `(B, L)` each."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[b, columns], mask[b, columns] = torch.tensor(row), 1
    return ids, mask


def dream():
    return tiny_model(family="dream", num_key_value_heads=2)


def test_queries_keys_and_values_have_biases_and_nothing_else_has():
    model = dream()
    assert isinstance(model.model, D2FDreamModel) and model.config.right_shift_logits
    with_bias = {name.split(".")[-2] for name in model.state_dict() if name.endswith(".bias")}
    assert with_bias == {"q_proj", "k_proj", "v_proj"}
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected = model(ids).logits
        for projection in ("q_proj", "k_proj", "v_proj"):
            changed = dream()
            getattr(changed.model.layers[1].self_attn, projection).bias.zero_()
            assert not torch.allclose(changed(ids).logits, expected, atol=1e-3), projection


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_masked_token_is_predicted_by_the_logits_before_it_with_padding_and_a_one_token_prompt(side):
    model = dream()
    rows = [prompt + [MASK, 5, MASK, MASK, 8, MASK] for prompt in PROMPTS]  # first and later tokens of two blocks
    ids, mask = padded(rows, side)
    with torch.no_grad():
        logits = model(
            ids,
            attention_mask=mask,
            prompt_lengths=torch.tensor([1, 4]),
            block_size=BLOCK_SIZE,
            logits_to_keep=predicting_positions(ids == MASK, model.config.right_shift_logits),
        ).logits
    expected = [
        plain_logits(model)(row, len(prompt), BLOCK_SIZE)[position - 1]
        for row, prompt in zip(rows, PROMPTS, strict=True)
        for position, token in enumerate(row)
        if token == MASK
    ]
    assert len(logits) == 8
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_about_the_same_tokens_with_padding_and_a_one_token_prompt(side):
    model, response = dream(), [9, 5, 2, 6, 8, 1]
    clean = [prompt + response for prompt in PROMPTS]
    noisy = [prompt + [MASK, 5, MASK, MASK, 8, MASK] for prompt in PROMPTS]
    ids, mask = padded(noisy, side)
    labels = padded(clean, side)[0].masked_fill(ids != MASK, -100)
    named = {"prompt_lengths": torch.tensor([1, 4]), "block_size": BLOCK_SIZE}
    with torch.no_grad():
        loss = model(ids, attention_mask=mask, labels=labels, **named).loss
    terms = [
        -plain_logits(model)(row, len(prompt), BLOCK_SIZE)[position - 1].log_softmax(-1)[true[position]]
        for row, true, prompt in zip(noisy, clean, PROMPTS, strict=True)
        for position, token in enumerate(row)
        if token == MASK
    ]
    torch.testing.assert_close(loss, sum(terms) / 8, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("confidence_threshold", [0.3, 0.9])
def test_decoding_is_right_at_every_boundary_of_the_cache_with_left_padding_and_a_one_token_prompt(
    confidence_threshold,
):
    """The first token of a window is predicted by the last one before it, which is in the cache already."""
    model = dream()
    ids, mask = padded(PROMPTS, "left")
    thresholds = {
        "block_size": BLOCK_SIZE,
        "block_add_threshold": 0.3,
        "block_activation_threshold": 0.6,
        "confidence_threshold": confidence_threshold,
    }
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=11,
        return_dict_in_generate=True,
        output_trace=True,
        **thresholds,
    )
    boundaries = set()
    for b, prompt in enumerate(PROMPTS):
        expected = reference_decode(
            plain_logits(model),
            prompt,
            max_new_tokens=11,
            mask_token_id=MASK,
            eos_token_ids=EOS,
            right_shift_logits=True,
            **thresholds,
        )
        assert output.sequences[b, ids.shape[1] :][: len(expected.tokens)].tolist() == expected.tokens
        assert output.num_forward_passes[b] == expected.num_forward_passes
        boundaries |= {step["committed_length"] - len(prompt) for step in output.trace[b]}
    assert len(boundaries) >= 4, "the prompt and several blocks were committed"
