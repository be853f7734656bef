"""Whole networks in bf16: a conversion that infers, and a training step with learned gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import Contenders, Place, Work
from threshold_gating import convert

SECTION = "networks"
PAIRS = ("frozen module", "module", "compiled", "normed", "overwriting")
Images = tuple[int, int, int, int]
Wrap = Callable[[nn.Module], Any]


class Network(NamedTuple):
    """A network, what its gates learn in training, and limits: our time over the original's."""

    make: Callable[[], nn.Module]
    learns: tuple[str, ...]  # each channel has its own
    leaves: str | None  # sites that stay torch's own in training
    inference: float
    training: float = 1.05


def _of_torchvision(name: str) -> nn.Module:
    from torchvision import models

    made: nn.Module = getattr(models, name)()
    return made


HARD, SOFT = ("theta", "s"), ("tau", "theta")  # what hard and soft gates learn
ATTENTION = "re:.*self_attention.*"
# ReLU, and GELU by five branches
NETWORKS = {
    "resnet50": Network(partial(_of_torchvision, "resnet50"), HARD, None, 1.02),
    "vit_b_16": Network(partial(_of_torchvision, "vit_b_16"), SOFT, ATTENTION, 1.10),
}


def networks(found: dict[str, Network], shape: Images, place: Place) -> Iterator[Work]:
    """Every network as it is called, then every network compiled."""
    for how in ("eager", "compile") if place.compile is not None else ("eager",):
        for name, network in found.items():
            wrap: Wrap = partial(_compiled, place) if how == "compile" else lambda model: model
            build = partial(_inference, network, shape, place, wrap)
            most = {"original": network.inference}
            yield Work(SECTION, f"{name} inference {how}", build, most, PAIRS, slow=True)
            build = partial(_training, network, shape, place, wrap)
            most = {"original": network.training}
            work = f"{name} training {how}"
            yield Work(SECTION, work, build, most, PAIRS, backward=True, slow=True)


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
    gated = with_learned_gates(plain, x[:2], network)
    return {"original": partial(_step, wrap(plain), x), "ours": partial(_step, wrap(gated), x)}


def _moved(model: nn.Module, place: Place) -> nn.Module:
    last: dict[str, Any] = {"memory_format": torch.channels_last}
    return model.to(place.device, torch.bfloat16, **last)


def _images(shape: Images, place: Place) -> Tensor:
    x = torch.randn(shape, device=place.device, dtype=torch.bfloat16)
    return x.to(memory_format=torch.channels_last)


def with_learned_gates(model: nn.Module, x: Tensor, network: Network) -> nn.Module:
    """A copy whose activations are gates that learn for each channel; `leaves` stay as they are."""
    sites = {network.leaves: None} if network.leaves else None
    return convert(model, sites, inputs=x, train=network.learns, share="channel")


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()
