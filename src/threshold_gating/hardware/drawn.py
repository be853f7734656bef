"""Random numbers of physical devices: drawn once, the same for a seed and a name whatever else is.

Every tensor has a leading axis of draws, one entry for each chip that is simulated; what runs sees
one entry, or all of them at once through `torch.vmap`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion.plan import ConversionError


class Drawn(nn.Module):
    """What belongs to single devices: each tensor of it has a leading axis of draws."""

    def put(self, name: str, value: Tensor) -> None:
        """Keep `value`, (draws, ...), as a buffer that no state dict holds."""
        self.register_buffer(name, value, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Go to another device, and stay float32: `.half()` would make other chips of them."""
        return super()._apply(lambda t: t.to(fn(t).device), recurse)  # type: ignore[no-untyped-call]


def normal(seed: int, name: str, draws: int, shape: Sequence[int]) -> Tensor:
    """(draws, *shape) numbers of N(0, 1)."""
    chips = (_generator(seed, name, k) for k in range(draws))
    return torch.stack([torch.randn(tuple(shape), generator=g) for g in chips])


def uniform(seed: int, name: str, draws: int, shape: Sequence[int]) -> Tensor:
    """(draws, *shape) numbers between 0 and 1."""
    chips = (_generator(seed, name, k) for k in range(draws))
    return torch.stack([torch.rand(tuple(shape), generator=g) for g in chips])


def _generator(seed: int, name: str, draw: int) -> torch.Generator:
    """Of one chip and one kind of device: neither more draws nor other sites change it."""
    digest = hashlib.blake2b(f"{seed}/{name}/{draw}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def stacked(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of all devices in a module by their names."""
    return {
        f"{name}.{key}": value
        for name, part in module.named_modules()
        if isinstance(part, Drawn)
        for key, value in (*part.named_buffers(), *part.named_parameters())
    }


def check_run(part: Any) -> None:
    """Refuse a call of a part of a network outside of its runs, where no chip is chosen."""
    if part.in_run is False:
        raise ConversionError(
            f"{part.name} is called outside of a run of the chips, as gradient checkpointing does "
            "in the backward pass; chips cannot be checkpointed: turn it off in the network before "
            "it is simulated, and use smaller batches or fewer draws where memory is short.",
            part.name,
        )
