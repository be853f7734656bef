"""Training with gates against training without, on one thread: time of a step, peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from benchmarks.elementwise import gradients
from benchmarks.exact import WrongError
from benchmarks.timing import CHECK, Contenders, Place, Work, peak

# Float32 sums of up to 65,536 terms in another order.
AGREEMENT = 1e-4


def training(place: Place, batch: int) -> Iterator[Work]:
    """Tier A in a convolutional network, tier W with K = 2 as one layer."""
    note = "64-128-256 channels, tau and theta for each"
    for how, limit in (("eager", 1.4), ("compiled", 1.25)):
        if how == "eager" or place.compile is not None:
            work, build = f"step of a CNN {how}", partial(_steps, how, place, batch)
            yield _row(work, build, {"relu": limit}, ("module", "compiled"), slow=True, note=note)
    work = "forward and backward of 512x512"
    more = "twice the inputs", "linear"  # torch's layer with as many products
    limits = {("tier W", "linear"): 2.0, more: None}
    yield _row(f"{work},", _products, limits, ("product",))
    limits = {("tier W", "linear"): 2.2, more: None}
    build = partial(_peaks, place.device)
    yield _row(f"peak of {work},", build, limits, ("product",), unit="MiB")


_row = partial(Work, "training", backward=True)


def cnn(activation: Callable[[int], nn.Module]) -> nn.Module:
    """The weights are the same whatever the activation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 64, 1), (64, 128, 2), (128, 256, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), activation(after)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def gated(channels: int) -> nn.Module:
    """Tier A: a sharpness and a threshold for each channel."""
    return tg.Activation("silu", share="channel", channels=channels, train=("tau", "theta"))


def _steps(how: str, place: Place, batch: int) -> Contenders:
    ours, plain = cnn(gated), cnn(lambda channels: nn.ReLU())
    run = {"ours": ours, "relu": plain}
    if how == "compiled" and place.compile is not None:
        torch._dynamo.reset()
        run = {name: place.compile(model, fullgraph=True) for name, model in run.items()}
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    models = {"ours": ours, "relu": plain}
    found: Contenders = {
        name: partial(_step, run[name], _optimizer(models[name]), x, y) for name in run
    }
    return {**found, CHECK: partial(_check, ours, run["ours"], x)}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _step(
    run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    optimizer.zero_grad()
    F.cross_entropy(run(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _check(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Hold outputs and gradients against the reference."""
    parameters = list(model.parameters())
    dy = torch.randn(len(x), 10)
    have = [y := run(x), *torch.autograd.grad(y, parameters, dy)]
    with tg.kernels.use("reference"):
        want = [y := model(x), *torch.autograd.grad(y, parameters, dy)]
    pairs = ((a.detach(), b.detach()) for a, b in zip(have, want, strict=True))
    off = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    if not off <= AGREEMENT:
        raise WrongError(f"off by {off:.1e} from the reference (at most {AGREEMENT:.0e})")


def _products(width: int = 512, batch: int = 256) -> Contenders:
    """Tier W with K = 2, and torch's layer with twice the inputs, whose products are the same."""
    layers = {
        "tier W": tg.Linear(width, width),
        "twice the inputs": nn.Linear(2 * width, width),
        "linear": nn.Linear(width, width),
    }
    dy, found = torch.randn(batch, width), {}
    for name, layer in layers.items():
        x = torch.randn(batch, 2 * width if "twice" in name else width, requires_grad=True)
        found[name] = partial(gradients, layer, [x], [x, *layer.parameters()], dy)
    return dict(found)


def _peaks(device: str) -> Contenders:
    return {name: partial(peak, f, device) for name, f in _products().items()}
