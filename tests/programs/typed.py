"""A user's program, which mypy reads in strict mode: the types of the public names."""

from typing import TYPE_CHECKING, assert_type

import torch
from torch import Tensor, nn

import threshold_gating as tg


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.act = tg.Activation("gelu", share="channel", channels=8, train=("tau", "theta"))
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.last(self.first(x)))


def main() -> None:
    x = torch.randn(2, 4)
    net = Net()
    gated = tg.convert(net, {"last": "silu"}, inputs=x, tol=float("inf"))
    assert_type(gated, Net)
    assert_type(gated.act(gated.first(x)), Tensor)
    assert_type(tg.fit(torch.sigmoid, K=3, form="product").t, tg.TG)
    print(tg.Linear(4, 8, tier="S", share="synapse"))
    mlp = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    assert_type(tg.training.promote(mlp, "W", inputs=x), nn.Sequential)
    print(tg.verify(net, gated, x).ok, tg.audit(gated, x).sites)
    assert_type(tg.conversion.revert(gated), Net)
    with tg.kernels.use("reference"):
        y = tg.TG(1.0, 0.0, (0.0, 1.0), (0.0, 0.0), form="softmax")(x)
    assert_type(y, Tensor)

    if TYPE_CHECKING:  # what an editor underlines while it is typed
        tg.Activation(share="chanel")  # type: ignore[arg-type]
        tg.Linear(4, 8, tier="w")  # type: ignore[arg-type]
        tg.kernels.use("cuda")  # type: ignore[arg-type]
        tg.blend(x, 1.0, (0.0,), (0.0, 1.0), (0.0, 0.0), form="sofmax")  # type: ignore[arg-type]
        tg.convert("resnet18")  # type: ignore[type-var]
        tg.convrt(net)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
