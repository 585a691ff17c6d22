"""What holds for every architecture: golden logits, masks, caches, padding, training features, saving and loading.

What is particular to one is in the test file of its source file.
"""

import ast
import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from d2f_hf.modeling import block_causal_mask, positions_without_padding, predicting_positions
from d2f_hf.modeling.modeling_d2f import D2FForBlockDiffusion, D2FRMSNorm
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

import d2f_hf
import plain_models
from d2f_hf import D2FLLaDAForBlockDiffusion
from golden_data import GOLDEN
from reference_decoding import reference_decode
from tiny_models import (
    EOS,
    FAMILIES,
    GOLDEN_FAMILIES,
    MASK,
    OTHER,
    PAD,
    VOCAB_SIZE,
    plain_logits,
    tiny_config,
    tiny_model,
)

# B batch, L sequence, S key/value slots, V vocabulary

IMPLEMENTATIONS = ["eager", "sdpa", "flex_attention"]
all_families = pytest.mark.parametrize("family", FAMILIES)
golden_families = pytest.mark.parametrize("family", GOLDEN_FAMILIES)
all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def without_gradients_and_compiling():
    """On a CPU, flex_attention has no gradients, and compiling it takes long."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


@cache
def model_with(implementation: str, family: str, **options) -> D2FForBlockDiffusion:
    model = tiny_model(family=family, **options)
    model.set_attn_implementation(implementation)
    return model


def other_model(family: str) -> D2FForBlockDiffusion:
    return tiny_model(family=family, **OTHER)


def random_ids(*shape: int, seed: int = 0) -> torch.LongTensor:
    return torch.randint(0, PAD, shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


# ---- golden logits and the plain model ----


@golden_families
@all_implementations
@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
def test_logits_are_those_of_the_reference(family, implementation, with_adapter):
    _, model_class, _ = FAMILIES[family]
    model = model_class.from_pretrained(GOLDEN / f"{family}_tiny", attn_implementation=implementation)
    if with_adapter:
        model = PeftModel.from_pretrained(model, GOLDEN / f"{family}_adapter")
    model.eval()
    golden = load_file(GOLDEN / f"logits_{family}.safetensors")
    suffix = "_adapter" if with_adapter else ""
    compared = 0
    for name, expected in golden.items():
        kind, _, case = name.partition(".")
        if kind not in (f"logits_full{suffix}", f"logits_blockcausal{suffix}"):
            continue
        structure = {}
        if "blockcausal" in kind:
            structure["prompt_lengths"] = golden[f"prompt_length.{case}"]
            structure["block_size"] = int(golden[f"block_size.{case}"])
        logits = model(golden["input_ids." + case.split(".")[0]], **structure).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        compared += 1
    assert compared == (2 if with_adapter else 9)


@golden_families
def test_an_original_checkpoint_loads_without_missing_or_unexpected_keys(family):
    _, model_class, _ = FAMILIES[family]
    model, info = model_class.from_pretrained(GOLDEN / f"{family}_tiny", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    original = load_file(GOLDEN / f"{family}_tiny" / "model.safetensors")
    assert model.state_dict().keys() == original.keys()
    assert all(weight.equal(original[name]) for name, weight in model.state_dict().items())


@all_families
@all_implementations
@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 1}, {"num_key_value_heads": 2, "tie_word_embeddings": True}, OTHER],
    ids=["full heads", "one key head", "grouped and tied", "other"],
)
def test_logits_equal_the_plain_model(family, implementation, options):
    model = tiny_model(family=family, **options)
    model.set_attn_implementation(implementation)
    ids = random_ids(1, 11)
    for structure in ((), (3, 4), (1, 1)):
        named = {"prompt_lengths": torch.tensor(structure[:1]), "block_size": structure[1]} if structure else {}
        logits = model(ids, **named).logits[0]
        torch.testing.assert_close(logits, plain_logits(model)(ids[0].tolist(), *structure), atol=1e-4, rtol=0)


@all_families
def test_the_block_size_of_the_config_is_the_default(family):
    model, ids, prompt_lengths = tiny_model(family=family, block_size=3), random_ids(1, 10), torch.tensor([2])
    assert model(ids, prompt_lengths=prompt_lengths).logits.equal(
        model(ids, prompt_lengths=prompt_lengths, block_size=3).logits
    )
    assert not model(ids, prompt_lengths=prompt_lengths, block_size=4).logits.equal(
        model(ids, prompt_lengths=prompt_lengths).logits
    )


@all_families
def test_grouped_heads_equal_full_heads_with_repeated_weights(family):
    grouped, full = tiny_model(family=family, num_key_value_heads=2), tiny_model(family=family)
    weights = grouped.state_dict()
    for name, value in weights.items():
        if "k_proj" in name or "v_proj" in name:  # weights [2 D, 32] and biases [2 D] of two heads
            heads = value.view(2, len(value) // 2, -1).repeat_interleave(2, dim=0)
            weights[name] = heads.reshape(2 * len(value), *value.shape[1:])
    full.load_state_dict(weights)
    ids = random_ids(1, 7)
    assert_near(grouped(ids).logits, full(ids).logits)


# ---- models other than the two that everybody has ----


@all_families
@pytest.mark.parametrize("shift", [False, True], ids=["own token", "next token"])
def test_a_model_with_other_ids_and_sizes_decodes_as_the_algorithm_says(family, shift):
    """The mask token is 0 and there are two tokens that end a row; the logits shift is not tied to the family."""
    model = tiny_model(family=family, **OTHER, right_shift_logits=shift)
    thresholds = {"block_add_threshold": 0.3, "block_activation_threshold": 0.6, "confidence_threshold": 0.5}
    prompts = torch.randint(5, 50, (3, 4), generator=torch.Generator().manual_seed(1))
    output = model.generate(prompts, max_new_tokens=10, return_dict_in_generate=True, **thresholds)
    for row, prompt in enumerate(prompts.tolist()):
        expected = reference_decode(
            plain_logits(model),
            prompt,
            block_size=3,
            max_new_tokens=10,
            mask_token_id=0,
            eos_token_ids=[2, 3],
            right_shift_logits=shift,
            **thresholds,
        )
        response = output.sequences[row, 4:].tolist()
        assert response[: len(expected.tokens)] == expected.tokens
        assert set(response[len(expected.tokens) :]) <= {OTHER["pad_token_id"]}
        assert output.num_forward_passes[row] == expected.num_forward_passes


def test_no_token_id_of_a_released_model_is_in_the_code():
    """Those of LLaDA and Dream are between 126,000 and 152,000.

    The loader has those of two releases whose configurations do not name them.
    """
    folders = [Path(module.__file__).parent for module in (d2f_hf, d2f_hf.modeling)]
    files = [file for folder in folders for file in folder.glob("*.py") if file.name != "architectures.py"]
    assert len(files) > 15
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, int) and 126_000 <= node.value <= 152_000:
                line = file.read_text().splitlines()[node.lineno - 1]
                assert re.search(r"(vocab_size|max_position_embeddings)(: int = |\": )", line), (file.name, line)


# ---- which logits predict which token: their own in LLaDA, the next one in Dream ----

PROMPTS = [
    [7],
    [3, 1, 4, 1],
]  # the shortest that there can be: in Dream, its one token predicts the first of the answer
NOISY = [prompt + [MASK, 5, MASK, MASK, 8, MASK] for prompt in PROMPTS]  # first and later tokens of blocks of 3
CLEAN = [prompt + [9, 5, 2, 6, 8, 1] for prompt in PROMPTS]


def padded(rows: list[list[int]], side: str) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`rows` as one batch and its attention mask, `(B, L)` each."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        columns = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[b, columns], mask[b, columns] = torch.tensor(row), 1
    return ids, mask


def predictions(model: D2FForBlockDiffusion) -> list[tuple[torch.Tensor, int]]:
    """The logits `(V,)` for each masked token of `NOISY` by the plain model, and the true token."""
    shift = int(model.config.right_shift_logits)
    return [
        (plain_logits(model)(noisy, len(prompt), 3)[position - shift], clean[position])
        for prompt, noisy, clean in zip(PROMPTS, NOISY, CLEAN, strict=True)
        for position, token in enumerate(noisy)
        if token == MASK
    ]


@all_families
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_right_logits_predict_a_masked_token_with_padding_and_a_one_token_prompt(family, side):
    model, (ids, mask) = model_with("sdpa", family), padded(NOISY, side)
    kept = predicting_positions(ids == MASK, model.config.right_shift_logits)
    named = {"attention_mask": mask, "prompt_lengths": torch.tensor([1, 4]), "block_size": 3}
    logits = model(ids, logits_to_keep=kept, **named).logits
    assert_near(logits, torch.stack([expected for expected, _ in predictions(model)]))


@all_families
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_is_about_the_masked_tokens_with_padding_and_a_one_token_prompt(family, side):
    model, (ids, mask) = model_with("sdpa", family), padded(NOISY, side)
    labels = padded(CLEAN, side)[0].masked_fill(ids != MASK, -100)
    named = {"attention_mask": mask, "prompt_lengths": torch.tensor([1, 4]), "block_size": 3}
    terms = [-logits.log_softmax(-1)[token] for logits, token in predictions(model)]
    assert_near(model(ids, labels=labels, **named).loss, sum(terms) / 8)


@all_families
@pytest.mark.parametrize("confidence_threshold", [0.3, 0.9])
def test_decoding_is_right_at_each_boundary_of_the_cache_with_padding_and_a_one_token_prompt(
    family, confidence_threshold
):
    """In Dream the first token of a window is predicted by the last one before it, which may be in the cache."""
    model, (ids, mask) = model_with("sdpa", family), padded(PROMPTS, "left")
    thresholds = {
        "block_size": 3,
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
            right_shift_logits=family != "llada",
            **thresholds,
        )
        assert output.sequences[b, ids.shape[1] :][: len(expected.tokens)].tolist() == expected.tokens
        assert output.num_forward_passes[b] == expected.num_forward_passes
        boundaries |= {step["committed_length"] - len(prompt) for step in output.trace[b]}
    assert len(boundaries) >= 4, "the prompt and several blocks were committed"


# ---- caches ----


def forward_in_pieces(model, ids: torch.Tensor, ends: list[int], kv_cache, mask=None, **named) -> torch.Tensor:
    """Logits `(B, L, V)` of a sequence that is fed piece by piece; the pieces end before `ends`."""
    logits = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        attention_mask = None if mask is None else mask[:, :end]
        output = model(ids[:, start:end], attention_mask=attention_mask, cache=kv_cache, **named)
        assert output.cache is kv_cache
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def new_cache(kind: str, model: D2FForBlockDiffusion):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=20)
    return DynamicCache(config=model.config)


@all_families
@all_implementations
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_cache_fed_block_by_block_gives_the_uncached_logits(family, implementation, kind, kv_heads):
    """The last block is short. A static cache has more slots than tokens, which nobody may see."""
    model = model_with(implementation, family, num_key_value_heads=kv_heads)
    ids, named = random_ids(2, 12), {"prompt_lengths": torch.tensor([5, 5]), "block_size": 4}
    uncached = model(ids, **named).logits
    assert_near(forward_in_pieces(model, ids, [5, 9, 12], new_cache(kind, model), **named), uncached)


@all_families
@all_implementations
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_with_left_padding_gives_the_logits_of_each_row_alone(family, implementation, kind):
    model = model_with(implementation, family)
    ids, lengths = random_ids(2, 12), [9, 12]
    mask = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])
    prompt_lengths = torch.tensor([2, 5])
    kv_cache = new_cache(kind, model)
    logits = forward_in_pieces(model, ids, [5, 9, 12], kv_cache, mask, prompt_lengths=prompt_lengths, block_size=4)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, -length:], prompt_lengths=prompt_lengths[row : row + 1], block_size=4).logits
        assert_near(logits[row, -length:], alone[0])


@all_families
@all_implementations
def test_without_prompt_lengths_a_token_sees_what_was_fed_so_far(family, implementation):
    model, ids = model_with(implementation, family), random_ids(1, 9)
    allowed = torch.tensor([[True] * 4 + [False] * 5] * 4 + [[True] * 9] * 5)
    expected = model(ids, attention_mask=allowed[None, None]).logits
    for kind in ("dynamic", "static"):
        assert_near(forward_in_pieces(model, ids, [4, 9], new_cache(kind, model)), expected)


@all_families
@all_implementations
def test_a_d2f_cache_filled_at_different_paces_gives_the_uncached_logits(family, implementation):
    """Row 0 feeds its prompt of 2 and a block, row 1 its prompt of 4; then each feeds its next block."""
    model, block_size = model_with(implementation, family, num_key_value_heads=2), 3
    ids, prompt_lengths = random_ids(2, 8), torch.tensor([2, 4])
    uncached = model(ids, prompt_lengths=prompt_lengths, block_size=block_size).logits
    kv_cache = d2f_hf.D2FCache(num_layers=2, max_length=8)
    for starts, ends in (([0, 0], [5, 4]), ([5, 4], [8, 7])):
        starts, ends = torch.tensor(starts)[:, None], torch.tensor(ends)[:, None]
        width = int((ends - starts).max())
        position = starts + torch.arange(width)
        is_fed = position < ends
        kv_cache.set_window(torch.where(is_fed, position, -1), int(ends.max()))
        slot = torch.arange(int(ends.max()))
        blocks = (
            prompt_lengths[:, None] + ((position - prompt_lengths[:, None]) // block_size + 1).clamp(0) * block_size
        )
        allowed = (slot < blocks[..., None]) & (slot < ends[..., None])
        logits = model(
            ids.gather(1, position.clamp(max=7)),
            attention_mask=allowed[:, None],
            position_ids=position,
            cache=kv_cache,
        ).logits
        expected = uncached[torch.arange(2)[:, None], position.clamp(max=7)]
        assert_near(logits[is_fed], expected[is_fed])


@all_families
def test_past_key_values_is_a_deprecated_name_of_cache(family):
    model, ids = model_with("sdpa", family), random_ids(1, 6)
    by_name, by_old_name = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = model(ids, cache=by_name).logits
    with pytest.warns(FutureWarning, match="past_key_values"):
        assert model(ids, past_key_values=by_old_name).logits.equal(expected)
    assert by_old_name.get_seq_length() == by_name.get_seq_length() == 6
    with pytest.warns(FutureWarning, match="past_key_values"):
        model.model(ids, past_key_values=DynamicCache(config=model.config))


# ---- padding and masks ----


@all_families
@all_implementations
@pytest.mark.parametrize("structure", ["bidirectional", "block-causal"])
def test_padding_at_either_end_changes_no_logits_of_a_token(family, implementation, structure):
    model = model_with(implementation, family)
    ids = [random_ids(length, seed=length) for length in (4, 9)]
    prompt_lengths = torch.tensor([2, 5])

    def run(side: str, pad_token: int) -> list[torch.Tensor]:
        padded = torch.full((2, 9), pad_token)
        mask = torch.zeros(2, 9, dtype=torch.long)
        for row, tokens in enumerate(ids):
            columns = slice(9 - len(tokens), 9) if side == "left" else slice(0, len(tokens))
            padded[row, columns], mask[row, columns] = tokens, 1
        named = {"prompt_lengths": prompt_lengths, "block_size": 3} if structure == "block-causal" else {}
        logits = model(padded, attention_mask=mask, **named).logits
        assert logits.isfinite().all()
        return [logits[row][mask[row].bool()] for row in range(2)]

    alone = []
    for row in range(2):
        named = {"prompt_lengths": prompt_lengths[row, None], "block_size": 3} if structure == "block-causal" else {}
        alone.append(model(ids[row][None], **named).logits[0])
    for side in ("left", "right"):
        for logits, expected in zip(run(side, PAD), alone, strict=True):
            assert_near(logits, expected)
        for logits, other in zip(run(side, PAD), run(side, 3), strict=True):
            assert logits.equal(other), "not even by rounding"


@all_families
@all_implementations
def test_two_and_four_dimensional_bool_and_float_masks_say_the_same(family, implementation):
    model, ids = model_with(implementation, family), random_ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask).logits
    as_bool = mask.bool()[:, None, None, :].expand(-1, 1, 6, -1)
    for lowest in (torch.finfo(torch.float32).min, -torch.inf):
        as_float = torch.zeros(as_bool.shape).masked_fill(~as_bool, lowest)
        for four_dimensional in (as_bool, as_float):
            logits = model(ids, attention_mask=four_dimensional, position_ids=position_ids).logits
            assert_near(logits[mask.bool()], expected[mask.bool()])


@all_families
@all_implementations
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_one_finished_mask_for_all_rows_decides_alone_who_sees_whom(family, implementation, dtype):
    model, ids = model_with(implementation, family), random_ids(2, 9)
    expected = model(ids, prompt_lengths=torch.tensor([3, 3]), block_size=2).logits
    allowed = plain_models.block_causal_mask(9, 3, 2)[None, None]
    mask = allowed if dtype == torch.bool else torch.zeros(1, 1, 9, 9).masked_fill(~allowed, -torch.inf)
    assert_near(model(ids, attention_mask=mask).logits, expected)


@all_families
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_mask_that_transformers_makes_from_block_ids_gives_the_same_logits(family, side):
    model, ids, prompt_lengths = model_with("sdpa", family), random_ids(2, 10), torch.tensor([3, 4])
    mask = torch.ones(2, 10, dtype=torch.long)
    if side is not None:
        mask[0, slice(0, 3) if side == "left" else slice(7, 10)] = 0
    position_ids = positions_without_padding(mask)
    blocks = ((position_ids - prompt_lengths[:, None]) // 3 + 1).clamp(min=0)
    no_cache = None  # by position, for it has another name in older versions of transformers
    theirs = create_causal_mask(
        model.config, torch.zeros(2, 10, 32), mask, no_cache, position_ids=position_ids, block_sequence_ids=blocks
    )
    expected = model(ids, attention_mask=theirs, position_ids=position_ids).logits
    logits = model(ids, attention_mask=mask, prompt_lengths=prompt_lengths, block_size=3).logits
    assert_near(logits[mask.bool()], expected[mask.bool()])


INPUTS = {
    "unpadded": {},
    "left padding": {"attention_mask": torch.tensor([[0] * 3 + [1] * 7, [1] * 10])},
    "right padding": {"attention_mask": torch.tensor([[1] * 10, [1] * 6 + [0] * 4])},
    "a row of padding": {"attention_mask": torch.tensor([[0] * 10, [1] * 10])},
    "an empty row of a bool mask": {"attention_mask": (torch.arange(10)[:, None] > torch.arange(10))[None, None]},
    "an empty row of a float mask": {
        "attention_mask": torch.zeros(2, 1, 10, 10).masked_fill(torch.arange(10)[:, None] == 4, -torch.inf)
    },
}


@all_families
@pytest.mark.parametrize("structure", [{}, {"prompt_lengths": torch.tensor([3, 5]), "block_size": 2}], ids=len)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
def test_eager_sdpa_and_flex_attention_agree_on_every_token_even_on_padding(family, inputs, structure):
    ids = random_ids(2, 10)
    expected = model_with("eager", family, num_key_value_heads=2)(ids, **inputs, **structure).logits
    assert expected.isfinite().all()
    for implementation in ("sdpa", "flex_attention"):
        assert_near(
            model_with(implementation, family, num_key_value_heads=2)(ids, **inputs, **structure).logits, expected
        )


def masks_of(model: D2FForBlockDiffusion, call) -> list[torch.Tensor]:
    """The masks `(B, 1, L, S)`, bool or float, that the attention gets while `call()` uses the model."""
    masks = []

    def record(layer, inputs):
        mask = inputs[2]
        if isinstance(mask, BlockMask):
            mask = create_mask(mask.mask_mod, mask.shape[0], 1, *mask.seq_lengths)
        masks.append(mask)

    hook = model.model.get_layers()[0].register_forward_pre_hook(record)
    call()
    hook.remove()
    return masks


@all_families
@all_implementations
@pytest.mark.parametrize("structure", [{}, {"prompt_lengths": torch.tensor([3, 5]), "block_size": 2}], ids=len)
def test_no_query_is_without_keys_not_even_padding(family, implementation, structure):
    """Some kernels give NaN otherwise, on a GPU only, and as 0 times NaN is NaN, the next layer spreads it."""
    model, ids = model_with(implementation, family), random_ids(2, 10)
    for name, inputs in INPUTS.items():
        if name == "an empty row of a float mask":
            continue
        masks = masks_of(model, lambda inputs=inputs: model(ids, **inputs, **structure))
        for mask in masks:
            if mask is None:
                assert name == "unpadded" and not structure
                continue
            assert mask.shape == (2, 1, 10, 10)
            has_key = mask.any(-1) if mask.dtype == torch.bool else (mask == 0).any(-1)
            assert has_key.all(), name


@all_families
def test_no_query_is_without_keys_while_rows_are_decoded_at_their_own_pace(family):
    model, ids = model_with("sdpa", family), random_ids(3, 6)
    mask = torch.tensor([[0] * 5 + [1], [0] * 2 + [1] * 4, [1] * 6])
    masks = masks_of(model, lambda: model.generate(ids, attention_mask=mask, max_new_tokens=9))
    assert len(masks) > 2
    assert all((mask if mask.dtype == torch.bool else mask == 0).any(-1).all() for mask in masks)


@all_families
def test_a_four_dimensional_mask_of_integers_is_no_addend(family):
    model, ids = model_with("eager", family), random_ids(1, 6)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    assert_near(model(ids, attention_mask=allowed.long()).logits, model(ids, attention_mask=allowed).logits)
    with pytest.raises(ValueError, match="`attention_mask`"):
        model(ids, attention_mask=torch.ones(1, 6, 6))


@all_families
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_float32_mask_fits_a_narrower_model(family, implementation, dtype, lowest):
    """Its lowest number is -inf in the narrower type, and a query whose keys are all at -inf gives NaN."""
    model, ids = copy.deepcopy(model_with(implementation, family)).to(dtype), random_ids(1, 5)
    mask = torch.zeros(1, 1, 5, 5)
    assert model(ids, attention_mask=mask).logits.equal(model(ids).logits)
    mask[..., 2, :], mask[..., 3, 1:] = lowest, lowest
    (seen,) = masks_of(model, lambda: model(ids, attention_mask=mask))
    assert seen.dtype == dtype and seen.isfinite().all()
    assert model(ids, attention_mask=mask).logits.isfinite().all()


@all_families
@pytest.mark.parametrize("width", [5, 7, 9])
def test_a_mask_that_does_not_cover_cache_and_input_is_an_error(family, width):
    model, ids = model_with("sdpa", family), random_ids(1, 8)
    kv_cache = DynamicCache(config=model.config)
    model(ids[:, :3], cache=kv_cache)
    with pytest.raises(ValueError, match="`attention_mask` .* 8 .* " + str(width)):
        model(ids[:, 3:], attention_mask=torch.ones(1, width), cache=kv_cache)


@all_families
@all_implementations
def test_without_any_mask_all_see_all(family, implementation):
    """sdpa is causal where a module does not say otherwise."""
    model, ids = model_with(implementation, family), random_ids(1, 6)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % PAD
    assert not model(ids).logits[0, 0].equal(model(changed).logits[0, 0])


@all_families
@all_implementations
def test_the_blocks_before_a_token_do_not_see_it(family, implementation):
    model, ids = model_with(implementation, family), random_ids(1, 9)
    named = {"prompt_lengths": torch.tensor([3]), "block_size": 2}
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % PAD  # the first of the second response block
    moved = (model(ids, **named).logits != model(changed, **named).logits).any(-1)[0]
    assert moved.tolist() == [False] * 5 + [True] * 4


@all_families
def test_position_ids_count_the_tokens_of_a_row_by_default(family):
    model, ids = model_with("sdpa", family), random_ids(1, 7)
    default = model(ids).logits
    assert model(ids, position_ids=torch.arange(7)[None]).logits.equal(default)
    shifted = model(ids, position_ids=torch.arange(50, 57)[None]).logits
    torch.testing.assert_close(shifted, default, atol=1e-3, rtol=1e-3)  # rotary positions are relative
    assert not torch.allclose(model(ids, position_ids=2 * torch.arange(7)[None]).logits, default, atol=0.1)


@all_families
def test_flash_attention_is_refused_because_it_would_drop_the_mask(family):
    _, model_class, _ = FAMILIES[family]
    model = tiny_model(family=family)
    with pytest.raises(ValueError, match="[Ff]lash"):
        model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="[Ff]lash"):
        model_class._from_config(tiny_config(family), attn_implementation="flash_attention_2")


# ---- what forward takes and gives ----


@all_families
def test_logits_to_keep_is_a_number_a_vector_or_a_mask(family):
    model, ids = model_with("sdpa", family), random_ids(2, 6)
    logits = model(ids).logits
    mask = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()
    for kept, expected in ((2, logits[:, -2:]), (torch.tensor([3, 0]), logits[:, [3, 0]]), (mask, logits[mask])):
        assert_near(model(ids, logits_to_keep=kept).logits, expected)
    assert model(ids, logits_to_keep=torch.zeros_like(mask)).logits.shape == (0, VOCAB_SIZE)


@all_families
def test_embeddings_may_take_the_place_of_ids(family):
    model, ids = model_with("sdpa", family), random_ids(2, 6)
    embeds = model.get_input_embeddings()(ids)
    assert model(inputs_embeds=embeds).logits.equal(model(ids).logits)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="`input_ids` and `inputs_embeds`"):
            model(**inputs)


@all_families
def test_hidden_states_and_attentions_on_request(family):
    model, ids = model_with("eager", family, num_key_value_heads=2), random_ids(1, 7)
    output = model(ids, prompt_lengths=torch.tensor([3]), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3 and len(output.attentions) == 2
    assert output.hidden_states[0].equal(model.get_input_embeddings()(ids))
    assert not output.hidden_states[1].equal(output.hidden_states[0])
    head: Any = model.get_output_embeddings()
    assert head(output.hidden_states[-1]).equal(output.logits)
    allowed = plain_models.block_causal_mask(7, 3, 4)
    for weights in output.attentions:
        assert weights.shape == (1, 4, 7, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 7))
        assert (weights[..., ~allowed] == 0).all() and (weights[..., allowed] > 0).all()
    plain = model(ids)
    assert plain.hidden_states is None and plain.attentions is None and plain.cache is None


@all_families
def test_a_tuple_on_request(family):
    model, ids = model_with("sdpa", family), random_ids(1, 5)
    assert model(ids, return_dict=False)[0].equal(model(ids).logits)


@all_families
@pytest.mark.parametrize("shift", [False, True])
def test_the_loss_is_the_cross_entropy_of_the_logits_that_predict_the_labels(family, shift):
    model, ids = model_with("sdpa", family, right_shift_logits=shift), random_ids(2, 8)
    labels = torch.full_like(ids, -100)
    labels[0, [3, 6]], labels[1, 1] = ids[0, [3, 6]], ids[1, 1]
    noisy = ids.masked_fill(labels != -100, MASK)
    output = model(noisy, labels=labels)
    log_p = output.logits.log_softmax(-1)
    terms = [-log_p[b, i - 1 if shift else i, labels[b, i]] for b, i in ((0, 3), (0, 6), (1, 1))]
    torch.testing.assert_close(output.loss, sum(terms) / 3)
    torch.testing.assert_close(model(noisy, labels=labels, num_items_in_batch=12).loss, sum(terms) / 12)


@all_families
def test_attention_dropout_works_in_training_only(family):
    model, ids = tiny_model(family=family, attention_dropout=0.5), random_ids(1, 8)
    assert model(ids).logits.equal(model(ids).logits)
    model.train()
    assert not model(ids).logits.equal(model(ids).logits)


@all_families
def test_the_base_model_gives_the_hidden_states_before_the_head(family):
    model, ids = model_with("sdpa", family), random_ids(1, 5)
    assert model.base_model is model.model
    assert type(model.model).__name__ == type(model).__name__.replace("ForBlockDiffusion", "Model")
    hidden = model.model(ids).last_hidden_state
    head: Any = model.get_output_embeddings()
    assert head(hidden).equal(model(ids).logits)


# ---- training features ----


@all_families
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@torch.enable_grad()
def test_gradient_checkpointing_changes_neither_the_loss_nor_a_gradient(family, lora):
    ids, labels = random_ids(2, 9), random_ids(2, 9, seed=1)
    mask = torch.tensor([[0] * 2 + [1] * 7, [1] * 9])

    def run(checkpointing: bool):
        model = inner = tiny_model(family=family)
        if lora:
            torch.manual_seed(0)
            targets = [*model.config.attention_projections, "up_proj"]
            model = get_peft_model(inner, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
            model.enable_input_require_grads()
        if checkpointing:
            model.gradient_checkpointing_enable()
        runs = []
        norm = next(part for part in inner.model.get_layers()[0].modules() if isinstance(part, D2FRMSNorm))
        norm.register_forward_hook(lambda *_: runs.append(1))
        model.train()
        named = {"prompt_lengths": torch.tensor([3, 4]), "attention_mask": mask, "labels": labels}
        loss = model(input_ids=ids, **named).loss
        loss.backward()
        assert len(runs) == (2 if checkpointing else 1), "otherwise nothing was checkpointed"
        return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    (loss, gradients), (expected_loss, expected_gradients) = run(True), run(False)
    torch.testing.assert_close(loss, expected_loss)
    trained = 2 * 5 * 2 if lora else len(list(tiny_model(family=family).parameters()))
    assert gradients.keys() == expected_gradients.keys() and len(gradients) == trained
    for name, expected in expected_gradients.items():
        assert expected.abs().sum() > 0, name
        torch.testing.assert_close(gradients[name], expected)


@all_families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_half_precision_stays_close_to_float32(family, dtype):
    model, ids, named = model_with("sdpa", family), random_ids(1, 8), {"prompt_lengths": torch.tensor([3])}
    low = copy.deepcopy(model).to(dtype)
    logits, expected = low(ids, **named).logits, model(ids, **named).logits
    assert logits.dtype == dtype
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
    output = low.generate(ids, max_new_tokens=6, return_dict_in_generate=True)
    assert output.num_forward_passes.item() <= 6


# ---- compiling and exporting ----


@all_families
def test_forward_compiles_as_one_graph_for_all_lengths(family):
    """fullgraph: nothing falls back to Python. One graph for the first length, one for all others."""
    model, counter = tiny_model(family=family, num_key_value_heads=2), CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for length in (8, 11, 14, 9):
            ids, mask = random_ids(2, length, seed=length), torch.ones(2, length, dtype=torch.long)
            mask[0, :3] = 0
            named = {"attention_mask": mask, "prompt_lengths": torch.tensor([2, length - 7]), "block_size": 2}
            assert_near(compiled(ids, **named).logits, model(ids, **named).logits)
    assert 1 <= counter.frame_count <= 2


@all_families
def test_a_compiled_step_with_a_d2f_cache_is_one_graph_however_far_each_row_is(family):
    """After the first step, which allocates the cache."""
    model, counter = tiny_model(family=family, num_key_value_heads=2), CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    ids, prompt_lengths = random_ids(2, 14), torch.tensor([2, 4])
    uncached = model(ids, prompt_lengths=prompt_lengths, block_size=2).logits
    kv_cache, rows = d2f_hf.D2FCache(num_layers=2, max_length=14), torch.arange(2)[:, None]
    with torch.compiler.set_stance("default"):
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for starts in ([0, 0], [4, 4], [6, 8], [8, 10], [10, 10]):
            position = torch.tensor(starts)[:, None] + torch.arange(4)
            kv_cache.set_window(position, 14)
            allowed = block_causal_mask(
                position, prompt_lengths, 2, torch.arange(14)[None], torch.arange(14) <= position[:, -1:]
            )
            named = {"attention_mask": allowed, "position_ids": position, "cache": kv_cache}
            assert_near(compiled(ids.gather(1, position), **named).logits, uncached[rows, position])
    assert 1 <= counter.frame_count <= 2


@all_families
def test_an_exported_program_gives_the_logits_for_any_batch_and_length(family):
    model = tiny_model(family=family, num_key_value_heads=2)

    def inputs(batch_size: int, length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(batch_size, length, dtype=torch.long)
        mask[0, :2] = 0
        ids = random_ids(batch_size, length, seed=length)
        return {"input_ids": ids, "attention_mask": mask, "prompt_lengths": torch.arange(2, 2 + batch_size)}

    rows, tokens = torch.export.Dim("rows"), torch.export.Dim("tokens")
    shapes = {"input_ids": {0: rows, 1: tokens}, "attention_mask": {0: rows, 1: tokens}, "prompt_lengths": {0: rows}}
    program = torch.export.export(model, (), inputs(2, 9), dynamic_shapes=shapes, strict=False)
    for sizes in ((2, 9), (3, 14)):
        assert_near(program.module()(**inputs(*sizes))["logits"], model(**inputs(*sizes)).logits)


# ---- saving, loading, resizing ----


@all_families
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [VOCAB_SIZE, VOCAB_SIZE + 7, VOCAB_SIZE - 1], ids=["same", "up", "down"])
def test_saving_and_loading_keeps_the_logits_tied_or_not_and_resized(family, tied, size, tmp_path):
    _, model_class, names = FAMILIES[family]
    model = tiny_model(family=family, tie_word_embeddings=tied, mask_token_id=5, eos_token_id=1, pad_token_id=2)
    ids = random_ids(1, 6) % 30
    before = model(ids).logits
    if size != VOCAB_SIZE:
        model.resize_token_embeddings(size, mean_resizing=False)
    kept = min(size, VOCAB_SIZE)
    after = model(ids).logits
    assert after.shape[-1] == size == model.config.vocab_size
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    model.save_pretrained(tmp_path)
    reloaded, info = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert reloaded(ids).logits.equal(after)
    head, embedding = reloaded.get_output_embeddings().weight, reloaded.get_input_embeddings().weight
    assert (head is embedding or head.data_ptr() == embedding.data_ptr()) == tied
    assert (names["head"] in load_file(tmp_path / "model.safetensors")) != tied
    assert reloaded.config.tie_word_embeddings == tied


@golden_families
def test_a_model_with_other_ids_and_sizes_comes_back_the_same(family, tmp_path):
    _, model_class, _ = FAMILIES[family]
    model, ids = other_model(family), random_ids(1, 8)
    model.save_pretrained(tmp_path)
    reloaded = model_class.from_pretrained(tmp_path)
    assert reloaded(ids).logits.equal(model(ids).logits)
    special = ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
    assert [getattr(reloaded.config, name) for name in special] == [OTHER[name] for name in special]
    assert reloaded.generation_config.eos_token_id == OTHER["eos_token_id"]


@golden_families
def test_the_rotary_frequencies_are_right_after_loading_and_after_a_change_of_dtype(family):
    """They are not in the checkpoint, and loading starts on the meta device."""
    _, model_class, _ = FAMILIES[family]
    model = model_class.from_pretrained(GOLDEN / f"{family}_tiny")
    expected = {"llada": 500000.0, "dream": 1000000.0}[family] ** (-torch.arange(0, 16, 2) / 16)
    for _ in range(2):
        rotary = model.model.rotary_emb
        torch.testing.assert_close(rotary.inv_freq, expected)
        torch.testing.assert_close(rotary.original_inv_freq, expected)
        model = model.to(torch.bfloat16)
    loaded = model_class.from_pretrained(GOLDEN / f"{family}_tiny", dtype=torch.bfloat16)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, expected)


@all_families
@pytest.mark.parametrize("rope", [{}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}], ids=len)
def test_a_model_built_on_the_meta_device_and_filled_gives_the_same_logits(family, rope):
    """`to_empty` leaves memory as it is; what is not in the weights has to be computed again."""
    options = {"rope_parameters": rope} if rope else {}
    model, ids = tiny_model(family=family, **options), random_ids(1, 8)
    with torch.device("meta"):
        filled = type(model)(model.config)
    assert all(tensor.is_meta for tensor in (*filled.parameters(), *filled.buffers()))
    filled.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert filled.eval()(ids).logits.equal(model(ids).logits)


@all_families
def test_layers_on_the_disk_give_the_same_logits(family, tmp_path):
    pytest.importorskip("accelerate")
    model, ids = tiny_model(family=family, num_hidden_layers=4), random_ids(1, 6)
    model.save_pretrained(tmp_path)
    named = {"prompt_lengths": torch.tensor([2])}
    layer_bytes = sum(weight.nbytes for weight in model.model.get_layers()[0].parameters())
    dispatched = type(model).from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": 3 * layer_bytes}, offload_folder=tmp_path / "offload"
    )
    assert set(dispatched.hf_device_map.values()) == {"cpu", "disk"}
    layers = dispatched.model.get_layers()
    on_disk = [{weight.is_meta for weight in layer.parameters()} for layer in layers]
    assert on_disk[0] == {False} and on_disk[-1] == {True}, "layers are where they are as a whole"
    assert dispatched(ids, **named).logits.equal(model(ids, **named).logits)
    assert dispatched.generate(ids, max_new_tokens=5).equal(model.generate(ids, max_new_tokens=5))


@all_families
@pytest.mark.parametrize("decoding", ["d2f", "vanilla", "fast_dllm"])
def test_embeddings_and_head_on_the_disk_give_the_same_tokens_and_the_device_is_where_it_computes(
    family, decoding, tmp_path
):
    """`model.device` was "meta", because accelerate keeps there what it has offloaded, and streams failed."""
    model, ids = tiny_model(family=family), random_ids(1, 6)
    model.save_pretrained(tmp_path)
    ends, parts = ("model.embed_tokens", "lm_head"), ("model.layers", "model.norm")
    if family == "llada":
        ends = ("model.transformer.wte", "model.transformer.ff_out")
        parts = ("model.transformer.blocks", "model.transformer.ln_f")
    device_map = {
        **dict.fromkeys(ends, "disk"),
        **dict.fromkeys((*parts, "model.rotary_emb"), "cpu"),
    }
    offloaded = type(model).from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offload")
    assert offloaded.get_input_embeddings().weight.is_meta and offloaded.device == torch.device("cpu")
    assert offloaded(ids).logits.equal(model(ids).logits)
    expected = model.generate(ids, max_new_tokens=5, decoding=decoding)
    assert offloaded.generate(ids, max_new_tokens=5, decoding=decoding).equal(expected)


def test_a_model_without_weights_is_on_the_meta_device():
    with torch.device("meta"):
        assert type(tiny_model())(tiny_config()).device == torch.device("meta")


@all_families
@all_implementations
def test_a_default_device_changes_nothing_in_forward(family, implementation):
    """Here it is "meta", which shows tensors that were made there, on a machine without an accelerator, too."""
    model, ids = model_with(implementation, family), random_ids(2, 6)
    mask, prompt_lengths = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]), torch.tensor([2, 3])
    window, rest = torch.tensor([[0, 1, -1], [0, 1, 2]]), torch.tensor([[2, -1, -1], [3, 4, 5]])
    seen, position = torch.ones(2, 1, 3, 6, dtype=torch.bool), torch.arange(4)[None]

    def outputs() -> list[torch.Tensor]:
        kv_cache, d2f_cache = DynamicCache(config=model.config), d2f_hf.D2FCache(num_layers=2)
        logits = [model(ids).logits, model(ids, attention_mask=mask, prompt_lengths=prompt_lengths).logits]
        logits += [model(ids, cache=kv_cache).logits, model(ids, cache=kv_cache).logits]
        d2f_cache.set_window(window, 3)
        logits.append(
            model(ids[:, :3], attention_mask=seen[..., :3], position_ids=window.abs(), cache=d2f_cache).logits
        )
        d2f_cache.set_window(rest, 6, is_packed=True)
        logits.append(model(ids[:1, :4], attention_mask=seen, position_ids=position, cache=d2f_cache).logits)
        return logits

    expected = outputs()
    with torch.device("meta"):
        actual = outputs()
    assert all(a.equal(e) for a, e in zip(actual, expected, strict=True))


@all_families
def test_another_rope_type_scales_the_frequencies(family, tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model, plain = tiny_model(family=family, rope_parameters=linear), tiny_model(family=family, rope_theta=10000.0)
    ids = random_ids(1, 6)
    assert_near(model(ids).logits, plain(ids, position_ids=torch.arange(6)[None] / 2).logits)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path)(ids).logits.equal(model(ids).logits)


@all_families
def test_new_weights_are_initialised_by_the_config(family):
    _, model_class, names = FAMILIES[family]
    weights = model_class(tiny_config(family, initializer_range=0.5)).state_dict()
    last_matrix = names["layer"].format(1) + names["down"] + ".weight"
    for name in (names["embedding"], names["head"], last_matrix):
        assert weights[name].std() == pytest.approx(0.5, rel=0.1), name
    assert (weights[names["norm"]] == 1).all()
    assert all((weight == 0).all() for name, weight in weights.items() if name.endswith(".bias"))


# ---- saving: class, module and code come from what the model is ----


class Derived(D2FLLaDAForBlockDiffusion):
    """As in a script or a notebook: its code is in no folder."""


class WithMoreWeights(D2FLLaDAForBlockDiffusion):
    def __init__(self, config):
        super().__init__(config)
        self.more = torch.nn.Linear(2, 2)


class DerivedConfig(d2f_hf.D2FLLaDAConfig):
    model_type = "derived"
    block_size: int = 7


def fsdp_model() -> torch.nn.Module:
    """A model that `fully_shard` has wrapped: it puts another class in the place of the model's."""
    for layer in (model := tiny_model()).model.get_layers():
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_loads(folder: Path, class_name: str, family: str = "llada") -> None:
    """The folder names published classes, holds their code, and loads."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [class_name] and config["model_type"] == f"d2f_{family}"
    for name in config["auto_map"].values():
        module, _, named = name.partition(".")
        assert f"class {named}(" in (folder / f"{module}.py").read_text()
    code = {file.name for file in folder.glob("*.py")}
    assert {"attention_d2f.py", f"modeling_d2f_{family}.py"} < code and not any("test" in name for name in code)
    auto_class = AutoModelForCausalLM if "ForBlockDiffusion" in class_name else AutoModel
    loaded = auto_class.from_pretrained(folder)
    assert type(loaded).__name__ == FAMILIES[family][1].__name__


@pytest.mark.parametrize("kind", ["derived", "compiled", "compiled in place", "merged", "derived config"])
def test_what_wraps_a_model_is_not_in_the_saved_folder(kind, tmp_path):
    """`auto_map` named classes of torch, of a test or of `__main__`, and the folder held their files."""
    model = Derived(tiny_config()) if kind == "derived" else tiny_model()
    if kind == "compiled":
        model = torch.compile(model)
    elif kind == "compiled in place":
        model.compile()
    elif kind == "merged":
        adapted = get_peft_model(Derived(tiny_config()), LoraConfig(target_modules=["q_proj"]))
        model = adapted.merge_and_unload()
    elif kind == "derived config":
        values = {name: value for name, value in tiny_config().to_dict().items() if name != "model_type"}
        model = D2FLLaDAForBlockDiffusion(DerivedConfig(**values))
    model.save_pretrained(tmp_path)
    assert_loads(tmp_path, "D2FLLaDAForBlockDiffusion")


def test_a_model_that_fsdp_wraps_is_saved_as_what_it_is(process_group, tmp_path):
    """FSDP2 changes the class in place, and the folder held files of torch.distributed and none of the model."""
    model, options = fsdp_model(), StateDictOptions(full_state_dict=True, cpu_offload=True)
    refused(model, "`state_dict` must be given", tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved", state_dict=get_model_state_dict(model, options=options))
    assert_loads(tmp_path / "saved", "D2FLLaDAForBlockDiffusion")
    ids = random_ids(1, 6)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(ids).logits.equal(tiny_model()(ids).logits)


@all_families
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_base_model_is_saved_with_its_code(family, tied, tmp_path):
    model, ids = tiny_model(family=family, tie_word_embeddings=tied).model, random_ids(1, 6)
    model.save_pretrained(tmp_path)
    assert_loads(tmp_path, type(model).__name__, family)
    assert type(model).from_pretrained(tmp_path)(ids).last_hidden_state.equal(model(ids).last_hidden_state)


def refused(model, match: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=match):
        model.save_pretrained(folder)
    assert not folder.exists() or not list(folder.iterdir()), "it is refused before anything is written"


def test_weights_that_the_published_class_has_not_are_refused(tmp_path):
    refused(WithMoreWeights(tiny_config()), "more.bias, more.weight", tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [("block_size", 0, "block_size"), ("mask_token_id", 99, "mask_token_id"), ("temperature", 0.5, "generation")],
)
def test_a_configuration_that_could_not_be_loaded_again_is_refused(name, value, match, tmp_path):
    model = tiny_model()
    setattr(model.config, name, value)
    refused(model, match, tmp_path / "saved")


def test_a_generation_config_that_could_not_be_loaded_again_is_refused(tmp_path):
    model = tiny_model()
    model.generation_config.confidence_threshold = 7
    refused(model, "confidence_threshold", tmp_path / "saved")
    model.generation_config = None
    refused(model, "`generation_config` must be set", tmp_path / "saved")


@all_families
def test_outputs_that_the_config_asks_for_survive_saving(family, tmp_path):
    """A tuple without names broke `forward`, and recorded outputs the loading of what had been saved."""
    model, ids = tiny_model(family=family), random_ids(1, 5)
    expected = model(ids).logits
    model.config.return_dict, model.config.output_hidden_states = False, True
    model.save_pretrained(tmp_path)
    for same in (model, type(model).from_pretrained(tmp_path)):
        logits, hidden_states = same(ids)
        assert logits.equal(expected) and len(hidden_states) == 3
        assert same(ids, return_dict=True).logits.equal(expected)
        assert same.model(ids, return_dict=True).last_hidden_state.equal(hidden_states[-1])


# ---- names that other libraries go by ----


def matches(pattern: str, names: list[str]) -> list[str]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in names if regex.fullmatch(name)]


@all_families
def test_the_parallel_plans_name_modules_that_exist_and_cover_every_projection(family):
    model = model_with("sdpa", family)
    names = [name for name, _ in model.named_modules()]
    planned = set()
    for pattern in model.config.base_model_tp_plan or ():
        found = matches(f"model.{pattern}", names)
        assert len(found) == model.config.num_hidden_layers, pattern
        planned.update(found)
    for pattern in type(model)._tp_plan or ():
        assert matches(pattern, names), pattern
        planned.update(matches(pattern, names))
    assert planned == {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for pattern in model.config.base_model_fsdp_plan:
        assert matches(f"model.{pattern}", names), pattern
    assert set(model._no_split_modules) == {type(model.model.get_layers()[0]).__name__}


@golden_families
def test_the_attention_projections_of_the_config_are_in_each_layer(family):
    model = model_with("sdpa", family)
    for layer in model.model.get_layers():
        parts = {
            name.rpartition(".")[2] for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)
        }
        assert set(model.config.attention_projections) < parts
    assert len(model.config.attention_projections) == 4
