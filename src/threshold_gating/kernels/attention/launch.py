"""How the Triton kernels of attention are cut into tiles and launched."""

from __future__ import annotations

import math
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threshold_gating.kernels.runtime import interpreting


class Mask(IntEnum):
    """What a mask is."""

    NONE = 0
    KEEP = 1  # boolean
    ADD = 2  # floating point


class Statistics(IntEnum):
    """What is found of rows of logits besides their log-sum-exp."""

    UNASKED = 0
    OTHERS = 1  # the sum of all but the largest: what gates need
    TOP2 = 2


class Blocks(NamedTuple):
    """How a kernel is cut up: rows and keys of a tile, warps, stages, registers of a thread."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int | None = None  # at most; fewer let more programs run beside each other


def blocks(kernel: str, head: int, dtype: torch.dtype, copied: bool = False) -> Blocks:
    """The tiles of a kernel by the padded size of a head; 64 and 128 were swept on an H200, also
    as the copy engine reads them (`copied`): then no thread has addresses to keep."""
    # first, so that the interpreter's tests see a wrong name
    table = _SWEPT[kernel] | (_COPIED.get(kernel, {}) if copied else {})
    if interpreting():
        return Blocks(32, 16, 4, 1)  # small tiles, so that small tests have several
    if dtype == torch.float32:
        return Blocks(64, 32, 4, 2) if head <= 128 else Blocks(32, 16, 4, 2)
    return next((tiles for size, tiles in table.items() if head <= size), Blocks(64, 32, 4, 2))


_SWEPT = {
    "fused": {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 3)},
    "fused with statistics": {64: Blocks(64, 64, 4, 3, 168), 128: Blocks(64, 64, 4, 3)},
    "statistics": {64: Blocks(64, 128, 4, 2), 128: Blocks(64, 128, 4, 2)},
    "others": {64: Blocks(64, 128, 4, 2), 128: Blocks(64, 128, 4, 2)},
    "gates": {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 3)},
    "queries_gradient": {64: Blocks(64, 64, 4, 3), 128: Blocks(128, 64, 8, 3)},
    "keys_gradient": {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 2)},
}
# where they differ
_COPIED = {"fused": {64: Blocks(64, 64, 4, 3, 128)}, "gates": {64: Blocks(64, 64, 4, 3, 168)}}


class Call:
    """The arguments that all kernels of one call share."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        tau: Tensor | None,
        scale: float,
        causal: bool,
    ) -> None:
        self.q, self.k, self.v, self.mask, self.tau, self.scale = q, k, v, mask, tau, scale
        self.group = q.shape[1] // k.shape[1]
        boolean = mask is not None and mask.dtype == torch.bool
        self.kind = Mask.NONE if mask is None else Mask.KEEP if boolean else Mask.ADD
        self.head = max(_padded(q), _padded(v))
        self.copied = self.kind == Mask.NONE and _worth_copying(q, k, v)
        self.flags = {
            "CAUSAL": causal,
            "MASK": int(self.kind),
            "TAU": tau is not None,
            "D": q.shape[-1],
            "DV": v.shape[-1],
            "BLOCK_D": _padded(q),
            "BLOCK_DV": _padded(v),
            "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
            "DOT": _dot_type(q.dtype),
        }

    @property
    def tensors(self) -> tuple[Any, ...]:
        mask = (
            self.mask.view(torch.uint8)
            if self.kind == Mask.KEEP and self.mask is not None
            else self.mask
        )
        return self.q, self.k, self.v, mask, self.tau

    @property
    def strides(self) -> tuple[int, ...]:
        return *_strides(self.q), *_strides(self.k), *_strides(self.v)

    @property
    def mask_strides(self) -> tuple[int, ...]:
        return (0, 0, 0, 0) if self.mask is None else tuple(self.mask.stride())

    @property
    def sizes(self) -> tuple[int, int, float]:
        return self.q.shape[2], self.k.shape[2], self.scale

    def read(self, tiles: Blocks) -> tuple[Any, ...]:
        """`tensors`, those of the copy engine as descriptors of tiles."""
        if not self.copied:
            return self.tensors
        _, _, _, *rest = self.tensors
        q, k, v = self.q, self.k, self.v
        return _described(q, tiles.m), _described(k, tiles.n), _described(v, tiles.n), *rest

    def forward(
        self, out: Tensor | None, lse: Tensor, levels: Tensor | None, index: Tensor | None
    ) -> None:
        from threshold_gating.kernels.attention.forward import forward

        if levels is None:
            name, asked = "fused", Statistics.UNASKED
        elif index is None:
            name, asked = "others", Statistics.OTHERS
        else:
            name, asked = "statistics" if out is None else _BOTH, Statistics.TOP2
        tiles = self._tiles(name)
        forward[self._grid(tiles.m)](
            *(*self.read(tiles), out, lse, levels, index, *self.strides),
            *(_strides(out) if out is not None else (0, 0, 0)),
            *(*self.mask_strides, self.q.shape[1], self.group, *self.sizes),
            VALUES=out is not None,
            STATISTICS=int(asked),
            **self.flags,
            **_tiling(tiles),
        )

    def gates(self, levels: Tensor, out: Tensor) -> None:
        from threshold_gating.kernels.attention.gates import gates

        tiles = self._tiles("gates")
        gates[self._grid(tiles.m)](
            *(*self.read(tiles), levels, out, *self.strides, *_strides(out), *self.mask_strides),
            *(self.q.shape[1], self.group, *self.sizes),
            **self.flags,
            **_tiling(tiles),
        )

    def backward(
        self, do: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from threshold_gating.kernels.attention.backward import keys_gradient, queries_gradient

        q, k, v = self.q, self.k, self.v
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = torch.empty_like(lse[0])
        rows = blocks("queries_gradient", self.head, q.dtype)
        grid = self._grid(rows.m)
        blocks_of_rows = grid[0] if self.tau is not None else 0
        shares = torch.empty((*q.shape[:2], blocks_of_rows), device=q.device)
        queries_gradient[grid](
            *(*self.tensors, out, do, lse, delta, dq, shares, *self.strides, *_strides(out)),
            *(*_strides(do), *_strides(dq), *self.mask_strides, q.shape[1], self.group),
            *self.sizes,
            **self.flags,
            **_tiling(rows),
        )
        columns = blocks("keys_gradient", self.head, q.dtype)
        keys_gradient[(-(-k.shape[2] // columns.n), k.shape[0] * k.shape[1])](
            *(*self.tensors, do, lse, delta, dk, dv, *self.strides, *_strides(do)),
            *(*_strides(dk), *_strides(dv), *self.mask_strides, q.shape[1], *self.sizes),
            GROUP=self.group,
            EVEN=q.shape[2] % columns.m == 0,
            **self.flags,
            **_tiling(columns),
        )
        return dq, dk, dv, shares.sum((0, 2)) if self.tau is not None else shares.flatten()

    def in_logits(self, levels: Tensor) -> Tensor:
        """m1 and m2 of bare products as logits, T as it is."""
        factor: Tensor | float = abs(self.scale)
        if self.kind == Mask.ADD:
            factor = math.log(2)
        elif self.tau is not None:
            factor = factor * self.tau.abs()[:, None]
        return torch.stack([levels[0] * factor, levels[1] * factor, levels[2]])

    def _tiles(self, kernel: str) -> Blocks:
        return blocks(kernel, self.head, self.q.dtype, self.copied)

    def _grid(self, m: int) -> tuple[int, int]:
        return -(-self.q.shape[2] // m), self.q.shape[0] * self.q.shape[1]


_BOTH = "fused with statistics"


def _tiling(tiles: Blocks) -> dict[str, int | None]:
    return {
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": tiles.registers,
    }


def _dot_type(dtype: torch.dtype) -> Any:
    """What products are made of; the interpreter's are wrong in bf16."""
    import triton.language as tl

    if interpreting():
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


def _padded(t: Tensor) -> int:
    return max(16, 1 << (t.shape[-1] - 1).bit_length())


def _strides(t: Tensor) -> tuple[int, ...]:
    return tuple(t.stride()[:3])


ENOUGH_PAIRS = 2**26  # of a query and a key: 70 us of an H200, twice what descriptors take to make


def _worth_copying(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the copy engine can read such tensors and the call is worth their descriptors."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    enough = pairs >= ENOUGH_PAIRS or interpreting()
    return enough and has_copy_engine(q.device) and all(_is_copied(t) for t in (q, k, v))


def _is_copied(t: Tensor) -> bool:
    """16 bits a number, rows of a power of two of them, and all in steps of 16 bytes."""
    return (
        t.dtype in (torch.bfloat16, torch.float16)
        and t.shape[-1] == _padded(t)
        and t.stride(-1) == 1
        and all(stride > 0 and stride % 8 == 0 for stride in t.stride()[:3])
        and t.data_ptr() % 16 == 0
    )


@lru_cache
def has_copy_engine(device: torch.device) -> bool:
    return interpreting() or torch.cuda.get_device_capability(device)[0] >= 9


def _described(t: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, rows, t.shape[-1]])
