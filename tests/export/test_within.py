"""Approximate sites that are near enough are left to torch, and named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.export.within import converted, gated
from threshold_gating.taxonomy import ROWS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), nn.GELU()

    def forward(self, x):
        return F.elu(self.act(self.act(self.up(x)))) + F.silu(x)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(5, 4)


def test_the_error_that_is_stated_decides(net):
    model, x = net
    gelu, elu = ROWS["gelu"].sup, ROWS["elu"].sup
    assert elu < gelu
    assert gated(model, x, elu / 2).native == {}
    # the table rounds what the conversion states, to three digits
    assert gated(model, x, 1.01 * elu).native == {":elu#0": pytest.approx(elu, rel=1e-2)}
    found = gated(model, x, 1.01 * gelu).native
    assert found == {  # of both its calls
        "act": pytest.approx(gelu, rel=1e-2),
        ":elu#0": pytest.approx(elu, rel=1e-2),
    }


def test_exact_sites_stay_gates_and_the_others_are_torchs(net):
    model, x = net
    near = gated(model, x, 1.0)
    assert [site.name for site in tg.audit(near.model, x).sites] == [":silu#0"]
    assert not isinstance(near.model.act, tg.Activation)
    with torch.no_grad():
        assert torch.allclose(near.model(x), model(x), atol=1e-6)  # float32 of size 3


def test_choices_of_the_user_hold(net):
    model, x = net
    assert set(gated(model, x, 1e-2, {"re::elu.*": None}).native) == {"act"}
    rough = gated(model, x, 1e-4, {"act": "gelu_k3"})
    assert set(rough.native) == {":elu#0"}  # three branches are further off
    assert isinstance(rough.model.act, tg.Activation)


def test_a_network_of_gates_is_exported_as_it_is_and_one_without_any_is_refused():
    x = torch.randn(2, 4)
    for net in (tg.Linear(4, 3), nn.Sequential(tg.Activation("silu"))):
        assert converted(net, x) is net
    with pytest.raises(tg.conversion.ConversionError, match="nothing to convert"):
        converted(nn.Linear(4, 3), x)


def test_a_network_without_exact_sites_is_left_as_it_is():
    model = nn.Sequential(nn.GELU()).eval()
    found = gated(model, torch.randn(2, 3), 1e-4)
    assert found.model is model
    assert set(found.native) == {"0"}
