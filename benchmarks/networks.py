"""Whole networks in bf16: a conversion that infers, and a training step with learned gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import Contenders, Place, Work
from threshold_gating import Activation, convert

SECTION = "networks"
PAIRS = ("frozen module", "module", "compiled")
Images = tuple[int, int, int, int]
Wrap = Callable[[nn.Module], Any]


class Network(NamedTuple):
    """How to make one, and the most that its conversion may take of its time."""

    make: Callable[[], nn.Module]
    inference: float
    training: float = 1.05


def _of_torchvision(name: str) -> nn.Module:
    from torchvision import models

    made: nn.Module = getattr(models, name)()
    return made


# ReLU, and GELU by five branches
NETWORKS = {
    "resnet50": Network(partial(_of_torchvision, "resnet50"), 1.02),
    "vit_b_16": Network(partial(_of_torchvision, "vit_b_16"), 1.10),
}


def networks(found: dict[str, Network], shape: Images, place: Place) -> Iterator[Work]:
    """Every network as it is called, then every network compiled."""
    for how in ("eager", "compile") if place.compile is not None else ("eager",):
        for name, network in found.items():
            wrap: Wrap = partial(_compiled, place) if how == "compile" else lambda model: model
            build = partial(_inference, network, shape, place, wrap)
            limits = {"original": network.inference}
            yield Work(SECTION, f"{name} inference {how}", build, limits, PAIRS, slow=True)
            build = partial(_training, network, shape, place, wrap)
            limits = {"original": network.training}
            work = f"{name} training {how}"
            yield Work(SECTION, work, build, limits, PAIRS, backward=True, slow=True)


def _compiled(place: Place, model: nn.Module) -> Any:
    assert place.compile is not None
    return place.compile(model)


def _inference(network: Network, shape: Images, place: Place, wrap: Wrap) -> Contenders:
    torch._dynamo.reset()
    x, plain = _images(shape, place), _moved(network.make(), place).eval()
    gated = convert(plain, inputs=x[:2])
    return {"original": partial(wrap(plain), x), "ours": partial(wrap(gated), x)}


def _training(network: Network, shape: Images, place: Place, wrap: Wrap) -> Contenders:
    torch._dynamo.reset()
    x, plain = _images(shape, place), _moved(network.make(), place).train()
    gated = _moved(with_learned_gates(network.make()), place).train()
    return {"original": partial(_step, wrap(plain), x), "ours": partial(_step, wrap(gated), x)}


def _moved(model: nn.Module, place: Place) -> nn.Module:
    last: dict[str, Any] = {"memory_format": torch.channels_last}
    return model.to(place.device, torch.bfloat16, **last)


def _images(shape: Images, place: Place) -> Tensor:
    x = torch.randn(shape, device=place.device, dtype=torch.bfloat16)
    return x.to(memory_format=torch.channels_last)


def with_learned_gates(model: nn.Module) -> nn.Module:
    """Every ReLU and GELU as a learned instance, one for each layer."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                setattr(parent, name, Activation("relu", train=("theta", "s")))
            elif isinstance(child, nn.GELU):
                setattr(parent, name, Activation("gelu", train=("tau", "theta")))
    return model


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()
