import torch
from d2f_hf.modeling import D2FGenerationConfig
from d2f_hf.modeling.sampler import Prediction
from d2f_hf.modeling.token_acceptance import TokenAcceptance


def acceptance(block_size: int, num_blocks: int, **options) -> TokenAcceptance:
    config = D2FGenerationConfig(block_size=block_size, **options).with_defaults()
    return TokenAcceptance(config, block_size, num_blocks)


def accepted(own: TokenAcceptance, probability: list[list[float]], block_add_threshold: float = 1.0) -> list:
    """What is accepted of tokens that are all masked, in blocks that are all fully activated."""
    values = torch.tensor(probability)
    is_masked = torch.ones_like(values, dtype=torch.bool)
    prediction = Prediction(torch.ones(values.numel(), dtype=torch.long), values.flatten(), values.flatten())
    num_blocks = -(-values.shape[1] // own.block_size)
    rows = {
        "confidence_threshold": torch.full((len(values),), 0.9),
        "block_add_threshold": torch.full((len(values),), block_add_threshold),
    }
    is_full = torch.ones(len(values), num_blocks, dtype=torch.bool)
    return own(is_masked, is_masked, prediction, is_full, rows).int().tolist()


def test_steps_are_counted_by_row_and_block_and_go_with_the_rows():
    own = acceptance(3, 1, steps_per_block=2)  # two tokens, then one
    own.keep_rows(torch.arange(0), 2)
    probability = [[0.1, 0.3, 0.2], [0.3, 0.1, 0.2]]
    assert accepted(own, probability) == [[0, 1, 1], [1, 0, 1]]
    own.keep_rows(torch.tensor([1]), 1)  # row 1 stays, a new one comes
    assert accepted(own, probability) == [[0, 1, 0], [1, 0, 1]]


def test_the_first_token_is_alone_only_where_blocks_are_decoded_one_by_one():
    own = acceptance(3, 2, first_token_alone=True)
    own.keep_rows(torch.arange(0), 1)
    probability = [[0.1, 0.95, 0.95]]
    assert accepted(own, probability) == [[1, 0, 0]]
    assert accepted(own, probability, block_add_threshold=0.5) == [[0, 1, 1]]


def test_only_the_first_unfinished_sub_block_accepts():
    own = acceptance(4, 1, sub_block_size=2)
    own.keep_rows(torch.arange(0), 1)
    assert accepted(own, [[0.1, 0.2, 0.95, 0.95]]) == [[0, 1, 0, 0]]
