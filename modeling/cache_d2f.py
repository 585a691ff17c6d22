"""The key/value cache of pipelined decoding. A token's slot is its position in its row, padding left out.

The decoding loop feeds each row from its own offset: blocks that are final but not yet in the cache, then the blocks
in flight. All of them write their keys and values to their slots. What belongs to a block in flight is overwritten by
the next step, which feeds that block again; what belongs to a final block stays. So "committing" a block needs no
copy: the loop just stops feeding it.
"""

# B rows of the cache, A rows of a forward, H key/value heads, Q fed tokens, S slots, D head dimension

from typing import NamedTuple, TypeGuard

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.utils import is_torchdynamo_compiling

CHUNK = 256  # slots that a growing cache gets at a time
PADDING = -1  # the slot that padding writes to, which nobody reads


class Window(NamedTuple):
    """Where a forward writes, and how much of the cache it reads: see [`D2FCache.set_window`]."""

    write_slots: torch.LongTensor
    read_length: int
    is_packed: bool


class D2FCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, `(B, 1 + S, H, D)` each: the first slot is for padding, token i is in slot i + 1.

    Tokens come before heads, so that writing moves whole tokens; what is read is a view `(A, H, S, D)`.
    """

    is_sliding = False

    def __init__(self):
        super().__init__()
        self.capacity = (0, 0)  # B, S
        self.write_index: torch.LongTensor | None = None  # (A * Q,), into the (B * (1 + S)) tokens of the cache
        self.num_rows = 0
        self.read_length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        num_rows, num_slots = self.capacity
        # Zeros rather than uninitialised memory: a masked slot has weight 0, and 0 times NaN would be NaN.
        self.keys, self.values = (
            states.new_zeros(num_rows, 1 + num_slots, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True
        self._keep_addresses()

    def _keep_addresses(self) -> None:
        # A CUDA graph may then write to them; without, it would get a copy.
        if self.device.type != "cpu" and not is_torchdynamo_compiling():
            torch._dynamo.mark_static_address(self.keys)
            torch._dynamo.mark_static_address(self.values)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Makes room for `num_rows` rows of `num_slots` tokens; what is there stays."""
        self.capacity = (num_rows, num_slots)
        if self.is_initialized:
            old_rows, old_slots = self.keys.shape[:2]
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(num_rows, 1 + num_slots, *old.shape[2:])
                new[:old_rows, :old_slots] = old
                setattr(self, name, new)
            self._keep_addresses()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values `(A, H, Q, D)` of the fed tokens to their slots; returns what may be read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        index = self.write_index.to(key_states.device)
        return self._write(self.keys, key_states, index), self._write(self.values, value_states, index)

    def _write(self, cached: torch.Tensor, states: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
        """Writes `states` `(A, H, Q, D)` to `cached`; returns what may be read of it, `(A, H, S, D)`."""
        cached.flatten(0, 1).index_copy_(0, index, states.transpose(1, 2).flatten(0, 1))
        readable = cached if self.num_rows == len(cached) else cached.narrow(0, 0, self.num_rows)
        return readable.narrow(1, 1, self.read_length).transpose(1, 2)

    def move_rows(self, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        """Copies the rows `sources` over the rows `targets`, `(N,)` each."""
        if self.is_initialized:
            sources, targets = sources.to(self.device), targets.to(self.device)
            self.keys[targets] = self.keys[sources]
            self.values[targets] = self.values[sources]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.read_length, 0

    def get_seq_length(self) -> int:
        return self.read_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.capacity[1]

    # transformers before 5.20 calls it by this name.
    get_max_cache_shape = get_max_length


class D2FCache(Cache):
    """A cache whose rows are filled at their own pace, and which can get further rows and move them.

    Args:
        num_layers (`int`): Layers of the model.
        max_length (`int`, *optional*): Tokens that the longest row can hold, if that is known. Memory is taken for as
            many as have been fed, in chunks.
        device (`torch.device`, *optional*): The model's. A window on the host is copied there without waiting.
    """

    def __init__(self, num_layers: int, max_length: int | None = None, device: torch.device | None = None):
        super().__init__(layers=[D2FCacheLayer() for _ in range(num_layers)])
        self.max_length = max_length
        self.window_device = device
        self.window: Window | None = None
        # With packed tokens: where each of them is in the flattened window, `(T,)`; and which of them each position of
        # the flattened window holds, `(A * Q,)`, 0 for padding.
        self.index_in_window: torch.LongTensor | None = None
        self.index_in_packed: torch.LongTensor | None = None

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Makes room for `num_rows` rows of `num_slots` tokens at once, where there is less."""
        old_rows, old_slots = self.layers[0].capacity
        if num_rows > old_rows or num_slots > old_slots:
            for layer in self.layers:
                layer.reserve(max(num_rows, old_rows), max(num_slots, old_slots))

    @property
    def is_packed(self) -> bool:
        """Whether the next forward gets its tokens packed."""
        return self.window is not None and self.window.is_packed

    def set_window(self, write_slots: torch.LongTensor, read_length: int, is_packed: bool = False) -> None:
        """Says where the next forward writes and how much of the cache it reads.

        Args:
            write_slots (`torch.LongTensor` of shape `(A, Q)`): Slot of each fed token of the cache's first A rows;
                `PADDING` (-1) for padding.
            read_length (`int`): The forward sees the slots `0 .. read_length - 1`.
            is_packed (`bool`): The forward gets the T tokens that are no padding as one row, `(1, T)`. Only attention
                has them in rows: see [`D2FCache.as_rows`].
        """
        self.window = Window(write_slots, read_length, is_packed)
        num_slots = self.layers[0].capacity[1]
        if read_length > num_slots:
            num_slots = (read_length + CHUNK - 1) // CHUNK * CHUNK
            if self.max_length is not None:
                num_slots = max(read_length, min(num_slots, self.max_length))
        self.reserve(len(write_slots), num_slots)
        step = 1 + num_slots  # from a row's first slot, which is for padding, to the next row's
        first = torch.arange(1, 1 + len(write_slots) * step, step, device=write_slots.device)
        index = (write_slots + first[:, None]).flatten()
        self.index_in_window = self.index_in_packed = None
        if is_packed:
            is_fed = (write_slots != PADDING).flatten()
            index_in_window = is_fed.nonzero().squeeze(1)
            index = index[index_in_window]
            self.index_in_window = index_in_window.to(self.window_device, non_blocking=True)
            self.index_in_packed = (is_fed.cumsum(0) - 1).clamp(min=0).to(self.window_device, non_blocking=True)
        index = index.to(self.window_device, non_blocking=True)
        num_rows = len(write_slots)
        for layer in self.layers:
            layer.write_index, layer.num_rows, layer.read_length = index, num_rows, read_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys and values `(A, H, Q, D)` that a layer fed to their slots; returns what may be read."""
        return self.layers[layer_idx].update(key_states, value_states)

    def as_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Packed `states` `(1, H, T, D)` in the rows of the window, `(A, H, Q, D)`. Padding gets arbitrary states."""
        index = self.index_in_packed.to(states.device)
        rows = states[0].transpose(0, 1).index_select(0, index)  # [A * Q, H, D]
        return rows.unflatten(0, self.window.write_slots.shape).transpose(1, 2)

    def as_packed(self, states: torch.Tensor) -> torch.Tensor:
        """The `states` `(A, Q, H, D)` of the window's rows without those of padding, `(1, T, H, D)`."""
        return states.flatten(0, 1).index_select(0, self.index_in_window.to(states.device))[None]

    def move_rows(self, sources: torch.LongTensor, targets: torch.LongTensor) -> None:
        """Copies the rows `sources` over the rows `targets`, `(N,)` each."""
        self.reserve(int(targets.max()) + 1, 0)
        for layer in self.layers:
            layer.move_rows(sources, targets)


def has_packed_tokens(cache: Cache | None) -> TypeGuard[D2FCache]:
    """Whether the next forward with this `cache` gets its tokens packed.

    The class of the cache may be from another copy of this code: a checkpoint's drafter and a verifier of the package
    work together.
    """
    return getattr(cache, "is_packed", False)
