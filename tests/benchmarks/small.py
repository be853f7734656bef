"""Small sizes, and a clock that finds all contenders equally fast."""

import torch

from benchmarks import attention, elementwise, host, llm, sections, synapse, tier_w, timing
from benchmarks.networks import ATTENTION, HARD, SOFT, Network


def small_resnet():
    from torchvision.models import resnet18

    return resnet18()


def small_vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=16, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64
    )


LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
SMALL = sections.Sizes(
    elementwise.Sizes((6, 4), (2, 4, 3, 3), (2, 4, 2, 2)),
    tier_w.Sizes(((4, 6, 6), (5, 4, 4)), (1, 3), 8, (2, 4, 5, 5), (8,)),
    synapse.Sizes((6,), (2, 3, 4, 4), (3,), 8, 3),
    range(2, 4),
    host.Sizes((6, 4), (2, 3, 4), 2),
    (2, 3, 32, 32),
    {
        "resnet": Network(small_resnet, HARD, None, 1.02),
        "vit": Network(small_vit, SOFT, ATTENTION, 1.10),
    },
    attention.Sizes({(1, 2, 9, 8): 2.0}, 2, (32, 64)),
    llm.Sizes(tuple(LLAMA.items()), torch.float32, 64, 2),
    (3, 2, 5),
)


def once(contenders, slow=False):
    """A clock that calls every contender and finds them equally fast."""
    for f in contenders.values():
        f()
    return dict.fromkeys(contenders, 2.0)


FAKE = timing.Clock(
    "once", lambda contenders, slow: {n: [ms] for n, ms in once(contenders).items()}, once
)


def fake_rows(place, name):
    works = sections.on_gpu(place, SMALL)[name]()
    return [row for work in works for row in timing.measure(work, FAKE)]
