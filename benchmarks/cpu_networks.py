"""Converted networks on one thread of a CPU, as called and compiled, GELU by five branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.timing import Contenders, Place, Work
from threshold_gating import convert

SECTION = "cpu networks"
PAIRS = ("frozen module", "compiled")
_LIMITS = {"eager": 1.15, "compiled": 1.05}
Made = tuple[nn.Module, Tensor]


class Bert(NamedTuple):
    """The sizes of a small BERT, and how much text it reads."""

    layers: int = 4
    width: int = 256
    batch: int = 4
    tokens: int = 128

    def made(self) -> Made:
        """It and its input."""
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=1000, hidden_size=self.width, num_hidden_layers=self.layers,
            num_attention_heads=4, intermediate_size=4 * self.width,
        )  # fmt: skip
        make: Any = BertModel  # has no types
        return make(config, add_pooling_layer=False), torch.randint(1000, (self.batch, self.tokens))


def _images(name: str) -> Made:
    from torchvision import models

    return getattr(models, name)(), torch.randn(1, 3, 224, 224)


# With random weights, which change no time.
NETWORKS: dict[str, Callable[[], Made]] = {
    "vit_b_16": partial(_images, "vit_b_16"),
    "swin_t": partial(_images, "swin_t"),
    "convnext_tiny": partial(_images, "convnext_tiny"),
    "a small BERT": Bert().made,
}
SMALL = {"a tiny BERT": Bert(1, 32, 1, 8).made}


def cpu_networks(networks: dict[str, Callable[[], Made]], place: Place) -> Iterator[Work]:
    """Every network as it is called, then every network compiled."""
    for how, limit in _LIMITS.items():
        for name, make in networks.items():
            if how == "eager" or place.compile is not None:
                build = partial(_contenders, make, how, place)
                work, limits = f"{name} inference {how}", {"original": limit}
                yield Work(SECTION, work, build, limits, PAIRS, slow=True)


def _contenders(make: Callable[[], Made], how: str, place: Place) -> Contenders:
    model, x = make()
    plain = model.eval()
    both: dict[str, Any] = {"original": plain, "ours": convert(plain, inputs=x)}
    if how == "compiled" and place.compile is not None:
        torch._dynamo.reset()
        both = {name: place.compile(each) for name, each in both.items()}
    return {name: partial(each, x) for name, each in both.items()}
