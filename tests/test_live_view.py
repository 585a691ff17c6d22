"""What a response looks like while it is decoded, against what its trace says afterwards."""

import time

import pytest
import torch

from d2f_hf.live_view import COMMITTED, DRAFT, FULLY_ACTIVATED, SEMI_ACTIVATED, VERIFIED, LiveResponse
from tiny_models import EOS, MASK, ScriptedModel, sure_of, tiny_model

PROMPT = torch.tensor([[0] * 3])
FULL = {"return_dict_in_generate": True, "output_trace": True}


def scripted() -> ScriptedModel:
    """Two tokens of the first block are decoded late, so that the blocks after it are in flight."""
    late = dict.fromkeys(range(4, 6), 3) | {9: 2}
    return ScriptedModel(sure_of([0] * 3 + list(range(1, 15)) + [EOS] * 20, {k + 3: v for k, v in late.items()}))


def watched(model, **options):
    """The cells after each forward, and the output."""
    frames = []
    response = LiveResponse.of(model, options)
    response.changed = lambda: frames.append(list(response.cells()))
    output = model.generate(PROMPT, streamer=response, **options, **FULL)
    return response, frames, output


def expected_frames(output, block_size, threshold):
    """By the trace alone: token by position, and state by block, after each forward."""
    decoded, frames = {}, []
    for step in output.trace[0]:
        decoded |= {position - 3: token for position, token in step["accepted"]}
        end = step["window_start"] + step["window_length"] - 3
        ends = [k for k, token in decoded.items() if token == EOS]
        end = min([end, *(k + 1 for k in ends)])
        states = {}
        for index in range(end):
            block = index // block_size
            before = range((block - 1) * block_size, block * block_size)
            ratio = 1.0 if block == 0 else sum(k in decoded for k in before) / block_size
            is_committed = (block + 1) * block_size <= step["committed_length"] - 3
            state = FULLY_ACTIVATED if ratio >= threshold else SEMI_ACTIVATED
            states[index] = (decoded.get(index, MASK), COMMITTED if is_committed else state)
        frames.append(states)
    return frames


@pytest.mark.parametrize("threshold", [0.5, 0.95])
def test_tokens_and_states_are_those_of_the_trace(threshold):
    options = {"block_size": 4, "max_new_tokens": 20, "block_activation_threshold": threshold}
    response, frames, output = watched(scripted(), **options)
    expected = expected_frames(output, 4, threshold)
    assert len(frames) == len(expected) + 1
    for cells, states in zip(frames, expected, strict=False):
        assert {k: (cell.token, cell.state) for k, cell in enumerate(cells)} == states
        assert all(cell.is_masked == (cell.token == MASK) for cell in cells)
    seen = {state for states in expected for _, state in states.values()}
    assert seen == {COMMITTED, FULLY_ACTIVATED, *([SEMI_ACTIVATED] if threshold > 0.5 else [])}
    assert {cell.state for cell in frames[-1]} == {COMMITTED}
    assert response.decoded == output.sequences[0, 3:].tolist()
    assert response.num_forward_passes == output.num_forward_passes[0]
    assert response.tokens_per_forward == pytest.approx(float(output.tokens_per_forward[0]))


def test_confidences_are_those_that_tokens_were_accepted_with():
    response, frames, _ = watched(scripted(), block_size=4, max_new_tokens=20)
    told = {}
    for step in response.trace:
        told |= {p - 3: c for (p, _), c in zip(step["accepted"], step["confidence"], strict=True)}
    assert [cell.confidence for cell in frames[-1]] == [told[k] for k in range(len(frames[-1]))]
    assert all(cell.confidence is None for cells in frames for cell in cells if cell.is_masked)


def test_without_a_trace_what_is_whole_counts_as_committed():
    model, frames = scripted(), []
    options = {"block_size": 4, "max_new_tokens": 20}
    response = LiveResponse.of(model, options)
    response.changed = lambda: frames.append(list(response.cells()))
    model.generate(PROMPT, streamer=response, **options)
    assert response.tokens_per_forward is None and response.trace == []
    for cells in frames[:-1]:
        masked = [cell.block for cell in cells if cell.is_masked]
        for cell in cells:
            assert (cell.state == COMMITTED) == (cell.block < min(masked, default=cell.block + 1))


def test_blocks_may_begin_in_the_prompt():
    response = LiveResponse(MASK, block_size=4, is_sequence_aligned=True)
    response.put(torch.tensor([[1, 2, 3, 4, 5, 6]]))  # two tokens in the second block
    response.put_draft(torch.tensor([MASK, 1, MASK, MASK]))
    assert [cell.block for cell in response.cells()] == [0, 0, 1, 1]
    assert [cell.state for cell in response.cells()] == [FULLY_ACTIVATED] * 2 + [SEMI_ACTIVATED] * 2


def test_verified_decoding_has_drafts_and_what_is_verified():
    model = tiny_model(right_shift_logits=True)
    model.config.has_causal_mode = True
    response, frames, output = watched(model, decoding="verified", max_new_tokens=20, draft_length=4)
    known, drafts = 0, 0
    for step, cells in zip(output.trace[0], frames, strict=False):
        known = min(known + len(step["accepted"]), len(output.sequences[0]) - 3)
        drafted = [token for _, token in step["drafted"]]
        assert [cell.state for cell in cells] == [VERIFIED] * known + [DRAFT] * len(drafted)
        assert [cell.token for cell in cells[known:]] == drafted
        drafts += len(drafted)
    assert drafts > 0


def test_a_response_can_be_seen_as_it_was():
    response, frames, _ = watched(scripted(), block_size=4, max_new_tokens=20)
    assert list(response.at(-1.0).cells()) == []
    then = response.at(response.seconds)
    assert list(then.cells()) == frames[-1] and then.seconds == pytest.approx(response.seconds)
    seen = [list(response.at(response.seconds * k / 5000).cells()) for k in range(5001)]
    kept = [cells for k, cells in enumerate(seen) if k == 0 or cells != seen[k - 1]]
    assert frames[0] in kept and frames[-1] == kept[-1]


def test_time_that_is_spent_on_drawing_is_no_part_of_the_speed():
    model, drawn = scripted(), []
    response = LiveResponse.of(model, {"block_size": 4}, changed=lambda: (drawn.append(1), time.sleep(0.05)))
    start = time.perf_counter()
    response.start()
    model.generate(PROMPT, block_size=4, max_new_tokens=20, streamer=response, **FULL)
    whole = time.perf_counter() - start
    assert len(drawn) > 3 and response.seconds <= whole - 0.05 * (len(drawn) - 1)
    assert response.tokens_per_second == pytest.approx(response.num_tokens / response.seconds)
