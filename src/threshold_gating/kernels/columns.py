"""Tier W for one input vector with hard gates on a GPU: each input reads one column of weights.

With the weights as (O, K, I) the columns lie across memory, so a copy as (K, I, O) is kept for each
weight that is used so, until the weight changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from threshold_gating.primitive import Value

_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_INNER, _OUTER, _PROGRAMS = 32, 128, 512


def product(
    x: Tensor,
    theta: Sequence[Tensor],
    owner: Sequence[str] | None,
    c: Sequence[Value],
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """sum_i W_k (x_i + c_k) + b, x_i in region k, for I elements and weights (O, K, I).

    theta and c are all of one element or all of I; without derivatives.
    """
    from threshold_gating.kernels.columns_device import chosen_columns

    outer, K, inner = weight.shape
    across = -(-outer // _OUTER)
    parts = max(1, min(-(-inner // _INNER), _PROGRAMS // across))
    chunk = -(-inner // parts)
    sums = x.new_empty(parts, outer, dtype=torch.float32)
    levels = torch.stack([t.reshape(-1).float() for t in theta])
    shifted = any(isinstance(ck, Tensor) or ck != 0 for ck in c)
    shift = torch.stack([torch.as_tensor(ck).to(levels).expand_as(levels[0]) for ck in c])
    highs = torch.tensor([o == "hi" for o in owner or ("lo",) * (K - 1)], device=x.device).int()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        chosen_columns[across, parts](
            x, levels, highs, shift, _transposed(weight), sums, inner, outer, chunk,
            K - 1, levels.shape[1] > 1, shifted, _INNER, _OUTER, num_warps=4,
        )  # fmt: skip
    y = sums.sum(0)
    y = y if bias is None else y + bias
    return y.to(x.dtype)


def _transposed(weight: Tensor) -> Tensor:
    version, copy = _COPIES.get(weight, (None, None))  # type: ignore[no-untyped-call]
    if version != weight._version:
        copy = weight.detach().permute(1, 2, 0).contiguous()
        _COPIES[weight] = (weight._version, copy)
    assert isinstance(copy, Tensor)
    return copy
