"""Functions of torch that move, select or repeat elements and do nothing else, in every spelling.

They commute with whatever is done to each element.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def spelled(names: str) -> frozenset[Any]:
    """Functions of torch by their names, however they are called."""
    homes = (F, torch, Tensor, torch.linalg)
    return frozenset(getattr(h, n) for n in names.split() for h in homes if hasattr(h, n))


def getters(names: str) -> frozenset[Any]:
    """What `x.NAME` calls."""
    return frozenset(getattr(Tensor, name).__get__ for name in names.split())


# The axes are in another order then.
TURNS = spelled("permute transpose movedim moveaxis swapaxes swapdims t adjoint") | getters(
    "T mT H mH"
)
# In the same memory, where that can be.
VIEWS = TURNS | spelled(
    "view reshape flatten ravel unflatten squeeze unsqueeze expand expand_as view_as reshape_as "
    "narrow select diagonal chunk split tensor_split unbind unsafe_chunk unsafe_split "
    "split_with_sizes __getitem__"
)
COPIES = spelled("index_select take_along_dim repeat tile roll flip rot90")
