"""The LLaDA architecture: golden logits, masks, caches, padding, training features, saving and loading."""

import copy
import re
from functools import cache

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import DynamicCache

from d2f_hf import D2FCache, D2FLLaDAForBlockDiffusion, D2FLLaDAModel
from golden_data import GOLDEN
from plain_models import block_causal_mask
from tiny_models import MASK, PAD, VOCAB_SIZE, plain_logits, tiny_config, tiny_model

# B batch, L sequence, V vocabulary

IMPLEMENTATIONS = ["eager", "sdpa"]


@cache
def model_with(implementation: str, **options) -> D2FLLaDAForBlockDiffusion:
    model = tiny_model(**options)
    model.set_attn_implementation(implementation)
    return model


def random_ids(*shape: int, seed: int = 0) -> torch.LongTensor:
    return torch.randint(0, PAD, shape, generator=torch.Generator().manual_seed(seed))


# ---- golden logits ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_adapter", [False, True], ids=["base", "adapter"])
def test_logits_are_those_of_the_reference(implementation, with_adapter):
    model = D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny", attn_implementation=implementation)
    if with_adapter:
        model = PeftModel.from_pretrained(model, GOLDEN / "llada_adapter")
    model.eval()
    golden = load_file(GOLDEN / "logits_llada.safetensors")
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
        with torch.no_grad():
            logits = model(golden["input_ids." + case.split(".")[0]], **structure).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        compared += 1
    assert compared == (2 if with_adapter else 9)


def test_an_original_checkpoint_loads_without_missing_or_unexpected_keys():
    _, info = D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 1}, {"n_kv_heads": 2, "weight_tying": True}], ids=str)
def test_logits_equal_the_plain_model(implementation, options):
    model = model_with(implementation, **options)
    ids = random_ids(1, 11)
    for structure in ((), (3, 4), (1, 1)):
        named = {"prompt_lengths": torch.tensor(structure[:1]), "block_size": structure[1]} if structure else {}
        with torch.no_grad():
            logits = model(ids, **named).logits[0]
        torch.testing.assert_close(logits, plain_logits(model)(ids[0].tolist(), *structure), atol=1e-4, rtol=0)


def test_the_block_size_of_the_config_is_the_default():
    model, ids, prompt_lengths = model_with("sdpa", block_size=3), random_ids(1, 10), torch.tensor([2])
    assert model(ids, prompt_lengths=prompt_lengths).logits.equal(
        model(ids, prompt_lengths=prompt_lengths, block_size=3).logits
    )
    assert not model(ids, prompt_lengths=prompt_lengths, block_size=4).logits.equal(
        model(ids, prompt_lengths=prompt_lengths).logits
    )


# ---- caches ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_dynamic_cache_fed_block_by_block_gives_the_uncached_logits(implementation, kv_heads):
    model = model_with(implementation, n_kv_heads=kv_heads)
    ids, prompt_lengths = random_ids(2, 13), torch.tensor([5, 5])
    uncached = model(ids, prompt_lengths=prompt_lengths, block_size=4).logits
    kv_cache, logits = DynamicCache(config=model.config), []
    for start, end in ((0, 5), (5, 9), (9, 13)):
        output = model(ids[:, start:end], prompt_lengths=prompt_lengths, block_size=4, cache=kv_cache)
        assert output.cache is kv_cache
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), uncached, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_d2f_cache_filled_at_different_paces_gives_the_uncached_logits(implementation):
    """Row 0 feeds its prompt of 2 and a block, row 1 its prompt of 4; then each feeds its next block."""
    model, block_size = model_with(implementation), 3
    ids, prompt_lengths = random_ids(2, 8), torch.tensor([2, 4])
    uncached = model(ids, prompt_lengths=prompt_lengths, block_size=block_size).logits
    kv_cache = D2FCache(num_layers=2, max_length=8)
    for starts, ends in (([0, 0], [5, 4]), ([5, 4], [8, 7])):
        starts, ends = torch.tensor(starts)[:, None], torch.tensor(ends)[:, None]
        width = int((ends - starts).max())
        position = starts + torch.arange(width)
        is_fed = position < ends
        kv_cache.set_window(torch.where(is_fed, position, kv_cache.padding_slot), int(ends.max()))
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
        torch.testing.assert_close(logits[is_fed], expected[is_fed], atol=1e-5, rtol=1e-5)


def test_past_key_values_is_a_deprecated_name_of_cache():
    model, ids = model_with("sdpa"), random_ids(1, 6)
    by_name, by_old_name = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = model(ids, cache=by_name).logits
    with pytest.warns(FutureWarning, match="past_key_values"):
        assert model(ids, past_key_values=by_old_name).logits.equal(expected)
    assert by_old_name.get_seq_length() == by_name.get_seq_length() == 6
    with pytest.warns(FutureWarning, match="past_key_values"):
        model.model(ids, past_key_values=DynamicCache(config=model.config))


# ---- padding and masks ----


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("structure", ["bidirectional", "block-causal"])
def test_padding_at_either_end_changes_no_logits_of_a_token(implementation, structure):
    model = model_with(implementation)
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
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        for logits, other in zip(run(side, PAD), run(side, 3), strict=True):
            assert logits.equal(other), "not even by rounding"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_and_four_dimensional_bool_and_float_masks_say_the_same(implementation):
    model, ids = model_with(implementation), random_ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask).logits
    as_bool = mask.bool()[:, None, None, :].expand(-1, 1, 6, -1)
    as_float = torch.zeros(as_bool.shape).masked_fill(~as_bool, torch.finfo(torch.float32).min)
    for four_dimensional in (as_bool, as_float):
        logits = model(ids, attention_mask=four_dimensional, position_ids=position_ids).logits
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_finished_mask_decides_alone_who_sees_whom(implementation):
    model, ids = model_with(implementation), random_ids(1, 9)
    expected = model(ids, prompt_lengths=torch.tensor([3]), block_size=2).logits
    allowed = block_causal_mask(9, 3, 2)[None, None]
    torch.testing.assert_close(model(ids, attention_mask=allowed).logits, expected, atol=1e-5, rtol=1e-5)


def test_a_float32_mask_fits_a_bfloat16_model():
    model, ids = copy.deepcopy(model_with("sdpa")).to(torch.bfloat16), random_ids(1, 5)
    assert model(ids, attention_mask=torch.zeros(1, 1, 5, 5)).logits.equal(model(ids).logits)


def test_without_any_mask_all_see_all():
    """sdpa is causal where a module does not say otherwise."""
    model, ids = model_with("sdpa"), random_ids(1, 6)
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % PAD
    assert not model(ids).logits[0, 0].equal(model(changed).logits[0, 0])


def test_the_blocks_before_a_token_do_not_see_it():
    model, ids, named = model_with("sdpa"), random_ids(1, 9), {"prompt_lengths": torch.tensor([3]), "block_size": 2}
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % PAD  # the first of the second response block
    moved = (model(ids, **named).logits != model(changed, **named).logits).any(-1)[0]
    assert moved.tolist() == [False] * 5 + [True] * 4


def test_position_ids_count_the_tokens_of_a_row_by_default():
    model, ids = model_with("sdpa"), random_ids(1, 7)
    default = model(ids).logits
    assert model(ids, position_ids=torch.arange(7)[None]).logits.equal(default)
    shifted = model(ids, position_ids=torch.arange(50, 57)[None]).logits
    torch.testing.assert_close(shifted, default, atol=1e-3, rtol=1e-3)  # rotary positions are relative
    assert not torch.allclose(model(ids, position_ids=2 * torch.arange(7)[None]).logits, default, atol=0.1)


def test_flash_attention_is_refused_because_it_would_drop_the_mask():
    with pytest.raises(ValueError, match="[Ff]lash"):
        model_with("sdpa").set_attn_implementation("flash_attention_2") or D2FLLaDAForBlockDiffusion._from_config(
            tiny_config(), attn_implementation="flash_attention_2"
        )


# ---- what forward takes and gives ----


def test_logits_to_keep_is_a_number_a_vector_or_a_mask():
    model, ids = model_with("sdpa"), random_ids(2, 6)
    logits = model(ids).logits
    mask = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]]).bool()
    for kept, expected in ((2, logits[:, -2:]), (torch.tensor([3, 0]), logits[:, [3, 0]]), (mask, logits[mask])):
        actual = model(ids, logits_to_keep=kept).logits
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert model(ids, logits_to_keep=torch.zeros_like(mask)).logits.shape == (0, VOCAB_SIZE)


def test_embeddings_may_take_the_place_of_ids():
    model, ids = model_with("sdpa"), random_ids(2, 6)
    embeds = model.get_input_embeddings()(ids)
    assert model(inputs_embeds=embeds).logits.equal(model(ids).logits)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="`input_ids` and `inputs_embeds`"):
            model(**inputs)


def test_hidden_states_and_attentions_on_request():
    model, ids = model_with("eager"), random_ids(1, 7)
    output = model(ids, prompt_lengths=torch.tensor([3]), output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3 and len(output.attentions) == 2
    assert output.hidden_states[0].equal(model.get_input_embeddings()(ids))
    assert model.get_output_embeddings()(output.hidden_states[-1]).equal(output.logits)
    allowed = block_causal_mask(7, 3, 4)
    for weights in output.attentions:
        assert weights.shape == (1, 4, 7, 7)
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 7))
        assert (weights[..., ~allowed] == 0).all() and (weights[..., allowed] > 0).all()
    plain = model(ids)
    assert plain.hidden_states is None and plain.attentions is None and plain.cache is None


def test_a_tuple_on_request():
    model, ids = model_with("sdpa"), random_ids(1, 5)
    assert model(ids, return_dict=False)[0].equal(model(ids).logits)


@pytest.mark.parametrize("shift", [False, True])
def test_the_loss_is_the_cross_entropy_of_the_logits_that_predict_the_labels(shift):
    model, ids = model_with("sdpa", right_shift_logits=shift), random_ids(2, 8)
    labels = torch.full_like(ids, -100)
    labels[0, [3, 6]], labels[1, 1] = ids[0, [3, 6]], ids[1, 1]
    noisy = ids.masked_fill(labels != -100, MASK)
    output = model(noisy, labels=labels)
    log_p = output.logits.log_softmax(-1)
    terms = [-log_p[b, i - 1 if shift else i, labels[b, i]] for b, i in ((0, 3), (0, 6), (1, 1))]
    torch.testing.assert_close(output.loss, sum(terms) / 3)
    torch.testing.assert_close(model(noisy, labels=labels, num_items_in_batch=12).loss, sum(terms) / 12)


def test_attention_dropout_works_in_training_only():
    model = tiny_model(attention_dropout=0.5)
    ids = random_ids(1, 8)
    assert model(ids).logits.equal(model(ids).logits)
    model.train()
    assert not model(ids).logits.equal(model(ids).logits)


# ---- training features ----


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_checkpointing_changes_neither_the_loss_nor_a_gradient(lora):
    ids, labels = random_ids(2, 9), random_ids(2, 9, seed=1)
    mask = torch.tensor([[0] * 2 + [1] * 7, [1] * 9])

    def run(checkpointing: bool):
        model = tiny_model()
        if lora:
            torch.manual_seed(0)
            config = LoraConfig(r=2, target_modules=["q_proj", "attn_out", "up_proj"], init_lora_weights=False)
            model = get_peft_model(model, config)
            model.enable_input_require_grads()
        recomputed = []
        if checkpointing:
            model.gradient_checkpointing_enable()
        block = (model.base_model.model if lora else model).model.transformer.blocks[0]
        block.attn_norm.register_forward_hook(lambda *_: recomputed.append(1))
        model.train()
        named = {"prompt_lengths": torch.tensor([3, 4]), "attention_mask": mask, "labels": labels}
        loss = model(input_ids=ids, **named).loss
        loss.backward()
        assert len(recomputed) == (2 if checkpointing else 1), "otherwise nothing was checkpointed"
        return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    (loss, gradients), (expected_loss, expected_gradients) = run(True), run(False)
    torch.testing.assert_close(loss, expected_loss)
    assert gradients.keys() == expected_gradients.keys() and len(gradients) == (12 if lora else 21)
    for name, expected in expected_gradients.items():
        assert expected.abs().sum() > 0, name
        torch.testing.assert_close(gradients[name], expected)


def test_grouped_heads_equal_full_heads_with_repeated_weights():
    grouped, full = tiny_model(n_kv_heads=2), tiny_model()
    weights = grouped.state_dict()
    for name in list(weights):
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(weights)
    ids = random_ids(1, 7)
    torch.testing.assert_close(grouped(ids).logits, full(ids).logits, atol=1e-5, rtol=1e-5)


# ---- saving, loading, resizing ----


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [VOCAB_SIZE, VOCAB_SIZE + 7, VOCAB_SIZE - 1], ids=["same", "up", "down"])
def test_saving_and_loading_keeps_the_logits_tied_or_not_and_resized(tied, size, tmp_path):
    model = tiny_model(weight_tying=tied, mask_token_id=5, eos_token_id=1, pad_token_id=2)
    ids = random_ids(1, 6) % 30
    before = model(ids).logits
    if size != VOCAB_SIZE:
        model.resize_token_embeddings(size, mean_resizing=False)
    kept = min(size, VOCAB_SIZE)
    after = model(ids).logits
    assert after.shape[-1] == size == model.config.vocab_size
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    model.save_pretrained(tmp_path)
    reloaded, info = D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert reloaded(ids).logits.equal(after)
    head, embedding = reloaded.get_output_embeddings().weight, reloaded.get_input_embeddings().weight
    assert (head is embedding or head.data_ptr() == embedding.data_ptr()) == tied
    assert ("model.transformer.ff_out.weight" in load_file(tmp_path / "model.safetensors")) != tied
    assert reloaded.config.tie_word_embeddings == tied


def test_the_rotary_frequencies_are_right_after_loading_and_after_a_change_of_dtype():
    """They are not in the checkpoint, and loading starts on the meta device."""
    model = D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny")
    expected = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    for _ in range(2):
        rotary = model.model.rotary_emb
        torch.testing.assert_close(rotary.inv_freq, expected)
        torch.testing.assert_close(rotary.original_inv_freq, expected)
        model = model.to(torch.bfloat16)
    loaded = D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny", dtype=torch.bfloat16)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, expected)


def test_dispatch_by_a_device_map_gives_the_same_logits():
    pytest.importorskip("accelerate")
    ids = random_ids(1, 6)
    dispatched = D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny", device_map={"": "cpu"})
    assert dispatched(ids).logits.equal(D2FLLaDAForBlockDiffusion.from_pretrained(GOLDEN / "llada_tiny")(ids).logits)


def test_another_rope_type_scales_the_frequencies(tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model(rope_parameters=linear)
    plain = tiny_model(rope_theta=10000.0)
    ids = random_ids(1, 6)
    expected = plain(ids, position_ids=torch.arange(6)[None] / 2).logits
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    assert D2FLLaDAForBlockDiffusion.from_pretrained(tmp_path)(ids).logits.equal(model(ids).logits)


def test_a_model_in_bfloat16_stays_close_to_float32():
    model, ids = model_with("sdpa"), random_ids(1, 8)
    low = copy.deepcopy(model).to(torch.bfloat16)
    logits, expected = low(ids).logits, model(ids).logits
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
    output = low.generate(ids, max_new_tokens=6, return_dict_in_generate=True)
    assert output.num_forward_passes.item() <= 6


def test_new_weights_are_initialised_by_the_config():
    weights = D2FLLaDAForBlockDiffusion(tiny_config(initializer_range=0.5)).state_dict()
    assert weights["model.transformer.wte.weight"].std() == pytest.approx(0.5, rel=0.1)
    assert weights["model.transformer.blocks.1.ff_out.weight"].std() == pytest.approx(0.5, rel=0.1)
    assert (weights["model.transformer.ln_f.weight"] == 1).all()


def test_the_base_model_gives_the_hidden_states_before_the_head():
    model, ids = model_with("sdpa"), random_ids(1, 5)
    assert isinstance(model.base_model, D2FLLaDAModel)
    hidden = model.model(ids).last_hidden_state
    assert model.get_output_embeddings()(hidden).equal(model(ids).logits)


# ---- names that other libraries go by ----


def matches(pattern: str, names: list[str]) -> list[str]:
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in names if regex.fullmatch(name)]


def test_the_parallel_plans_name_modules_that_exist_and_cover_every_projection():
    model = model_with("sdpa")
    names = [name for name, _ in model.named_modules()]
    planned = set()
    for pattern in model.config.base_model_tp_plan:
        found = matches(f"model.{pattern}", names)
        assert len(found) == model.config.n_layers, pattern
        planned.update(found)
    for pattern in model._tp_plan:
        assert matches(pattern, names), pattern
        planned.update(matches(pattern, names))
    assert planned == {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for pattern in model.config.base_model_fsdp_plan:
        assert matches(f"model.{pattern}", names), pattern
    assert set(model._no_split_modules) == {type(model.model.transformer.blocks[0]).__name__}
