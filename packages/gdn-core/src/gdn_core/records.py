# SPDX-License-Identifier: Apache-2.0
"""The records that let a speculative step keep one state per request and replay the accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._validate import dense_tensor, has_data, tensor, updatable


class ReplayRecords:
    """Hold what each token of the last step did to the state of its slot.

    A token acts on a state `M` only through `M <- decay * M + outer(k, u)`, so that the accepted prefix of a step can
    be replayed later from these three, without storing a state per draft token. All tensors are zero at first.

    Args:
        num_slots: slots of the state pool, `P`.
        S: most tokens of a row in one step (draft tokens + 1).
        H, HV: key heads and value heads.
        K, V: key and value dimensions.
        dtype: activation dtype, in which the raw keys are kept.
        device: where the tensors live.

    Attributes:
        k: raw keys, before any normalisation, `[P, S, H, K]` in the activation dtype.
        u: `beta * (v - k @ M)` of each token, fp32 `[P, S, HV, V]`.
        decay: `exp(g)` of each token, fp32 `[P, S, HV]`.
        live: how many records of a slot are valid, int32 `[P]`.

    With float64 activations `u` and `decay` are float64 too.

    Example:
        >>> records = ReplayRecords(num_slots=4, S=3, H=2, HV=4, K=16, V=8, dtype=torch.bfloat16)
        >>> records.u.shape
        torch.Size([4, 3, 4, 8])
    """

    k: Tensor
    u: Tensor
    decay: Tensor
    live: Tensor

    def __init__(
        self,
        num_slots: int,
        S: int,
        H: int,
        HV: int,
        K: int,
        V: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        accumulator = torch.float64 if dtype == torch.float64 else torch.float32
        self.k = torch.zeros(num_slots, S, H, K, dtype=dtype, device=device)
        self.u = torch.zeros(num_slots, S, HV, V, dtype=accumulator, device=device)
        self.decay = torch.zeros(num_slots, S, HV, dtype=accumulator, device=device)
        self.live = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @classmethod
    def from_tensors(cls, k: Tensor, u: Tensor, decay: Tensor, live: Tensor) -> ReplayRecords:
        """Wrap tensors laid out as the attributes are, without copying them."""
        records = cls.__new__(cls)
        records.k, records.u, records.decay, records.live = k, u, decay, live
        return records

    def reset(self, slots: Tensor | None = None) -> None:
        """Forget the records of `slots` (every slot when None), as whoever reuses a slot must do.

        Only `live` is zeroed: a record beyond it is never read. Slots are int32 or int64; negative ones are padding.

        Raises:
            IndexError: a slot is `P` or more (on a GPU it is padding, as anywhere).
        """
        if slots is None:
            self.live.zero_()
            return
        self._check_slots(slots, [str(size) for size in getattr(slots, "shape", "N")], None)
        num_slots = self.live.shape[0]
        slots = slots.to(self.live.device, torch.int64).reshape(-1)
        # Padding goes to a spare element: to pick the others a GPU would have to be waited for.
        is_reset = torch.zeros(num_slots + 1, dtype=torch.bool, device=self.live.device)
        is_reset.index_fill_(0, torch.where((slots >= 0) & (slots < num_slots), slots, num_slots), True)
        self.live.masked_fill_(is_reset[:num_slots], 0)

    def flush(
        self,
        state: Tensor,
        slots: Tensor,
        num_accepted_tokens: Tensor | None = None,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        state_v_first: bool = False,
        null_slot: int | None = None,
    ) -> None:
        """Bring the states of `slots` up to their accepted tokens, and forget the records.

        Afterwards a slot holds what plain decode would have left there, bit for bit with an fp32 pool: for a prefix
        cache, or to hand the slot over. A slot without live records stays as it is.

        Args:
            state: pool `[P, HV, K, V]` (`[P, HV, V, K]` with `state_v_first`), updated in place.
            slots: `[N]`, int32 or int64, no slot twice; negative ones, and `null_slot`, are padding.
            num_accepted_tokens: `[N]`, as the next step would be told; 0 acts as 1, None means 1.
            use_qk_l2norm_in_kernel: as in the step that left the records.

        Raises:
            TypeError: an argument is of a wrong type or dtype.
            IndexError: a slot is `P` or more.
            RuntimeError: the pool or the records were made under `torch.inference_mode()`, and this is outside of it.
            ValueError: a wrong shape or device, or more tokens are accepted than a slot has live records; nothing is
                changed.

        Example:
            >>> records = ReplayRecords(num_slots=4, S=3, H=2, HV=4, K=16, V=8, dtype=torch.float32)
            >>> pool = torch.zeros(4, 4, 16, 8)
            >>> records.flush(pool, torch.tensor([1, 2]), torch.tensor([2, 3]))
            >>> records.live.tolist()
            [0, 0, 0, 0]
        """
        from . import ops  # which imports this module

        self._check_flush(state, slots, num_accepted_tokens, null_slot)
        num_rows = len(slots)
        HV, V = self.u.shape[-2:]
        # A step stores the state after the replay, before its own tokens: those of this one never count.
        q = self.k.new_zeros(1, num_rows, *self.k.shape[-2:])
        gates = q.new_zeros(num_rows, HV)
        ops.fused_sigmoid_gating_delta_rule_update_replay(
            gates.new_zeros(HV), gates.new_zeros(HV), q, q, q.new_zeros(1, num_rows, HV, V), gates, gates, state, slots,
            self, num_accepted_tokens, torch.arange(num_rows + 1, device=slots.device), use_qk_l2norm_in_kernel,
            state_v_first=state_v_first, null_slot=null_slot,
        )  # fmt: skip
        self.reset(slots if null_slot is None else slots.masked_fill(slots == null_slot, -1))

    def _check_flush(
        self, state: Tensor, slots: Tensor, num_accepted_tokens: Tensor | None, null_slot: int | None
    ) -> None:
        """Check what the step would report under the name of another argument, or only once the pool has changed."""
        dense_tensor("state", state, ("state", state))
        dense_tensor("slots", slots, ("state", state))
        self._check_slots(slots, ["N"], null_slot)
        if num_accepted_tokens is not None:
            dense_tensor("num_accepted_tokens", num_accepted_tokens, ("state", state))
            tensor("num_accepted_tokens", num_accepted_tokens, [len(slots)], (torch.int32, torch.int64))
        records = {f"records.{name}": getattr(self, name) for name in ("u", "k", "decay", "live")}
        for name, value in ({"state": state} | records).items():
            dense_tensor(name, value, ("state", state))
            updatable(name, value)

    def _check_slots(self, slots: Tensor, shape: Sequence[str], null_slot: int | None) -> None:
        """Check slots; what a GPU holds is not waited for."""
        tensor("slots", slots, shape, (torch.int32, torch.int64))
        if not slots.is_cpu or slots.numel() == 0 or torch.compiler.is_compiling() or not has_data(slots):
            return
        num_slots = self.live.shape[0]
        last = int((slots if null_slot is None else slots.masked_fill(slots == null_slot, -1)).max())
        if last >= num_slots:
            raise IndexError(f"slots: expected slots below {num_slots}, got {last}")

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors together."""
        return sum(x.numel() * x.element_size() for x in (self.k, self.u, self.decay, self.live))

    def __repr__(self) -> str:
        num_slots, S, H, K = self.k.shape
        HV, V = self.u.shape[-2:]
        return (
            f"ReplayRecords(num_slots={num_slots}, S={S}, H={H}, HV={HV}, K={K}, V={V}, "
            f"dtype={self.k.dtype}, device={str(self.k.device)!r}, nbytes={self.nbytes})"
        )
