# SPDX-License-Identifier: Apache-2.0
"""The states of a layer's requests: a pool for the convolution, one for the recurrence, records for speculation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._validate import MAX_SPEC_COLUMNS, describe, packed_slots, tensor
from ..records import ReplayRecords
from .params import check_heads, conv_channels

Slots = Sequence[int] | Tensor


@dataclass(frozen=True)
class GDNSnapshot:
    """Copies of some requests' states, as :meth:`GDNStateCache.restore` takes them.

    Attributes:
        conv_states: [n, C, W - 1], the last raw inputs of the convolution.
        state: [n, HV, K, V] ([n, HV, V, K] with ``state_v_first``), in the pool's dtype.
        state_v_first: the layout of ``state``.
    """

    conv_states: Tensor
    state: Tensor
    state_v_first: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of both tensors."""
        return self.conv_states.nbytes + self.state.nbytes


class GDNStateCache:
    """Hold what a layer remembers of each request, in slots.

    One slot holds a request's last W - 1 raw inputs of the convolution and its recurrent state. To take back rejected
    draft tokens there are two forms. *Several slots*: a request owns S slots, and the state after each token of a
    step is stored in one of its own. *Replay* (``replay=True``): a request owns one slot, and records of what the
    step's tokens did to its state, from which the next step applies the accepted ones.

    Args:
        num_slots: P. With several slots a speculating request needs S of them.
        num_key_heads, num_value_heads: H and HV.
        head_k_dim, head_v_dim: K and V.
        dtype: of the activations, and so of the convolution's inputs.
        conv_width: W.
        state_dtype: of the recurrent states: fp32, bf16 or fp16.
        S: most tokens of a speculative row in one step (draft tokens + 1), up to 16; 1 without speculation.
        replay: keep records instead of several states.
        state_v_first: lay states out as [HV, V, K] instead of [HV, K, V].
        null_slot: a slot that stands for no request, as a negative one always does.
        device: where the tensors live.

    Attributes:
        conv_states: [P, C, W + S - 2], channels fastest in memory.
        state: [P, HV, K, V], or [P, HV, V, K].
        records: a :class:`ReplayRecords`, or None.

    Example:
        >>> import torch, gdn_core
        >>> cache = gdn_core.GDNStateCache(8, 2, 4, 16, 16, torch.bfloat16)
        >>> cache.state.shape, cache.conv_states.shape
        (torch.Size([8, 4, 16, 16]), torch.Size([8, 128, 3]))
    """

    def __init__(
        self,
        num_slots: int,
        num_key_heads: int,
        num_value_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        dtype: torch.dtype,
        *,
        conv_width: int = 4,
        state_dtype: torch.dtype = torch.float32,
        S: int = 1,
        replay: bool = False,
        state_v_first: bool = False,
        null_slot: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_heads(num_key_heads, num_value_heads)
        _check_columns(S)
        channels = conv_channels(num_key_heads, num_value_heads, head_k_dim, head_v_dim)
        inner = (head_v_dim, head_k_dim) if state_v_first else (head_k_dim, head_v_dim)
        conv_states = torch.zeros(num_slots, conv_width + S - 2, channels, dtype=dtype, device=device).mT
        state = torch.zeros(num_slots, num_value_heads, *inner, dtype=state_dtype, device=device)
        records = None
        if replay:
            sizes = (num_slots, S, num_key_heads, num_value_heads, head_k_dim, head_v_dim)
            records = ReplayRecords(*sizes, dtype, device)
        self._set(conv_states, state, records, conv_width, state_v_first, null_slot)

    def _set(
        self,
        conv_states: Tensor,
        state: Tensor,
        records: ReplayRecords | None,
        conv_width: int,
        state_v_first: bool,
        null_slot: int | None,
    ) -> None:
        self.conv_states, self.state, self.records = conv_states, state, records
        self.conv_width, self.state_v_first, self.null_slot = conv_width, state_v_first, null_slot
        self.S: int = conv_states.shape[2] - conv_width + 2
        self._fits: tuple[Any, ...] = ()

    @classmethod
    def from_tensors(
        cls,
        conv_states: Tensor,
        state: Tensor,
        records: ReplayRecords | None = None,
        *,
        conv_width: int = 4,
        state_v_first: bool = False,
        null_slot: int | None = None,
    ) -> GDNStateCache:
        """Wrap the pools that an engine has allocated, without copying them.

        Args:
            conv_states: [P, C, state_len]; any strides. S is state_len - W + 2.
            state: [P, HV, K, V], or [P, HV, V, K] with ``state_v_first``; slots may lie apart, their inside is packed.
            records: the records of the same P slots, for the replay form.
        """
        tensor("conv_states", conv_states, ["P", "C", "state_len"])
        tensor(
            "state", state, [conv_states.shape[0], "HV", "V" if state_v_first else "K", "K" if state_v_first else "V"]
        )
        packed_slots("state", state)
        columns = conv_states.shape[2] - conv_width + 2
        if columns < 1:
            raise ValueError(
                f"conv_states: expected a state_len of at least {conv_width - 1}, got {conv_states.shape[2]}"
            )
        if records is not None:
            columns = records.k.shape[1]
            needed = conv_width + columns - 2
            if conv_states.shape[2] < needed:
                raise ValueError(
                    f"conv_states: expected a state_len of at least {needed} for records of {columns} tokens, got "
                    f"{conv_states.shape[2]}"
                )
            tensor("records.live", records.live, [conv_states.shape[0]], (torch.int32,))
        cache = cls.__new__(cls)
        cache._set(conv_states, state, records, conv_width, state_v_first, null_slot)
        cache.S = min(columns, MAX_SPEC_COLUMNS)
        return cache

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Return P, the slots of each pool."""
        return self.state.shape[0]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pools together."""
        records = 0 if self.records is None else self.records.nbytes
        return self.conv_states.nbytes + self.state.nbytes + records

    @classmethod
    def slots_for_budget(cls, num_bytes: int, *sizes: Any, **options: Any) -> int:
        """Return how many slots of one layer fit into ``num_bytes``.

        Args:
            num_bytes: the memory there is.
            sizes, options: the constructor's arguments after ``num_slots``.

        Example:
            >>> import torch, gdn_core
            >>> gdn_core.GDNStateCache.slots_for_budget(2**30, 16, 32, 128, 128, torch.bfloat16)
            500
        """
        return num_bytes // cls(1, *sizes, **{**options, "device": "meta"}).nbytes

    # --- which layer it belongs to, so that only the first call has to find out ---------------------------------------

    def is_known_to_fit(self, layer: object) -> bool:
        """Say whether this layer was checked against these very pools."""
        known = self._fits
        return (
            len(known) == 4
            and known[0]() is layer
            and known[1] is self.state
            and known[2] is self.conv_states
            and known[3] is self.records
        )

    def remember_to_fit(self, layer: object) -> None:
        """Note that this layer was checked against these pools."""
        self._fits = (weakref.ref(layer), self.state, self.conv_states, self.records)

    # --- slots --------------------------------------------------------------------------------------------------------

    def _indices(self, name: str, slots: Slots) -> Tensor:
        """Return slots [n] as an int64 tensor beside the pools; they have to lie inside, padding has no place here."""
        indices = torch.as_tensor(slots, dtype=torch.int64).reshape(-1)
        if indices.numel() > 0 and indices.device.type != "meta":
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= self.num_slots:
                raise IndexError(
                    f"{name}: expected slots from 0 to {self.num_slots - 1}, got {low if low < 0 else high}"
                )
        return indices.to(self.state.device)

    def reset(self, slots: Slots) -> None:
        """Zero everything that ``slots`` hold, as for requests that have seen no token."""
        indices = self._indices("slots", slots)
        self.conv_states.index_fill_(0, indices, 0)
        self.state.index_fill_(0, indices, 0)
        if self.records is not None:
            self.records.live.index_fill_(0, indices, 0)

    def copy(self, src: Slots, dst: Slots) -> None:
        """Copy whole slots, ``src[i]`` to ``dst[i]``, as for requests that fork; all are read before one is written."""
        source, target = self._indices("src", src), self._indices("dst", dst)
        if source.shape != target.shape:
            raise ValueError(f"dst: expected {source.numel()} slots, as src has, got {target.numel()}")
        pools = [self.conv_states, self.state]
        if self.records is not None:
            pools += [self.records.k, self.records.u, self.records.decay, self.records.live]
        for pool in pools:
            pool.index_copy_(0, target, pool.index_select(0, source))

    def commit(self, slots: Slots, num_accepted_tokens: Slots) -> None:
        """End the speculation of some requests: what they accepted becomes their plain state, in one slot.

        Afterwards a request goes on from its first slot as if it had never speculated: decoding, prefilling,
        snapshots. A plain row that follows a speculative one without this would resume from the wrong state.

        Args:
            slots: [n, S], each request's row of the speculative table; [n] in the replay form.
            num_accepted_tokens: [n], tokens accepted in the last step; 0 acts as 1.

        Raises:
            ValueError, IndexError: counts beyond S (or beyond the live records), slots beyond the pools.
        """
        table = torch.as_tensor(slots, dtype=torch.int64)
        if table.dim() != (1 if self.records is not None else 2):
            wanted = "[n] in the replay form" if self.records is not None else "[n, S], a table"
            raise ValueError(f"slots: expected {wanted}, got {describe(table)}")
        accepted = torch.as_tensor(num_accepted_tokens, dtype=torch.int64)
        tensor("num_accepted_tokens", accepted, [table.shape[0]], (torch.int64,))
        if table.shape[0] == 0:
            return
        columns = self.S if self.records is not None else table.shape[1]
        if int(accepted.min()) < 0 or int(accepted.max()) > min(columns, self.S):
            raise ValueError(
                f"num_accepted_tokens: expected values in [0, {min(columns, self.S)}], got {accepted.tolist()}"
            )
        accepted = accepted.clamp(min=1)
        if self.records is None:
            first = self._indices("slots", table[:, 0])
            source = self._indices("slots", table.gather(1, accepted[:, None] - 1))
            self.state.index_copy_(0, first, self.state.index_select(0, source))
        else:
            first = self._indices("slots", table)
            self.records.flush(
                self.state,
                first,
                accepted.to(first.device),
                use_qk_l2norm_in_kernel=True,
                state_v_first=self.state_v_first,
            )
        self._shift_inputs(first, accepted.to(first.device))

    def _shift_inputs(self, slots: Tensor, accepted: Tensor) -> None:
        """Bring the W - 1 inputs before the next token to the front of each slot."""
        width = self.conv_width - 1
        columns = accepted[:, None] - 1 + torch.arange(width, device=slots.device)
        held = self.conv_states.index_select(0, slots)
        history = held.gather(2, columns[:, None].expand(-1, held.shape[1], -1))
        self.conv_states[:, :, :width].index_copy_(0, slots, history)

    # --- prefix caching -----------------------------------------------------------------------------------------------

    def snapshot(self, slots: Slots) -> GDNSnapshot:
        """Copy the states of ``slots`` out of the pools, for a prefix cache or another device.

        Raises:
            ValueError: a slot has live records: :meth:`commit` first.
        """
        indices = self._indices("slots", slots)
        self._require_plain("slots", indices)
        return GDNSnapshot(
            self.conv_states[:, :, : self.conv_width - 1].index_select(0, indices),
            self.state.index_select(0, indices),
            self.state_v_first,
        )

    def restore(self, snapshot: GDNSnapshot, slots: Slots) -> None:
        """Put the states of a snapshot, also of a cache of the other layout, into ``slots``."""
        indices = self._indices("slots", slots).to(self.state.device)
        count = indices.numel()
        tensor("snapshot.conv_states", snapshot.conv_states, [count, self.conv_states.shape[1], self.conv_width - 1])
        state = snapshot.state if snapshot.state_v_first == self.state_v_first else snapshot.state.mT
        tensor("snapshot.state", state, [count, *self.state.shape[1:]])
        self.conv_states[:, :, : self.conv_width - 1].index_copy_(
            0, indices, _like(snapshot.conv_states, self.conv_states)
        )
        self.state.index_copy_(0, indices, _like(state, self.state))
        if self.records is not None:
            self.records.live.index_fill_(0, indices, 0)

    def _require_plain(self, name: str, indices: Tensor) -> None:
        if self.records is not None and bool((self.records.live.index_select(0, indices) > 0).any()):
            raise ValueError(
                f"{name}: expected slots without live records, call commit() first; got {indices.tolist()}"
            )

    def convert_layout(self, *, state_v_first: bool) -> GDNStateCache:
        """Return a cache of the same contents whose states are laid out as asked: transposed, never reinterpreted.

        The other pools are shared with this cache, and so is the state where it is laid out so already.
        """
        state = self.state if state_v_first == self.state_v_first else self.state.mT.contiguous()
        cache = GDNStateCache.__new__(GDNStateCache)
        cache._set(self.conv_states, state, self.records, self.conv_width, state_v_first, self.null_slot)
        cache.S = self.S
        return cache

    def __repr__(self) -> str:
        form = f"S={self.S}, {'replay' if self.records is not None else 'several slots'}" if self.S > 1 else "S=1"
        return (
            f"GDNStateCache({self.num_slots} slots, state={describe(self.state)}, "
            f"conv_states={describe(self.conv_states)}, {form}, state_v_first={self.state_v_first}, "
            f"null_slot={self.null_slot}, device={str(self.state.device)!r}, nbytes={self.nbytes})"
        )


def _check_columns(S: int) -> None:
    if not 1 <= S <= MAX_SPEC_COLUMNS:
        raise ValueError(f"S: expected 1 to {MAX_SPEC_COLUMNS}, got {S}")


def _like(value: Tensor, pool: Tensor) -> Tensor:
    return value.to(pool.device, pool.dtype)
