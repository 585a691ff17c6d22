"""How a loop is run to its end, alone and with other processes."""

import pytest
import torch
from d2f_hf.modeling.decoding_loop import run_to_the_end


class FakeLoop:
    """Takes `num_steps` steps of `forwards_per_step` forwards each."""

    def __init__(self, model, num_steps: int, forwards_per_step: int = 1):
        self.model, self.num_steps, self.forwards_per_step = model, num_steps, forwards_per_step

    def steps(self):
        for _ in range(self.num_steps):
            yield
            for _ in range(self.forwards_per_step):
                self.model(input_ids="of the loop")


class FakePeers:
    """Other processes, the slowest of which takes `num_steps` steps."""

    def __init__(self, num_steps: int):
        self.num_steps, self.asked = num_steps, []

    def __call__(self, is_finished: bool) -> bool:
        self.asked.append(is_finished)
        return not is_finished or len(self.asked) <= self.num_steps


def calls_of(num_steps: int, forwards_per_step: int, peers: FakePeers) -> list:
    calls = []

    def model(input_ids):
        calls.append(input_ids)

    run_to_the_end(FakeLoop(model, num_steps, forwards_per_step), model, torch.device("cpu"), peers)
    return ["of the loop" if call == "of the loop" else call.tolist() for call in calls]


@pytest.mark.parametrize("forwards_per_step", [1, 2])
def test_a_finished_process_calls_the_model_as_long_as_another_one_goes_on(forwards_per_step):
    """With guidance a step has two forwards; a process that called the model once would keep the others waiting."""
    peers = FakePeers(num_steps=5)
    calls = calls_of(2, forwards_per_step, peers)
    assert calls == ["of the loop"] * 2 * forwards_per_step + [[[0]]] * 3 * forwards_per_step
    assert peers.asked == [False] * 2 + [True] * 4


def test_a_process_that_is_the_slowest_calls_nothing_behind_its_last_step():
    peers = FakePeers(num_steps=1)
    assert calls_of(3, 1, peers) == ["of the loop"] * 3
    assert peers.asked == [False, False, False, True]


def test_a_loop_without_steps_takes_part_in_those_of_the_others():
    assert calls_of(0, 1, FakePeers(num_steps=0)) == []
    assert calls_of(0, 2, FakePeers(num_steps=2)) == [[[0]]] * 4
