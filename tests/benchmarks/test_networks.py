"""Networks as they are called, then compiled; one that cannot be made is a line."""

import sys

import torch
from small import FAKE
from torch import nn

from benchmarks import sections, timing
from benchmarks.networks import with_learned_gates
from benchmarks.timing import Place


def test_networks_are_compiled_after_all_have_run_as_they_are_called():
    works = sections.on_gpu(Place("cpu", torch.compile), sections.LARGE)["networks"]()
    names = [work.name for work in works]
    assert names[:4] == [
        f"{name} {what} eager"
        for name in ("resnet50", "vit_b_16")
        for what in ("inference", "training")
    ]
    assert names[4:] == [name.replace("eager", "compile") for name in names[:4]]


def test_a_network_that_cannot_be_made_is_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    works = sections.on_gpu(Place("cpu", None), sections.LARGE)["networks"]()
    rows = [row for work in works for row in timing.measure(work, FAKE)]
    assert [row.verdict for row in rows] == ["MISSED"] * 4
    assert all("torchvision" in row.failed for row in rows)


def test_learned_gates_take_the_place_of_activations():
    model = with_learned_gates(nn.Sequential(nn.ReLU(), nn.Sequential(nn.GELU())))
    assert [m.learned for m in (model[0], model[1][0])] == [("theta", "s"), ("tau", "theta")]
