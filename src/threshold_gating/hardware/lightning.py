"""A bridge to `aihwkit-lightning`: linear and convolution layers on its tiles, gates on ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.hardware.analog import Simulation


class LightningTile(nn.Module):
    """A layer of aihwkit-lightning inside a converted network."""

    def __init__(self, tile: nn.Module) -> None:
        super().__init__()
        self.tile = tile

    def forward(self, x: Tensor) -> Tensor:
        # A converted network around this would answer the tile's own clamp by a gate.
        with torch._C.DisableTorchFunction():
            y: Tensor = self.tile(x)
            return y


def put_on_lightning(simulation: Simulation, rpu_config: Any) -> list[str]:
    """Put the linear and convolution layers of a simulation on aihwkit-lightning's tiles.

    The tiles do what `rpu_config` says; in training mode (`simulation.train()`) they add their
    noise, as the package has it. Returns the names of the layers.

    Raises:
        ValueError: where the layers are on our crossbars already, or there are none.
    """
    from aihwkit_lightning.nn import AnalogConv1d, AnalogConv2d, AnalogLinear

    kinds = {nn.Linear: AnalogLinear, nn.Conv1d: AnalogConv1d, nn.Conv2d: AnalogConv2d}
    network = simulation.body.network
    if any(True for _ in simulation.body.arrays()):
        raise ValueError(
            "put_on_lightning: the layers are on crossbars; simulate without crossbar=."
        )
    found = [(name, layer) for name, layer in network.named_modules() if type(layer) in kinds]
    if not found:
        raise ValueError(
            "put_on_lightning: no layer is a plain Linear, Conv1d or Conv2d, which its tiles take."
        )
    for name, layer in found:
        parent, _, key = name.rpartition(".")
        tile = kinds[type(layer)].from_digital(layer, rpu_config)
        setattr(network.get_submodule(parent), key, LightningTile(tile).train(layer.training))
    simulation.runs_by = ""  # its functions are not for torch.vmap: found out in the next run
    return [name for name, _ in found]
