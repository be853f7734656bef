"""What is wrong is named, and so is what a machine cannot check."""

from dataclasses import replace

import torch

from benchmarks import checking
from benchmarks.pairs import PAIRS
from threshold_gating import Activation


def test_a_module_that_is_wrong_where_its_kernel_is_right_is_found(monkeypatch):
    right = Activation.values

    def moved(self):
        tau, theta, s, c = right(self)
        return tau, theta, s, [ck + 0.1 for ck in c]

    monkeypatch.setattr(Activation, "values", moved)
    some = [pair for pair in PAIRS.values() if pair.family in ("blend", "module")]
    wrong = checking.check("cpu", some, (torch.float32,))
    assert wrong
    assert all(" module 63x7 float32 " in line for line in wrong)


def test_a_kernel_that_raises_is_wrong_and_the_others_are_looked_at():
    def fails(w):
        raise RuntimeError("no such thing\nand more")

    broken = replace(PAIRS["silu layer"], kernel=fails)
    off = replace(PAIRS["gelu layer"], kernel=lambda w: PAIRS["gelu layer"].kernel(w).detach())
    wrong = checking.check("cpu", [broken, off], (torch.float32,))
    assert wrong[0] == "silu layer 63x7 float32: RuntimeError: no such thing"
    assert "gelu layer 63x7 float32 dx: error inf above 1.0e-05" in wrong  # nothing flows back
