"""The key/value cache of pipelined decoding. A token's slot is its position in its row, padding left out.

The decoding loop feeds each row from its own offset: blocks that are final but not yet in the cache, then the blocks
in flight. All of them write their keys and values to their slots. What belongs to a block in flight is overwritten by
the next step, which feeds that block again; what belongs to a final block stays. So "committing" a block needs no
copy: the loop just stops feeding it.
"""

# B batch, H key/value heads, Q fed tokens, S slots, D head dimension

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class D2FCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, preallocated, `(B, H, S, D)` each."""

    is_sliding = False

    def __init__(self, num_slots: int):
        super().__init__()
        self.num_slots = num_slots
        self.write_slots: torch.LongTensor | None = None
        self.read_length = num_slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        batch_size, num_heads, _, _ = key_states.shape
        # Zeros rather than uninitialised memory: a masked slot has weight 0, and 0 times NaN would be NaN.
        self.keys = key_states.new_zeros(batch_size, num_heads, self.num_slots, key_states.shape[-1])
        self.values = value_states.new_zeros(batch_size, num_heads, self.num_slots, value_states.shape[-1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values of the fed tokens to their slots; returns the slots that may be read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.write_slots.to(key_states.device)[:, None, :, None]  # [B, 1, Q, 1]
        self.keys.scatter_(2, slots.expand_as(key_states), key_states)
        self.values.scatter_(2, slots.expand_as(value_states), value_states)
        return self.keys[:, :, : self.read_length], self.values[:, :, : self.read_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.read_length, 0

    def get_seq_length(self) -> int:
        return self.read_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.num_slots

    # transformers before 5.20 calls it by this name.
    get_max_cache_shape = get_max_length


class D2FCache(Cache):
    """A cache whose rows are filled at their own pace.

    Args:
        num_layers (`int`): Layers of the model.
        max_length (`int`): Tokens that the longest row can hold. One more slot takes what padding writes.
    """

    def __init__(self, num_layers: int, max_length: int):
        super().__init__(layers=[D2FCacheLayer(max_length + 1) for _ in range(num_layers)])
        self.padding_slot = max_length

    def set_window(self, write_slots: torch.LongTensor, read_length: int) -> None:
        """Says where the next forward writes and how much of the cache it reads.

        Args:
            write_slots (`torch.LongTensor` of shape `(B, Q)`): Slot of each fed token; `padding_slot` for padding.
            read_length (`int`): The forward sees the slots `0 .. read_length - 1`.
        """
        for layer in self.layers:
            layer.write_slots, layer.read_length = write_slots, read_length
