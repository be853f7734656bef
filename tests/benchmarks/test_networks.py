"""Networks as they are called, then compiled; one that cannot be made is a line."""

import sys

import pytest
import torch
from small import FAKE, SMALL

from benchmarks import sections, timing
from benchmarks.networks import with_learned_gates
from benchmarks.timing import Place
from threshold_gating.training import gate_parameters


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


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_a_training_step_learns_gates_for_each_channel(name):
    network = SMALL.networks[name]
    model = network.make()
    gated = with_learned_gates(model, torch.randn(2, 3, 32, 32), network)
    learned = gate_parameters(gated)
    assert learned
    assert {p.shape[-1] for p in learned.values()} <= CHANNELS[name]
    assert not any("attention" in key for key in learned)
    assert not gate_parameters(model)


CHANNELS = {"resnet": {64, 128, 256, 512}, "vit": {64}}
