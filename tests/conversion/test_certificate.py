"""A conversion is proved site by site and at the output, and a site that is off is named."""

import dataclasses
import json
import math
import re

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import TAXONOMY, TG, kernels
from threshold_gating.conversion import ConversionError, convert, site_error
from threshold_gating.conversion.site import Site
from threshold_gating.conversion.verification import verify
from threshold_gating.kernels.blend import function
from threshold_gating.nn.activation import Activation

SEED = torch.Generator().manual_seed(0)
X = torch.randn(4, 5, 6, generator=SEED) * 2
IMAGE = torch.randn(2, 3, 32, 32, generator=SEED)


class Calls(nn.Module):
    """A linear layer and then whatever `f` does, which gets the module and the layer's output."""

    def __init__(self, f, act=None):
        super().__init__()
        self.f, self.linear, self.act = f, nn.Linear(6, 6), act

    def forward(self, x):
        return self.f(self, self.linear(x))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.cell = nn.LSTM(6, 4, 2), nn.GRU(4, 4), nn.LSTMCell(4, 4)

    def forward(self, x):
        return self.cell(self.gru(self.lstm(x)[0])[0][-1])


def functional(self, x):
    x = F.leaky_relu(x, 0.2) + x.sigmoid().tanh() + F.hardtanh(x, 0.0, 2.0) + F.mish(x) + F.silu(x)
    x = F.glu(torch.cat([x, x.clamp(min=0)], -1)).relu_().softmax(-1)
    return F.scaled_dot_product_attention(x, x, x)


# networks of exact sites: (network, input, relative error allowed at the output)
EXACT = {
    "functional": (lambda: Calls(functional), X, 1e-6),
    "recurrent": (Cell, X, 1e-6),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), X, 1e-6),
    "test_resnet": (lambda: timm.create_model("test_resnet"), IMAGE, 3e-6),
    "test_efficientnet": (lambda: timm.create_model("test_efficientnet"), IMAGE, 3e-6),
}


@pytest.mark.parametrize("network", EXACT)
def test_exact_networks_agree_to_rounding(network):
    make, x, limit = EXACT[network]
    model = make().eval()
    certificate = verify(model, convert(model, inputs=x), x)
    assert certificate.ok, certificate.table()
    assert all(row.exact and row.ok for row in certificate.rows)
    assert certificate.output.relative <= limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("network", EXACT)
def test_the_limits_hold_in_every_type(network, dtype):
    make, x, _ = EXACT[network]
    model, x = make().eval().to(dtype), x.to(dtype)
    certificate = verify(model, convert(model, inputs=x), x)
    assert certificate.ok, certificate.table()


def test_hard_gates_are_bitwise():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.LeakyReLU(0.1), nn.Hardtanh(), nn.ReLU6())
    certificate = verify(model, convert(model, inputs=X), X)
    assert all(
        row.bitwise and row.ulp == row.max == row.rms == row.rel_rms == 0
        for row in certificate.rows
    )


def test_an_approximate_site_is_within_its_largest_error():
    model = timm.create_model("test_vit", img_size=32).eval()
    certificate = verify(model, convert(model, inputs=IMAGE), IMAGE)
    assert certificate.ok
    gelu = [row for row in certificate.rows if row.kind == "gelu"]
    assert len(gelu) == 6
    assert all(not row.exact and row.ulp is None and row.max < 5.01e-5 for row in gelu)
    assert all(row.exact for row in certificate.rows if row.kind != "gelu")


def test_a_sites_error_is_its_own():
    """The second site gets the original's input, not what the first, a bad fit, makes of it."""
    model = nn.Sequential(nn.GELU(), nn.ReLU())
    certificate = verify(model, convert(model, {"0": 2}, inputs=X), X)
    assert certificate.rows[0].max > 5e-3
    assert certificate.rows[1].bitwise
    assert certificate.output.max > 5e-3
    assert certificate.ok


def break_tensor(name, by=1.01):
    def apply(converted):
        with torch.no_grad():
            getattr(converted.get_submodule("1"), name).mul_(by)

    return apply


def shift_theta(converted):
    with torch.no_grad():
        converted.get_submodule("1").theta0.add_(0.01)


# One parameter of the middle site off by 1 %: (what stands there, how it is broken)
BROKEN = {
    "silu tau": (nn.SiLU(), break_tensor("tau0")),
    "tanh tau": (nn.Tanh(), break_tensor("tau0")),
    "mish theta": (nn.Mish(), break_tensor("theta0")),
    "relu theta": (nn.ReLU(), shift_theta),
    "hardtanh theta": (nn.Hardtanh(-0.5, 0.5), break_tensor("theta0")),
    "leaky_relu s": (nn.LeakyReLU(0.1), break_tensor("s")),
    "softshrink c": (nn.Softshrink(), break_tensor("c")),
    "gelu tau": (nn.GELU(), break_tensor("tau0")),
    "gelu theta": (nn.GELU(), break_tensor("theta0")),
    "gelu s": (nn.GELU(), break_tensor("s")),
    "elu tau": (nn.ELU(), break_tensor("tau0")),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_module_whose_parameters_are_off_by_1_percent_is_named(broken):
    module, breaks = BROKEN[broken]
    model = nn.Sequential(nn.SiLU(), module, nn.Sigmoid())
    converted = convert(model, inputs=X)
    assert verify(model, converted, X).ok
    breaks(converted)
    certificate = verify(model, converted, X)
    assert not certificate.ok
    assert set(certificate.failed) - {"output"} == {"1"}
    assert [row.ok for row in certificate.rows] == [True, False, True]


@pytest.mark.parametrize("kind", ["silu", "gelu", "sigmoid", "hardswish", "softplus", "elu"])
def test_a_call_whose_parameters_are_off_by_1_percent_is_named(kind):
    model = Calls(lambda m, x: F.relu(getattr(F, kind)(x)))
    converted = convert(model, inputs=X)
    site = converted.tg_sites[f"{kind}#0"]
    off = (
        {"theta": [v * 1.01 for v in site.t.theta]}
        if site.t.hard
        else {"tau": times(site.t.tau, 1.01)}
    )
    t = TG.from_dict({**site.t.to_dict(), **off})
    converted.__dict__["tg_sites"] = {
        **converted.tg_sites,
        f"{kind}#0": dataclasses.replace(site, t=t),
    }
    failed = verify(model, converted, X * 2).failed
    assert set(failed) - {"output"} == {f":{kind}#0"}


def times(tau, by):
    return [v * by for v in tau] if isinstance(tau, tuple) else tau * by


def test_one_call_of_a_shared_module_that_is_off_is_named():
    model = Calls(lambda m, x: m.act(m.act(m.act(x))), act=nn.SiLU())
    off = TG(1.01, 0, (0, 1), (0, 0))
    converted = convert(model, {"act#1": off}, inputs=X)
    first, second, third = converted.act.sites
    converted.act.sites = (first, dataclasses.replace(second, exact=True, sup=0.0), third)
    certificate = verify(model, converted, X)
    assert [row.site for row in certificate.rows] == ["act", "act#1", "act#2"]
    assert set(certificate.failed) - {"output"} == {"act#1"}


def test_a_site_that_is_off_is_found_in_16_bits():
    """At its largest value the error hides in one bfloat16 ulp; the small values show it."""
    model = nn.Sequential(nn.SiLU()).bfloat16()
    converted = convert(model, inputs=X.bfloat16())
    with torch.no_grad():
        converted[0].tau0.mul_(1.01)
    assert set(verify(model, converted, X.bfloat16() * 3).failed) == {"0"}


def test_the_messages_are_pinned():
    model = nn.Sequential(nn.Tanh(), nn.GELU(), nn.ReLU())
    converted = convert(model, inputs=X)
    with torch.no_grad():
        converted[0].tau0.mul_(1.01)
        converted[1].s.mul_(1.01)
        converted[2].theta0.add_(0.01)
    x = torch.full((1,), 0.5)
    assert verify(model, converted, x).failed == {
        "0": "0 (tanh) is exact and is off by 0.00392, 1.32e+05 ulp; its class allows 8, or 1 in 16 bits. sites={'0': None} leaves it alone.",
        "1": "1 (gelu, K = 5) is off by 0.00296; its instance is off by at most 4.98e-05 over the line. sites={'1': None} leaves it alone.",
        "2": "2 (relu) is exact and is off by 0.005, 1.07e+07 ulp; its class allows 8, or 1 in 16 bits. sites={'2': None} leaves it alone. (This is near its thresholds; these inputs do not show it.)",
        "output": "the output is off by 0.0201 of its largest value; 0.01 is allowed (the original's own rounding is 2.4e-08). The sites with the largest errors are 1 (gelu, K = 5: 0.0094 of what it gives). `tg.calibrate` fits them to your data, sites={'1': K} takes more branches, and tol= sets a bound of your own (math.inf accepts any).",
    }


@pytest.mark.parametrize("named", [False, True])
def test_a_module_is_tried_near_its_thresholds_however_it_is_called(named):
    call = (lambda m, x: m.act(input=x.abs() + 1)) if named else (lambda m, x: m.act(x.abs() + 1))
    model = Calls(call, act=nn.ReLU())
    converted = convert(model, inputs=X)
    with torch.no_grad():
        converted.act.theta0.add_(0.01)
    failed = verify(model, converted, X).failed
    assert list(failed) == ["act"]
    assert "(This is near its thresholds; these inputs do not show it.)" in failed["act"]


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: F.leaky_relu(x.abs() + 1, 0.2),
        lambda m, x: F.leaky_relu(negative_slope=0.2, input=x.abs() + 1),
    ],
)
def test_a_call_is_tried_near_its_thresholds_however_it_is_called(call):
    model = Calls(call)
    converted = convert(model, inputs=X)
    ((name, site),) = converted.tg_sites.items()
    off = dataclasses.replace(site.t, theta=tuple(theta + 0.01 for theta in site.t.theta))
    converted.tg_sites[name] = dataclasses.replace(site, t=off)
    failed = verify(model, converted, X).failed
    assert list(failed) == [f":{name}"]
    assert "(This is near its thresholds; these inputs do not show it.)" in failed[f":{name}"]


def test_a_site_is_not_blamed_for_digits_that_the_original_loses():
    class Halves(nn.Module):
        def forward(self, x):
            return 0.5 * (1 + torch.tanh(x / 2))  # a sigmoid, with no digit left at -20

    model = nn.Sequential(Halves())
    x = torch.linspace(-20, 20, 1001)
    converted = convert(model, inputs=x)
    certificate = verify(model, converted, x)
    assert certificate.rows[0].ulp > 1e6
    assert certificate.ok
    with torch.no_grad():
        converted[0].tau0.mul_(1.01)
    assert not verify(model, converted, x).ok


ULP = 2.0**-23  # of a value near 1


@pytest.mark.parametrize(
    ("value", "off", "own", "exceeds"),
    [
        (1000.0, 0.5, 0.6, False),
        (1000.0, 1.3, 0.6, True),
        (1000.0, 90.0, 400.0, False),
        (1000.0, 120.0, 400.0, True),  # of an original without a digit a tenth, not all
        (1.0, 10 * ULP, 9 * ULP, False),
        (1.0, 10 * ULP, 8 * ULP, True),  # the original is as good as its class: so is a gate
    ],
)
def test_a_site_may_be_off_by_twice_the_originals_own_error(value, off, own, exceeds):
    error, y = site_error.Error("a", Site("a", "silu", TAXONOMY["silu"])), torch.tensor([value])
    error.add(y, y + off, lambda: y.double() + own)
    assert error.exceeds is exceeds


def test_what_is_left_alone_on_request_is_listed_as_not_evaluated():
    model = Calls(lambda m, x: m.act(x).tanh() + F.silu(x), act=nn.ReLU())
    converted = convert(model, {"act": None, ":silu#0": None}, inputs=X)
    certificate = verify(model, converted, X)
    assert certificate.ok
    notes = {row.site: (row.note, row.ok) for row in certificate.rows}
    assert notes == {
        "act": ("not evaluated", None),
        ":tanh#0": ("", True),
        ":silu#0": ("not evaluated", None),
    }
    assert "1 of 3 sites evaluated with native off: ok" in certificate.table()


def test_a_site_that_runs_torchs_own_op_is_not_evaluated(monkeypatch):
    model = nn.Sequential(nn.SiLU())
    converted = convert(model, inputs=X)
    monkeypatch.setattr(function, "takes_native", lambda name: True)  # whatever the backend
    certificate = verify(model, converted, X)
    assert certificate.failed == {"0": "0 was not evaluated: torch's own op ran."}
    assert [(row.note, row.ok) for row in certificate.rows] == [("not evaluated", None)]


WRITE_IT = (
    "Write it as a function of torch that is one (F.relu, torch.sigmoid), or as a module of its "
    "own, which can stay as it is; strict=False converts the rest unproven."
)
METHOD = (
    "A function that closes over the network (a lambda with self) calls the one it was made for, "
    "not the copy; make it a method."
)


def test_a_nonlinearity_that_is_no_site_fails():
    model = Calls(lambda m, x: x.relu() * (x > 0))
    certificate = verify(model, convert(model, inputs=X, strict=False), X)
    assert set(certificate.failed) == {":gt"}
    message = certificate.failed[":gt"]
    assert message.startswith("gt ran outside the gates, in the network itself (calls: 1). Write")
    assert message.endswith("strict=False converts the rest unproven.")


def test_a_network_that_was_not_converted_fails():
    model = nn.Sequential(nn.SiLU())
    failed = verify(model, model, X).failed
    assert set(failed) == {"0:silu"}
    assert failed["0:silu"].startswith("silu ran outside the gates, in 0 (calls: 1). ")


def test_a_site_that_the_converted_network_does_not_call_fails():
    model = Calls(lambda m, x: x.relu())
    converted = convert(model, inputs=X)
    converted.__class__ = Calls  # its calls are answered no more
    failed = verify(model, converted, X).failed
    assert failed[":relu#0"].startswith(
        ":relu#0 was not evaluated: converted does not call it. A function that closes over"
    )
    assert failed[":relu"].startswith(
        "relu ran outside the gates, in the network itself (calls: 1)"
    )


def test_a_site_that_the_original_does_not_call_fails():
    model = Calls(lambda m, x: m.act(x), act=nn.SiLU())
    converted = convert(model, inputs=X)
    model.f = lambda m, x: x
    assert (
        verify(model, converted, X)
        .failed["act"]
        .startswith("act was not compared: model does not call it. A function that closes over")
    )


def test_a_module_that_is_never_called_is_listed_and_no_failure():
    model = Calls(lambda m, x: F.silu(x), act=nn.SiLU())
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok
    assert [(row.site, row.note, row.calls) for row in certificate.rows] == [
        (":silu#0", "", 1),
        ("act", "never called", 0),
    ]


def test_other_weights_fail_even_where_every_site_is_as_it_should_be():
    model = Calls(lambda m, x: F.gelu(x))
    converted = convert(model, inputs=X)
    with torch.no_grad():
        converted.linear.weight[0, 0] += 1
    certificate = verify(model, converted, X, tol=math.inf)
    assert all(row.ok for row in certificate.rows)
    assert certificate.failed == {
        "weights": "1 weights are not the original's, among them linear.weight."
    }


def test_an_output_that_is_off_fails_though_every_site_is_exact():
    model = Calls(lambda m, x: x.relu())
    converted = convert(model, inputs=X)
    converted.f = lambda m, x: x.relu() + 1
    message = verify(model, converted, X).failed["output"]
    assert message.startswith("the output is off by ")
    assert " of its largest value; 0.000122 is allowed (the original's own rounding" in message
    assert message.endswith("Every site is exact; tol= sets a bound of your own.")


def test_calls_that_are_answered_as_they_come_are_verified():
    model = nn.Sequential(Calls(lambda m, x: F.gelu(x).relu()), nn.Tanh())
    certificate = verify(model, convert(model), X)
    assert certificate.ok
    assert [row.site for row in certificate.rows] == ["0:gelu#0", "0:relu#0", "1"]


def test_masked_rows_and_infinities_compare_equal():
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    mask[2] = -math.inf
    model = Calls(lambda m, x: (x @ x.mT + mask).softmax(-1))
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok
    assert certificate.rows[0].elements == 80  # of 100: one row has nothing left, NaN in both


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: list
    ids: torch.Tensor | None = None


class Structured(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, *, first, other):
        y = self.act(first)
        return {"a": Answer(y, [y, (other["x"] + y,)], y.argmax(-1)), "n": 3}


def test_inputs_may_be_keywords_and_outputs_nested():
    model = Structured(nn.SiLU())
    x = {"first": X, "other": {"x": X}}
    converted = convert(model, inputs=x)
    certificate = verify(model, converted, **x)
    assert certificate.ok
    worst = (model(**x)["a"].logits - nn.functional.silu(X)).abs().max()
    assert certificate.output.max >= worst
    assert certificate.output.rms <= certificate.output.max


def test_inputs_that_a_network_overwrites_are_kept():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Hardswish(inplace=True))
    x = X.clone()
    assert verify(model, convert(model, inputs=x), X).ok
    assert verify(
        Calls(lambda m, x: x.relu_()), convert(Calls(lambda m, x: x.relu_()), inputs=X), X
    ).rows
    y = X.clone()
    verify(model, convert(model, inputs=x), y)
    assert torch.equal(y, X)


def test_hooks_that_change_what_a_module_gets_and_gives_are_no_error_of_the_site():
    model = Calls(lambda m, x: m.act(x), act=nn.SiLU())
    model.act.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.act.register_forward_hook(lambda module, args, output: output + 1)
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok
    assert certificate.rows[0].max < 1e-6


def test_packed_sequences_and_masks_are_verified():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru, self.mha = nn.GRU(6, 6, bidirectional=True), nn.MultiheadAttention(12, 2)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
            y, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0])
            mask = torch.ones(len(y), len(y)).triu(1).bool()
            return self.mha(y, y, y, attn_mask=mask)

    model = Packed().eval()
    x = (X, torch.tensor([4, 3, 2, 2, 1]))
    certificate = verify(model, convert(model, inputs=x), *x)
    assert certificate.ok, certificate.table()
    assert [row.kind for row in certificate.rows] == ["gru", "multi_head_attention_forward"]


def test_verify_leaves_modes_and_the_backend_alone():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.SiLU()).train()
    converted = convert(model.eval(), inputs=X).train()
    model.train()
    before = kernels.backend()
    assert verify(model, converted, X).ok
    assert model.training
    assert converted[1].training
    assert kernels.backend() == before


def test_random_numbers_are_the_same_for_both():
    model = Calls(lambda m, x: F.silu(x + torch.randn_like(x)))
    assert verify(model, convert(model, inputs=X), X).ok


def test_a_network_of_other_modules_is_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    message = "verify: converted was not made from model: it has no module '2'."
    with pytest.raises(ValueError, match=re.escape(message)):
        verify(model, convert(model[:2], inputs=X), X)


def test_the_table_is_pinned():
    model = nn.Sequential(nn.ReLU(), nn.GELU(), nn.SiLU())
    x = torch.linspace(-1, 1, 9)
    certificate = verify(
        model, convert(model, {"2": None}, inputs=x), x, metric=("high", lambda y: y > 0.3)
    )
    assert (
        certificate.table()
        == """\
site  kind  K  max      rms      rel      ulp      bound     calls  class
----  ----  -  -------  -------  -------  -------  --------  -----  -------------
0     relu  2  0        0        0        bitwise  8 ulp     1      exact
1     gelu  5  4.9e-05  2.5e-05  6.8e-05           0.01 rel  1      approximate
2     silu                                                   1      not evaluated

output: max 4.17e-05, max|d|/max|y| 7.09e-05 (0.01 allowed), rms 1.84e-05
high: 0.222222 -> 0.222222, difference +0 [-0.1782, +0.1782] (95 %), equal on 100.00% of 9
holds for every input: 1 of 2 sites (on record, see tg prove); on these inputs: 1, and the output
2 of 3 sites evaluated with native off: ok"""
    )
    assert str(certificate) == certificate.table()


def test_the_table_stays_within_100_columns():
    model = nn.Sequential(
        nn.ModuleDict({"a_rather_long_name": nn.ModuleDict({"and_another_one": Calls(functional)})})
    )
    inner = model[0]["a_rather_long_name"]["and_another_one"]
    model.forward = lambda x: inner(x)
    for each in (model, *EXACT):
        network = model if each is model else EXACT[each][0]().eval()
        x = X if each is model else EXACT[each][1]
        certificate = verify(
            network,
            convert(network, inputs=x, strict=False),
            x,
            metric=("a long name" * 5, lambda y: torch.ones(2)),
        )
        failed = dataclasses.replace(certificate, failed={"a": "a long message " * 10})
        assert max(map(len, failed.table().splitlines())) <= 100


def test_a_certificate_is_json():
    model = nn.Sequential(nn.ReLU())
    converted = convert(model, inputs=X)
    converted[0].register_forward_hook(lambda module, args, output: output / 0)
    certificate = verify(model, converted, X, metric=lambda y: y.sum((1, 2)))
    data = json.loads(certificate.to_json())
    assert data["output"]["max"] == "inf"
    assert data["ok"] is False
    assert data["rows"][0]["site"] == "0"
    assert data["metric"]["name"] == "<lambda>"


def test_verifying_a_networks_own_gates_compares_them_with_themselves():
    model = nn.Sequential(Activation("gelu_k2"), nn.ReLU())
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok
    assert all(row.bitwise for row in certificate.rows)


def test_the_metric_sees_the_outputs_of_both():
    model = nn.Sequential(nn.Linear(6, 3), nn.GELU())
    labels = torch.arange(20) % 3
    x = torch.randn(20, 6)

    def accuracy(y):
        return y.argmax(-1) == labels

    certificate = verify(model, convert(model, inputs=x), x, metric=accuracy)
    assert certificate.metric.name == "accuracy"
    assert certificate.metric.baseline == accuracy(model(x)).double().mean().item()
    assert certificate.metric.n == 20


# What a site may be off, relative to what it gives

SMALL = {"softsign": nn.Softsign, "selu": nn.SELU, "elu": nn.ELU, "gelu": nn.GELU, "celu": nn.CELU}


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("name", SMALL)
def test_default_instances_are_within_a_hundredth_of_what_they_give(name, size):
    model = nn.Sequential(SMALL[name]())
    certificate = verify(model, convert(model, inputs=X * size), X * size)
    (row,) = certificate.rows
    assert not row.exact
    assert row.bound == 0.01
    assert row.rel_rms <= (7.6e-3 if name == "softsign" else 3e-4)
    assert certificate.output.relative <= 0.01


def test_a_site_that_is_good_over_the_line_and_bad_on_what_it_sees_is_refused():
    """A slope of 0.6 at 0 is off by 0.2 at most, and by 40 % of a small input."""
    model, flat = nn.Sequential(nn.Softsign()), TG(1.2, 0, (0, 0), (-1, 1))
    x = X * 1e-2
    with pytest.raises(ConversionError) as caught:
        convert(model, {"0": flat}, inputs=x)
    message = str(caught.value)
    assert message.startswith(
        "0 (softsign, K = 2) is off by 0.38 of what it gives here (RMS); 0.01"
    )
    assert "`tg.calibrate`" in message
    assert "sites={'0': K}" in message
    assert caught.value.site == "0"


def test_the_callers_tol_is_for_sites_too_and_the_table_says_so():
    model, flat = nn.Sequential(nn.Softsign()), TG(1.2, 0, (0, 0), (-1, 1))
    converted = convert(model, {"0": flat}, inputs=X * 1e-2, tol=math.inf)
    certificate = verify(model, converted, X * 1e-2, tol=math.inf)
    assert certificate.ok
    assert certificate.rows[0].note == "accepted by tol=inf"
    assert "accepted by tol=inf), rms" in certificate.table()
    assert not verify(model, converted, X * 1e-2, tol=0.37).ok
    assert verify(model, converted, X * 1e-2, tol=0.45).ok
    assert set(verify(model, converted, X * 1e-2, tol=0.37).failed) == {"0"}


def test_tol_does_not_excuse_an_instance_that_is_not_what_it_says():
    model = nn.Sequential(nn.GELU())
    converted = convert(model, inputs=X)
    with torch.no_grad():
        converted[0].s.mul_(1.01)
    assert set(verify(model, converted, X, tol=math.inf).failed) == {"0"}


@pytest.mark.parametrize("tol", [math.nan, -1e-3, "1e-2", True, 1j])
def test_a_tol_that_is_no_bound_is_refused(tol):
    model = nn.Sequential(nn.ReLU())
    with pytest.raises(ValueError, match=r"tol must be a number >= 0") as caught:
        convert(model, inputs=X, tol=tol)
    assert str(caught.value).endswith(f"or None; got {tol!r}.")


# The class of a site that is no element-wise function: (a call, an error within its ulp, one beyond)
WHOLE = {
    "softmax": (lambda m, x: x.softmax(-1), 5e-7, 1e-5),
    "scaled_dot_product_attention": (
        lambda m, x: F.scaled_dot_product_attention(x, x, x),
        3e-6,
        8e-5,
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_softmax_and_sums_are_held_to_their_ulp(kind, monkeypatch):
    f, within, beyond = WHOLE[kind]
    model = Calls(f)
    converted, answer = convert(model, inputs=X), site_error.answer
    for error, names in ((within, set()), (beyond, {f":{kind}#0"})):
        monkeypatch.setattr(site_error, "answer", lambda *call, e=error: answer(*call) * (1 + e))
        certificate = verify(model, converted, X)
        assert set(certificate.failed) == names
        assert certificate.rows[0].bound == {"softmax": 16}.get(kind, 64)


# In 16 bits, where the original rounds as coarsely: (ulp allowed, an error within, one beyond)
HALF = {"softmax": (2, 4e-3, 0.06), "scaled_dot_product_attention": (4, 8e-3, 0.15)}


@pytest.mark.parametrize("kind", HALF)
def test_softmax_and_sums_are_held_to_their_ulp_in_16_bits(kind, monkeypatch):
    ulps, within, beyond = HALF[kind]
    model, x = Calls(WHOLE[kind][0]).bfloat16(), X.bfloat16()
    converted, answer = convert(model, inputs=x), site_error.answer
    for error, names in ((within, set()), (beyond, {f":{kind}#0"})):
        monkeypatch.setattr(site_error, "answer", lambda *call, e=error: answer(*call) * (1 + e))
        certificate = verify(model, converted, x)
        assert set(certificate.failed) == names
        assert certificate.rows[0].bound == ulps


# Nothing seen


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_that_are_not_finite_prove_nothing(value):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.GELU())
    x = torch.full((4, 6), value)
    converted = convert(model, inputs=X)
    certificate = verify(model, converted, x)
    assert not certificate.ok
    assert certificate.output is None or value == math.inf
    if math.isnan(value):
        assert certificate.failed["1"] == (
            "nothing was compared at 1: none of its 24 values is finite; give inputs with finite "
            "elements that reach it."
        )
        with pytest.raises(ConversionError, match="nothing was compared at 1"):
            convert(model, inputs=x)


def test_an_empty_batch_proves_nothing():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.SiLU())
    certificate = verify(model, convert(model, inputs=X), torch.zeros(0, 6))
    assert certificate.unseen == ("1", "2")
    assert certificate.failed["sites"] == (
        "nothing was compared: none of 2 sites was evaluated on these inputs; give inputs with "
        "elements that reach the sites."
    )
    assert "0 of 2 sites evaluated with native off: 2 failed" in certificate.table()
    with pytest.raises(ConversionError, match="nothing was compared"):
        convert(model, inputs=torch.zeros(0, 6))


def test_of_a_partly_finite_input_the_finite_elements_count():
    model = nn.Sequential(nn.SiLU(), nn.GELU())
    x = X.clone()
    x[0] = math.nan
    certificate = verify(model, convert(model, inputs=X), x)
    assert certificate.ok
    assert [row.elements for row in certificate.rows] == [90, 90]
    assert certificate.output.elements == 90
    plain = verify(model, convert(model, inputs=X), x[1:])
    assert certificate.rows[1].rms == plain.rows[1].rms


def test_what_no_input_reached_is_named_in_the_table():
    model = Calls(lambda m, x: F.silu(x), act=nn.SiLU())
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok
    assert certificate.unseen == ("act",)
    assert "not seen on these inputs: act\n" in certificate.table()
    assert "1 of 2 sites evaluated" in certificate.table()


@pytest.mark.filterwarnings("ignore:convert. these inputs do not reach:UserWarning")
def test_a_site_that_was_called_without_a_value_is_not_seen():
    """As an expert that gets no token."""
    model = Calls(lambda m, x: F.silu(x) + m.act(x[:0]).sum(), act=nn.GELU())
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok
    assert certificate.unseen == ("act",)


def test_the_certificate_says_what_holds_for_every_input():
    model = Calls(lambda m, x: m.act(F.gelu(x).relu()).softmax(-1), act=nn.Tanh())
    certificate = verify(model, convert(model, inputs=X), X)
    assert {row.site: row.scope for row in certificate.rows} == {
        ":gelu#0": "these inputs",
        ":relu#0": "every input",
        "act": "every input",
        ":softmax#0": "these inputs",
    }
    assert "holds for every input: 2 of 4 sites" in certificate.table()


def test_what_bends_beside_the_gates_is_in_the_table():
    model = Calls(lambda m, x: F.silu(x).sin() + torch.from_numpy(x.numpy()))
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.beside == (
        "not linear beside the gates: sin 1; not looked at: numpy in the network itself"
    )
    assert certificate.beside in certificate.table()


def test_buffers_that_are_nan_are_equal():
    model = Calls(lambda m, x: x.relu())
    model.register_buffer("unset", torch.full((2,), math.nan))
    assert verify(model, convert(model, inputs=X), X).ok


# The original as it is used


def padded_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    pad = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    given = {"src": torch.randn(3, 5, 8), "src_key_padding_mask": pad}
    return nn.TransformerEncoder(layer, 2).eval(), given


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_path_that_torch_takes_only_unwatched_is_no_match_for_the_gates():
    """torch's fused path gives 0 at padded positions."""
    model, given = padded_encoder()
    with pytest.raises(ConversionError, match=r"mha\.set_fastpath_enabled\(False\)") as caught:
        convert(model, inputs=given)
    assert caught.value.site == "watching"
    certificate = verify(model, convert(model, inputs=given, strict=False), **given)
    assert list(certificate.failed) == ["watching", "output"]
    assert certificate.output.relative > 0.5
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert verify(model, convert(model, inputs=given), **given).ok
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_a_network_that_asks_who_looks_does_not_pass():
    class Sly(nn.Module):
        def forward(self, x):
            return x.relu() + (torch._C._len_torch_function_stack() == 0)

    failed = verify(Sly(), convert(Sly(), inputs=X, strict=False), X).failed
    assert set(failed) == {"watching", "output"}


# What is no site, and what is wrong with it


def with_tensors():
    model = Calls(lambda m, x: x.relu() * m.scale)
    model.scale, model.more = torch.ones(6), {"a": [torch.zeros(2)]}
    model.register_buffer("offset", torch.zeros(6))
    return model


CHANGES = {
    "deleted": (lambda m: delattr(m, "offset"), "converted has no offset, which model has."),
    "added": (
        lambda m: m.add_module("late", nn.Linear(2, 2)),
        "converted has late.weight, late.bias, which model does not have.",
    ),
    "attribute": (lambda m: m.scale.fill_(7.0), "1 weights are not the original's, among"),
    "in a dict": (lambda m: m.more["a"][0].fill_(7.0), "them more."),
    "buffer": (lambda m: m.offset.fill_(1.0), "them offset."),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_tensor_differs_is_named(change):
    model = with_tensors()
    converted = convert(model, inputs=X)
    assert verify(model, converted, X).ok
    apply, said = CHANGES[change]
    apply(converted)
    assert said in verify(model, converted, X).failed["weights"]


def test_what_a_run_leaves_in_a_module_is_no_difference():
    class Keeps(Calls):
        def forward(self, x):
            self.last = super().forward(x)
            self.total.add_(1)
            return self.last

    model = Keeps(lambda m, x: x.relu())
    model.last, model.total = None, torch.zeros(())
    converted = convert(model, inputs=X)
    converted(X)
    assert converted.total == 1
    assert verify(model, converted, X).ok


def test_networks_of_two_types_are_refused_in_words():
    model = nn.Sequential(nn.Linear(6, 6), nn.SiLU())
    converted = convert(model, inputs=X)
    with pytest.raises(
        ValueError, match=r"not of one type: 0\.weight is torch\.float32 on cpu and"
    ):
        verify(model, converted.double(), X)


def test_a_converted_network_that_does_not_run_is_refused_in_words():
    model = Calls(lambda m, x: x.relu())
    converted = convert(model, inputs=X)
    converted.f = lambda m, x: x.relu() @ torch.ones(2)
    with pytest.raises(ValueError, match=r"converted does not run where model does \(RuntimeErr"):
        verify(model, converted, X)


def test_a_site_that_gives_zero_throughout_has_no_error_relative_to_it():
    model = Calls(lambda m, x: (x * 0).tanh() + x)
    certificate = verify(model, convert(model, inputs=X), X)
    assert certificate.ok
    assert certificate.rows[0].rel_rms == 0.0
    assert "nan" not in certificate.table()


@pytest.mark.parametrize("f", [torch.sigmoid, torch.tanh, torch.erf])
def test_a_nonlinearity_of_whole_numbers_does_not_pass_unseen(f):
    model = Calls(lambda m, x: f((x * 3).long()) + x.relu())
    with pytest.raises(ConversionError, match=r"ran outside the gates.* of floating-point numbers"):
        convert(model, inputs=X)


@pytest.mark.parametrize("options", [{}, {"inputs": X, "strict": False}])
def test_a_tol_that_nothing_would_be_held_to_is_refused(options):
    with pytest.raises(ValueError, match=r"tol=0\.1 needs inputs= and strict=True"):
        convert(nn.Sequential(nn.ReLU()), tol=0.1, **options)


def test_a_network_without_a_site_is_not_blamed_on_its_inputs():
    model = nn.Sequential(nn.Linear(6, 6))
    assert verify(model, model, X).failed == {
        "sites": "nothing was compared: converted has no site, all of it stays as it was."
    }


class Around(nn.Module):
    """A linear layer and what a subclass makes of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Mapped(Around):
    def forward(self, x):
        return torch.vmap(lambda z: F.silu(self.linear(z)))(x) + torch.relu(x)


def test_a_call_whose_values_a_transform_hides_is_refused_with_ways_out_that_work():
    x, network = torch.randn(4, 8), Mapped()
    with pytest.raises(ConversionError, match=r"Inside torch\.vmap.*strict=False converts"):
        convert(network, inputs=x)
    gated = convert(network, inputs=x, strict=False)
    with kernels.use("reference"):
        torch.testing.assert_close(gated(x), network(x))
    left = convert(network, {":silu#0": None}, inputs=x)
    assert torch.equal(left(x), network(x))


class Forces(Around):
    """The gradient of an energy, as in molecular dynamics."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = F.silu(self.linear(x)).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


class Slopes(Around):
    def forward(self, x):
        return torch.func.grad(lambda z: torch.tanh(self.linear(z)).sum())(x)


class Jacobian(Around):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def forward(self, x):
        return torch.func.jacrev(lambda z: self.act(self.linear(z)))(x[0])


@pytest.mark.parametrize("kind", [Forces, Slopes, Jacobian])
def test_a_network_that_differentiates_is_certified_and_says_what_was_not_looked_at(kind):
    x, network = torch.randn(4, 8), kind()
    gated = convert(network, inputs=x)
    certificate = verify(network, gated, x)
    assert certificate.ok
    assert [row.calls for row in certificate.rows] == [1]
    assert "not looked at: derivatives in the network itself" in certificate.beside
    with kernels.use("reference"):
        torch.testing.assert_close(gated(x), network(x))


class Hooked(Around):
    def __init__(self, which):
        super().__init__()
        if which == "before":
            self.linear.register_forward_pre_hook(lambda module, args: (torch.tanh(args[0]),))
        elif which == "after":
            self.linear.register_forward_hook(lambda module, args, y: torch.tanh(y))
        else:
            self.register_forward_hook(lambda module, args, y: torch.tanh(y))

    def forward(self, x):
        return torch.relu(self.linear(x))


@pytest.mark.parametrize("which", ["before", "after"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_what_a_hook_of_a_part_calls_is_a_site_of_who_calls_the_part(which, backend):
    x, network = torch.randn(4, 8), Hooked(which)
    gated = convert(network, inputs=x)
    assert {row.site for row in verify(network, gated, x).rows} == {":tanh#0", ":relu#0"}
    with kernels.use(backend):
        torch.testing.assert_close(gated(x), network(x))


def test_what_no_gate_answers_says_why_and_what_would_help():
    x = torch.randn(4, 8)
    with pytest.raises(ConversionError, match=r"tanh ran outside .* not in a hook of the whole"):
        convert(Hooked("root"), inputs=x)
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    (said,) = verify(network, network, x).failed.values()
    assert said.endswith("has no gate at all: give the one that `tg.convert` made of model.")


def test_a_list_that_holds_itself_is_no_obstacle():
    class Cyclic(Around):
        def __init__(self):
            super().__init__()
            self.steps = [torch.ones(2), {}]
            self.steps[1]["all"] = self.steps

        def forward(self, x):
            return torch.relu(self.linear(x))

    x, network = torch.randn(4, 8), Cyclic()
    assert torch.equal(convert(network, inputs=x)(x), network(x))
