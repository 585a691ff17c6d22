"""Reading a checkpoint's files. What is refused about them is in `test_loading.py`."""

import torch
from safetensors.torch import save_file

from d2f_hf.checkpoint_files import checked_headers, find_file, read_json


def test_rotary_frequencies_of_old_checkpoints_are_overlooked_and_nothing_else_is(tmp_path):
    """Llama 2 checkpoints hold a buffer per layer that newer ones do not have."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    file = str(tmp_path / "model.safetensors")
    save_file({"a": torch.ones(2), name: torch.ones(4)}, file)
    found = checked_headers([file], {"a": torch.ones(2)}, tied={}, way_out="")
    assert set(found) == {"a"}


def test_a_file_that_is_not_there_is_none(tmp_path):
    (tmp_path / "here.json").write_text("{}")
    assert find_file(tmp_path, "there.json", {}) is None
    assert read_json(find_file(tmp_path, "here.json", {})) == {}
