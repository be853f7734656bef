"""Networks whose gates learn, for test_learn: trained, saved, and gone on with in a fresh process.

`python tests/learning.py FOLDER` loads every network that is there, trains it further and writes what
came out.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.training.groups import param_groups

STEPS, MORE = 20, 3


class Calls(nn.Module):
    """Activations as calls, one in place, and one module that is used twice with unlike channels."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)
        self.act, self.out = nn.SiLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.act(F.batch_norm(self.first(x), torch.zeros(6), torch.ones(6)))
        x = self.act(self.second(x))
        x = F.leaky_relu_(x, 0.2).mean((2, 3))
        return self.out(x.sigmoid() * torch.tanh(x))


class Recurrent(nn.Module):
    """Two layers in two directions, then a cell step by step."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 4, num_layers=2, bidirectional=True, dropout=0.1)
        self.gru, self.cell, self.out = nn.GRU(8, 4), nn.LSTMCell(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        state = None
        for each in self.gru(self.rnn(x)[0])[0]:
            state = self.cell(each, state)
        return self.out(state[0])


class Gated(nn.Module):
    """A gated linear unit over a convolution, with a softmax of its own behind it."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(3, 8, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = F.glu(self.conv(x), 1)
        return self.out((x * x.softmax(-1)).sum(-1))


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
    net.layer3, net.layer4, net.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 3)
    return net


def timm(name, **options):
    import timm

    return timm.create_model(name, num_classes=3, **options)


SMALL = {
    **{"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "intermediate_size": 24,
}


def of_transformers(name, **options):
    import transformers

    config = getattr(transformers, f"{name}Config")(**options, num_labels=3, pad_token_id=0)
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


IMAGE, SEQUENCE = (2, 3, 16, 16), (2, 2, 5)
# How to make each, and the shape of its input; tokens where there is none.
NETWORKS = {
    "modules": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.Mish(), nn.Linear(8, 3)),
        (2, 5),
    ),
    "calls": (Calls, IMAGE),
    "torchvision ResNet": (resnet, IMAGE),
    "timm ViT": (
        lambda: timm("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2),
        (2, 3, 32, 32),
    ),
    "timm ConvNeXt": (lambda: timm("convnext_atto", depths=(1,) * 4, dims=(8,) * 4), (2, 3, 32, 32)),
    "timm Swin": (
        lambda: timm(
            *("swin_tiny_patch4_window7_224",),
            **{"img_size": 28, "embed_dim": 8, "depths": (2,), "num_heads": (2,)},
        ),
        (2, 3, 28, 28),
    ),
    "BERT": (lambda: of_transformers("Bert", **SMALL), None),
    "GPT-2": (
        lambda: of_transformers("GPT2", vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=8),
        None,
    ),
    "Llama": (lambda: of_transformers("Llama", **SMALL, num_key_value_heads=1), None),
    "recurrent": (Recurrent, SEQUENCE),
    "encoder": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1),
            nn.Flatten(),
            nn.Linear(32, 3),
        ),
        (2, 4, 8),
    ),
    "gated": (Gated, (2, 3, 7)),
}  # fmt: skip


def inputs(name, seed=0):
    draw, shape = torch.Generator().manual_seed(seed), NETWORKS[name][1]
    if shape is None:
        return {"input_ids": torch.randint(1, 30, (2, 6), generator=draw)}
    return torch.randn(shape, generator=draw)


def output(model, x):
    y = model(**x) if isinstance(x, dict) else model(x)
    return getattr(y, "logits", y)


def made(name):
    torch.manual_seed(0)
    return NETWORKS[name][0]()


def converted(name, train=("tau", "theta"), share="channel"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what some sites cannot learn is a test of its own
        return tg.convert(made(name).eval(), train=train, share=share, inputs=inputs(name)).train()


def optimizer_of(model):
    return torch.optim.AdamW(param_groups(model, 1e-2, gate_lr_scale=2.0, weight_decay=0.01))


def train(name, model, optimizer, first, steps):
    for step in range(first, first + steps):
        torch.manual_seed(step)  # for dropout
        x = inputs(name, seed=step)
        optimizer.zero_grad()
        y = output(model, x)
        F.cross_entropy(y, torch.arange(len(y)) % 3).backward()
        optimizer.step()


def main(folder):
    for path in folder.iterdir():
        name = path.name
        model = tg.conversion.load(path, NETWORKS[name][0]()).train()
        optimizer = optimizer_of(model)
        optimizer.load_state_dict(torch.load(path / "optimizer.pt"))
        train(name, model, optimizer, STEPS, MORE)
        torch.save(model.state_dict(), path / "after.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
