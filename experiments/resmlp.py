"""ResMLP for CIFAR-10, its gated forms, and what each costs: parameters, MACs, gates, memory."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

import threshold_gating as tg


class Affine(nn.Module):
    """A scale and a shift for each channel, which ResMLP has instead of norms; in the type of x."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift.to(x.dtype), x, self.scale.to(x.dtype))


class Block(nn.Module):
    """Patches mixed by one linear layer, then each patch by two with an activation between them."""

    def __init__(self, patches: int, dim: int, hidden: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.before, self.cross = Affine(dim), nn.Linear(patches, patches)
        self.between, self.up = Affine(dim), nn.Linear(dim, hidden)
        self.act = act()
        self.down: nn.Module = nn.Linear(hidden, dim)
        self.first, self.second = (nn.Parameter(torch.full((dim,), 0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        crossed = self.cross(self.before(x).transpose(1, 2)).transpose(1, 2)
        x = torch.addcmul(x, self.first.to(x.dtype), crossed)
        mixed = self.down(self.act(self.up(self.between(x))))
        return torch.addcmul(x, self.second.to(x.dtype), mixed.to(x.dtype))


class ResMLP(nn.Module):
    """64 patches of 4 x 4 pixels (Touvron et al. 2021, with another activation)."""

    def __init__(
        self, dim: int, depth: int, expansion: float, act: type[nn.Module] = nn.ReLU
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(
            *(Block(64, dim, round(expansion * dim), act) for _ in range(depth)), Affine(dim)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        out: Tensor = self.head(self.blocks(patches).mean(1))
        return out


def gated(model: ResMLP, tier: Literal["W", "S"]) -> ResMLP:
    """A copy whose second linear layers have gates: W_high the weights, W_low = 0, tau = 1.

    Of a trained ReLU network this is the paper's half transfer, which is not the same function.
    """
    new = copy.deepcopy(model)
    for block in new.blocks:
        if isinstance(block, Block):
            block.act = nn.Identity()
            block.down = tg.Linear.from_dense(block.down, "silu", tier=tier)
    return new


@torch.no_grad()
def counted(model: ResMLP) -> dict[str, int]:
    """Parameters; multiplications and gates of one image; its bytes of hidden units in bf16."""
    macs, gates = [], []

    def seen(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        uses = out.numel() // len(layer.weight)  # of each weight; two branches have their own
        macs.append(uses * layer.weight.numel())
        if isinstance(layer, tg.Linear):
            gates.append(uses * layer.gate.theta0.numel())

    hooks = [m.register_forward_hook(seen) for m in model.modules() if hasattr(m, "weight")]
    model(torch.zeros(1, 3, 32, 32, device=model.head.weight.device))
    for hook in hooks:
        hook.remove()
    parameters = sum(p.numel() for p in model.parameters())
    hidden = max(2 * 64 * block.up.out_features for block in model.blocks[:-1])
    return {"parameters": parameters, "macs": sum(macs), "gates": sum(gates), "hidden": hidden}


def peaks(model: ResMLP, batch: int, device: str) -> dict[str, int | None]:
    """The most bytes that are allocated beyond parameters, gradients and images, in bf16.

    Each is measured at a second call: the first compiles, and makes what stays.
    """
    found: dict[str, int | None] = {"peak training": None, "peak inference": None}
    if not device.startswith("cuda"):
        return found
    model.to(device)
    x = torch.zeros(batch, 3, 32, 32, device=device)
    for name in found:
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with (
                torch.set_grad_enabled(name == "peak training"),
                torch.autocast("cuda", torch.bfloat16),
            ):
                out = model(x)
            if name == "peak training":
                out.float().sum().backward()
            found[name] = torch.cuda.max_memory_allocated() - before
            del out
    model.zero_grad(set_to_none=True)
    return found
