"""The layer of splines beside gates of each synapse: its splines are scipy's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.kan import KAN
from benchmarks.synapse import equals


@pytest.mark.parametrize("expanded", [False, True])
def test_a_layer_is_silu_and_the_splines_of_scipy(expanded):
    interpolate = pytest.importorskip("scipy.interpolate")
    layer = KAN(3, 4, expanded=expanded).double()
    x = torch.rand(50, 3).double().mul(2).sub(1)
    want = F.silu(x) @ layer.base.t()
    knots = layer.knots.numpy().astype(float)
    for o in range(4):
        for i in range(3):
            coefficients = layer.coefficients[o, i].detach().numpy()
            curve = interpolate.BSpline(knots, coefficients, 3, extrapolate=False)
            want[:, o] += torch.from_numpy(np.nan_to_num(curve(x[:, i].numpy())))
    # the knots are float32 numbers, and scipy's recursion has another order
    torch.testing.assert_close(layer(x), want, rtol=1e-9, atol=1e-9)


def test_the_layers_compared_have_as_many_parameters():
    counts = {n: sum(p.numel() for p in m.parameters()) for n, m in equals(32, "cpu").items()}
    for name, count in counts.items():
        # tier W has gates of each channel too, and a width that is a whole number
        assert count == pytest.approx(9 * 32**2, rel=0.05 if name == "tier W" else 0), name
