"""What is wrong is named, and so is what a machine cannot check."""

import math
from dataclasses import replace

import torch

from benchmarks import checking
from benchmarks.pairs import PAIRS
from threshold_gating import Activation
from threshold_gating.kernels.blend import function


def test_a_module_that_is_wrong_where_its_kernel_is_right_is_found(monkeypatch):
    right = Activation.forward
    monkeypatch.setattr(Activation, "forward", lambda self, x: right(self, x) + 0.1)
    some = [pair for pair in PAIRS.values() if pair.family in ("blend", "module")]
    wrong = checking.check("cpu", some, (torch.float32,))
    assert wrong
    assert all(" module " in line for line in wrong)


def test_hard_pairs_are_large_enough_for_the_kernels_of_a_cpu():
    """Few elements of hard gates are computed by the reference's formulas."""
    for pair in PAIRS.values():
        if pair.family in ("blend", "module") and pair.name.startswith(("leaky_relu", "hardtanh")):
            assert math.prod(pair.shapes[0]) > function._FEW


def test_a_kernel_that_raises_is_wrong_and_the_others_are_looked_at():
    def fails(w):
        raise RuntimeError("no such thing\nand more")

    broken = replace(PAIRS["silu layer"], kernel=fails)
    off = replace(PAIRS["gelu layer"], kernel=lambda w: PAIRS["gelu layer"].kernel(w).detach())
    wrong = checking.check("cpu", [broken, off], (torch.float32,))
    assert wrong[0] == "silu layer 63x7 float32: RuntimeError: no such thing"
    assert "gelu layer 63x7 float32 dx: error inf above 1.0e-05" in wrong  # nothing flows back
