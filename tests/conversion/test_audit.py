"""The audit sees what runs: every nonlinearity left to torch, however it is written, and no other."""

import cProfile
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import kernels
from threshold_gating.conversion import aten_ops, convert
from threshold_gating.conversion.audit import AuditedSite, Op, audit, beside
from threshold_gating.nn import attention, rnn
from threshold_gating.nn.activation import Activation


class Calls(nn.Module):
    """A linear layer and then whatever `f` does, which gets the module and the layer's output."""

    def __init__(self, f, act=None):
        super().__init__()
        self.f = f
        self.linear, self.p = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        self.act = act

    def forward(self, x):
        return self.f(self, self.linear(x))


class SqueezeExcite(nn.Module):
    """A CNN with BatchNorm, an in-place ReLU that is used twice, and a sigmoid gate."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.squeeze = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.act(self.bn(self.conv(x)))
        return self.act(x * self.squeeze(x.mean((2, 3), keepdim=True)).sigmoid() - 0.1)


def functional(self, x):
    x = F.leaky_relu(x, 0.2) + F.gelu(x) + x.tanh() + F.hardtanh(x, 0.0, 2.0)
    x = F.glu(torch.cat([x, x.clamp(min=0)], -1)).softmax(-1).relu_()
    return F.scaled_dot_product_attention(x, x, x)


IMAGE, TOKENS = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 6)
# (network, input, the ops that it leaves to torch before it is converted)
NETWORKS = {
    "cnn": (SqueezeExcite, IMAGE, ["relu", "sigmoid", "relu"]),
    "functional": (
        lambda: Calls(functional),
        TOKENS,
        *[["leaky_relu", "gelu", "tanh", "hardtanh", "clamp", "glu", "_softmax", "relu"]],
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        TOKENS,
        ["_transformer_encoder_layer_fwd"],
    ),
    "lstm": (lambda: nn.LSTM(6, 4, 2), TOKENS, ["mkldnn_rnn_layer"]),
    "gru": (lambda: nn.Sequential(nn.GRU(6, 4)), TOKENS, ["sigmoid", "tanh"]),
    "lstm cell": (lambda: nn.LSTMCell(6, 4), TOKENS[0], ["sigmoid", "tanh"]),
    "test_resnet": (lambda: timm.create_model("test_resnet"), torch.randn(1, 3, 64, 64), ["relu"]),
    "test_vit": (
        lambda: timm.create_model("test_vit", img_size=32),
        torch.randn(1, 3, 32, 32),
        ["_scaled_dot_product_flash_attention_for_cpu", "gelu"],
    ),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_nothing_is_left_after_a_conversion(network):
    make, x, ops_before = NETWORKS[network]
    model = make().eval()
    before = audit(model, x)
    assert {op.op for op in before.left} >= set(ops_before)
    assert before.sites == ()
    converted = convert(model, inputs=x)
    for backend, native in (("auto", True), ("reference", False)):
        with kernels.use(backend):
            after = audit(converted, x)
        assert after.left == ()
        assert all(site.calls for site in after.sites)
        assert any(site.native for site in after.sites) == native
    # nothing else has changed
    assert {op.op for op in after.other} >= {op.op for op in before.other}


def test_a_site_is_native_where_torchs_op_ran_for_it():
    converted = convert(nn.Sequential(nn.SiLU(), nn.GELU(), nn.Softmax(-1)), inputs=TOKENS)
    assert [site.native for site in audit(converted, TOKENS).sites] == [True, False, True]
    with kernels.use("reference"):
        assert not any(site.native for site in audit(converted, TOKENS).sites)


# What a person writes by hand: (function, the op that gives it away)
WRITTEN = {
    "clamp": (lambda m, x: x.clamp(min=0), "clamp"),
    "mask times x": (lambda m, x: x * (x > 0), "gt"),
    "mask as a number": (lambda m, x: (x >= 0).float() * x, "ge"),
    "mask in place": (lambda m, x: x.mul_(x > 0), "gt"),
    "both slopes": (lambda m, x: torch.where(x > 0, 1.0, 0.1) * x, "gt"),
    "other way round": (lambda m, x: x * ~(x < 0), "lt"),
    "where": (lambda m, x: torch.where(x > 0, x, 0), "gt"),
    "masked_fill": (lambda m, x: x.masked_fill(x < 0, 0), "lt"),
    "assignment": (lambda m, x: x.clone().index_put_((x < 0,), torch.tensor(0.0)), "lt"),
    "heaviside": (lambda m, x: x * torch.heaviside(x, m.p.sum() * 0), "heaviside"),
    "sign": (lambda m, x: x * (x.sign() + 1) / 2, "sign"),
    "maximum": (lambda m, x: torch.maximum(x, torch.zeros_like(x)), "maximum"),
    "sigmoid": (lambda m, x: 1 / (1 + torch.exp(-x)), "exp"),
    "sigmoid by power": (lambda m, x: (1 + torch.exp(-x)) ** -1, "exp"),
    "tanh": (lambda m, x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()), "exp"),
    "softmax": (lambda m, x: x.exp() / x.exp().sum(-1, keepdim=True), "exp"),
    "masked softmax": (lambda m, x: (e := x.exp() * m.p.exp()) / e.sum(-1, keepdim=True), "exp"),
    "softplus": (lambda m, x: torch.log(1 + x.exp()), "exp"),
    "softplus by log1p": (lambda m, x: torch.log1p(x.exp()), "exp"),
    "softsign": (lambda m, x: F.softsign(x), "abs"),
    "relu by abs": (lambda m, x: (x + x.abs()) / 2, "abs"),
    "leaky relu by abs": (lambda m, x: 0.6 * x + 0.4 * abs(x), "abs"),
    "relu by abs in place": (lambda m, x: x.abs().add_(x).mul_(0.5), "abs"),
    "negative part by abs": (lambda m, x: -(-x - x.neg().abs()) / 2, "abs"),
    "softmax by log_softmax": (lambda m, x: F.log_softmax(x, -1).exp(), "exp"),
    "softmax by logsumexp": (lambda m, x: (x - x.logsumexp(-1, keepdim=True)).exp(), "exp"),
    "softmax by logarithms": (
        lambda m, x: (x - x.exp().sum(-1, keepdim=True).log()).exp(),
        "exp",
    ),
    "of a list": (lambda m, x: torch.tensor(x.tolist()).relu(), "relu"),
    "of an array": (lambda m, x: torch.tensor(np.asarray(x)).tanh(), "tanh"),
    "erf": (lambda m, x: x * (1 + torch.erf(x)), "erf"),
    "through a view": (lambda m, x: m.p.new_zeros(2, 5, 6).copy_(x).view(-1).relu(), "relu"),
    "written into a slice": (lambda m, x: written_into_slice(x), "relu"),
    "of random numbers": (lambda m, x: torch.rand(6).relu(), "relu"),
    "with an output": (lambda m, x: torch.sigmoid(x, out=torch.zeros(2, 5, 6)), "sigmoid"),
}


def written_into_slice(x):
    y = torch.zeros(2, 5, 6)
    y[:, 1:] = x[:, 1:]
    return y.relu()


@pytest.mark.parametrize("written", WRITTEN)
def test_a_nonlinearity_written_by_hand_is_found(written):
    f, op = WRITTEN[written]
    left = audit(Calls(f), TOKENS).left
    assert op in [each.op for each in left]
    assert {each.module for each in left} == {""}


# What looks like one and is not: (function, the op under `other` or None where nothing is listed)
HARMLESS = {
    "exp of a parameter": (lambda m, x: x * m.p.exp(), None),
    "sigmoid of a parameter": (lambda m, x: x * m.p.sigmoid() * (m.p > 0), None),
    "mask of positions": (lambda m, x: x * (torch.arange(6.0) > 2), None),
    "decay of a state": (lambda m, x: x.exp() * x + x, "exp"),
    "decay taken back": (lambda m, x: x / x.exp(), "exp"),
    "log-sum-exp": (lambda m, x: x - x.exp().sum(-1, keepdim=True).log(), "exp"),
    "count of a mask": (lambda m, x: (x > 0).sum(), "gt"),
    "choice of rows": (lambda m, x: x[x > 0], "gt"),
    "L1 norm": (lambda m, x: x / (x.abs().sum(-1, keepdim=True) + 1e-6), "abs"),
    "guard of a norm": (lambda m, x: F.normalize(x), "clamp_min"),
    "cosine": (lambda m, x: F.cosine_similarity(x, x + 1, dim=-1), "clamp_min"),
    "the larger of two": (lambda m, x: torch.maximum(x, x.flip(-1)), "maximum"),
    "layer norm": (lambda m, x: F.layer_norm(x, (6,)), "native_layer_norm"),
    "rms norm": (lambda m, x: F.rms_norm(x, (6,)), "rsqrt"),
    "pooling": (lambda m, x: F.max_pool1d(x, 2), "max_pool2d_with_indices"),
    "rotary": (lambda m, x: x * x.cos() + x.flip(-1) * x.sin(), "cos"),
    "log_softmax": (lambda m, x: F.log_softmax(x, -1), "_log_softmax"),
    "abs of something else": (lambda m, x: x + x.flip(-1).abs(), "abs"),
    "products and sums": (lambda m, x: (x @ x.mT * x.sum()).flatten(1).cumsum(-1), None),
}


@pytest.mark.parametrize("harmless", HARMLESS)
def test_what_is_no_nonlinearity_is_other_or_not_listed(harmless):
    f, op = HARMLESS[harmless]
    seen = audit(Calls(f), TOKENS)
    assert seen.left == ()
    assert op in [each.op for each in seen.other] if op else seen.other == ()


LEAST = torch.finfo(torch.float32).min
# Scores taken out of a choice by a comparison, as routers of experts do.
EXCLUDED = {
    "masked_fill": lambda x: x.masked_fill(x < 0, -torch.inf),
    "in place": lambda x: x.clone().masked_fill_(x < 0, -torch.inf),
    "by a tensor": lambda x: x.masked_fill(x < 0, torch.tensor(-torch.inf)),
    "least number": lambda x: x.masked_fill(x.amax(-1, keepdim=True) - x > 0.02, LEAST),
    "where": lambda x: torch.where(x > 0, x, -torch.inf),
    "where not": lambda x: torch.where(x > 0, x.new_full((), LEAST), x),
}


@pytest.mark.parametrize("excluded", EXCLUDED)
def test_a_mask_that_takes_scores_out_of_a_softmax_is_other(excluded):
    model = Calls(lambda m, x: EXCLUDED[excluded](x).softmax(-1))
    seen = audit(convert(model, inputs=TOKENS), TOKENS)
    assert seen.left == ()
    assert [site.kind for site in seen.sites] == ["softmax"]
    assert {op.op for op in seen.other} & {"gt", "lt"}


# The same comparison, where it is a nonlinearity all the same.
SELECTED = {
    "another number": lambda m, x: x.masked_fill(x < 0, -1e30),
    "the other end": lambda m, x: x.masked_fill(x < 0, torch.inf),
    "a learned number": lambda m, x: x.masked_fill(x < 0, m.p.min()),
    "the mask used again": lambda m, x: x * (k := x < 0) + x.masked_fill(k, -torch.inf).softmax(-1),
    "beside it": lambda m, x: x * (x < 0) + x.masked_fill(x > 0, -torch.inf).softmax(-1),
}


@pytest.mark.parametrize("selected", SELECTED)
def test_a_mask_that_selects_data_is_still_left(selected):
    assert "lt" in [op.op for op in audit(Calls(SELECTED[selected]), TOKENS).left]


def test_a_tensor_that_a_module_merely_holds_is_a_constant():
    model = Calls(lambda m, x: x * m.table.relu())
    model.table = torch.randn(6)
    assert audit(model, TOKENS).left == ()


def test_whole_numbers_are_not_looked_at():
    model = Calls(lambda m, x: x)
    model.forward = lambda ids: nn.functional.embedding(
        ids.clamp(max=5) * (ids > 0), model.linear.weight
    )
    assert audit(model, torch.tensor([1, 7])).left == ()


def test_a_nonlinearity_that_makes_other_numbers_of_whole_ones_is_left():
    model = Calls(lambda m, x: torch.sigmoid((x * 3).long()) + (x * 3).long().clamp(min=0))
    assert audit(model, TOKENS).left == (Op("", "sigmoid", 1),)


@torch.library.custom_op("proof::bend", mutates_args=())
def bend(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


def test_an_op_of_another_library_is_listed_with_its_name():
    seen = audit(Calls(lambda m, x: bend(x)), TOKENS)
    assert Op("", "proof::bend", 1) in seen.other
    assert seen.unseen == ("proof::bend in the network itself",)


def test_the_innermost_module_is_named_and_calls_are_counted():
    model = nn.Sequential(Calls(lambda m, x: x.relu().relu().tanh()), nn.Sequential(nn.Tanh()))
    left = audit(model, TOKENS).left
    assert left == (Op("0", "relu", 2), Op("0", "tanh", 1), Op("1.0", "tanh", 1))


def test_each_call_of_a_shared_module_is_a_site():
    seen = audit(convert(SqueezeExcite().eval(), inputs=IMAGE), IMAGE)
    assert [(site.name, site.calls) for site in seen.sites] == [
        ("act", 1),
        (":sigmoid#0", 1),
        ("act#1", 1),
    ]


def test_calls_with_instances_of_their_own_are_told_apart():
    model = SqueezeExcite().eval()
    seen = audit(convert(model, {"act#1": "gelu_k3"}, inputs=IMAGE, strict=False), IMAGE)
    assert [(s.name, s.kind, s.K, s.exact) for s in seen.sites if s.name != ":sigmoid#0"] == [
        ("act", "relu", 2, True),
        ("act#1", "relu", 3, False),
    ]


def test_a_converted_module_that_is_never_called_says_so():
    model = Calls(lambda m, x: F.silu(x), act=nn.SiLU())
    seen = audit(convert(model, inputs=TOKENS), TOKENS)
    assert [(site.name, site.calls) for site in seen.sites] == [(":silu#0", 1), ("act", 0)]
    assert "never called" in str(seen)


def test_what_is_left_alone_on_request_is_left_and_says_that_it_was_asked():
    model = Calls(lambda m, x: m.act(x).tanh() + F.silu(x), act=nn.ReLU())
    converted = convert(model, {"act": None, ":silu#0": None}, inputs=TOKENS)
    seen = audit(converted, TOKENS)
    assert [site.name for site in seen.sites] == [":tanh#0"]
    assert seen.left == (Op("act", "relu", 1, asked=True), Op("", "silu", 1, asked=True))


def test_calls_that_are_answered_as_they_come_are_named_by_their_module():
    model = nn.Sequential(Calls(lambda m, x: x.relu() + F.gelu(x).relu()), nn.Tanh())
    seen = audit(convert(model), TOKENS)
    assert seen.left == ()
    names = [(s.name, s.kind, s.K, s.exact) for s in seen.sites]
    assert names == [
        ("0:relu#0", "relu", 2, True),
        ("0:gelu#0", "gelu", 5, False),
        ("0:relu#1", "relu", 2, True),
        ("1", "tanh", 2, True),
    ]


def test_the_librarys_own_modules_and_functions_are_sites():
    model = Calls(lambda m, x: attention.softmax(m.act(x)), act=Activation("silu", train=("tau",)))
    seen = audit(nn.Sequential(model, rnn.LSTM(6, 4)), TOKENS)
    assert seen.left == ()
    assert [(s.name, s.kind, s.K, s.exact) for s in seen.sites] == [
        ("0.act", "silu", 2, False),
        ("0:softmax#0", "softmax", None, None),
        ("1", "lstm", None, True),
    ]


def test_the_fused_path_of_an_encoder_layer_does_not_slip_past():
    """It needs no call of the activation, which is then converted in vain."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, activation=nn.ReLU()).eval()
    converted = convert(layer, inputs=TOKENS, strict=False)
    converted.__class__ = nn.TransformerEncoderLayer  # whatever kept it from that path
    assert audit(converted, TOKENS).left == (Op("", "_transformer_encoder_layer_fwd", 1),)


def test_an_audit_changes_nothing():
    model = SqueezeExcite().train()
    model.bn.eval()
    x, state = IMAGE.clone(), {k: v.clone() for k, v in model.state_dict().items()}
    start = nn.Sequential(nn.ReLU(inplace=True), model)
    audit(start, x)
    assert torch.equal(x, IMAGE)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training
    assert not model.bn.training
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_inputs_may_be_keywords_and_need_gradients():
    x = (TOKENS.clone().requires_grad_() * 2).relu()
    model = Calls(lambda m, x: x.relu())
    assert len(audit(model, x=x).left) == 1


def test_a_model_that_fails_leaves_no_hook_behind():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        audit(Calls(lambda m, x: x), torch.zeros(2, 5))
    assert not nn.modules.module._global_forward_hooks


def test_only_a_module_can_be_audited():
    with pytest.raises(TypeError) as error:
        audit(torch.relu, TOKENS)
    assert (
        str(error.value)
        == "audit: model must be a torch.nn.Module; got builtin_function_or_method."
    )


def test_the_table_is_pinned():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), Calls(lambda m, x: x * (x > 0))
    )
    text = str(audit(convert(model.eval(), inputs=IMAGE, strict=False), IMAGE))
    assert (
        text
        == """\
site  kind  K  class        ran    calls
----  ----  -  -----------  -----  -----
2     gelu  5  approximate  gates  1

left in  op  calls
-------  --  -----
3        gt  1

other: native_batch_norm 1

1 sites, 1 left, 1 other"""
    )


def test_a_table_stays_within_100_columns_and_keeps_names_whole():
    class Deep(nn.Module):
        def __init__(self, depth):
            super().__init__()
            name = "a_rather_long_name"
            setattr(self, name, Deep(depth - 1) if depth else Calls(functional))
            self.inner = getattr(self, name)

        def forward(self, x):
            return self.inner(x)

    seen = audit(convert(Deep(3), inputs=TOKENS), TOKENS)
    lines = str(seen).splitlines()
    assert max(map(len, lines)) <= 100
    longest = max((site.name for site in seen.sites), key=len)
    assert len(longest) > 100 or longest in str(seen)


def test_an_audit_is_json():
    seen = audit(convert(nn.Sequential(nn.ReLU()), inputs=TOKENS), TOKENS)
    assert seen.sites == (AuditedSite("0", "relu", 2, True, True, 1),)
    site = {"name": "0", "kind": "relu", "K": 2, "exact": True, "native": True, "calls": 1}
    site["learns"] = False
    assert json.loads(json.dumps(seen.to_dict())) == {
        **{"sites": [site], "left": [], "other": [], "unseen": []}
    }


def test_the_closed_list_names_ops_that_exist_and_none_twice():
    listed = [
        name
        for table in (aten_ops.NONLINEAR, aten_ops.OTHER)
        for names in table.values()
        for name in names
    ]
    assert len(listed) == len(set(listed))
    known = {str(schema.name).removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}
    assert set(listed) <= known


# Not linear and no gate for it: (function, what stands in the last line)
BENDING = {
    "sine": (torch.sin, "sin 1"),
    "square": (lambda x: x**2, "pow 1"),
    "arctangent": (torch.atan, "atan 1"),
    "magnitude": (torch.abs, "abs 1"),
    "exponential": (torch.exp, "exp 1"),
    "logarithm": (lambda x: x.abs().log(), "abs 1, log 1"),
    "rounding": (torch.round, "round 1"),
    "root": (lambda x: torch.sqrt(x + 9), "sqrt 1"),
    "inverse": (lambda x: torch.reciprocal(x + 9), "reciprocal 1"),
    "maxout": (lambda x: x.view(2, 5, 3, 2).amax(-1), "amax 1"),
    "maxout by max": (lambda x: x.view(2, 5, 3, 2).max(-1).values, "max 1"),
}


@pytest.mark.parametrize("bending", BENDING)
def test_what_no_gate_stands_for_is_in_the_last_line(bending):
    f, said = BENDING[bending]
    seen = audit(Calls(lambda m, x: f(x)), TOKENS)
    assert seen.left == ()
    n = len(seen.bending)
    last = f"0 sites, 0 left, {n} other, of which {n} not linear ({said})"
    assert str(seen).splitlines()[-1] == last
    assert beside(seen) == f"not linear beside the gates: {said}"


# Norms, means and pooling do not make a network nonlinear in this sense.
NORMS = {
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms by products": lambda x: x * ((x * x).mean(-1, keepdim=True) + 1e-6) ** -0.5,
    "deviation": lambda x: x / torch.sqrt(x.var(-1, keepdim=True) + 1e-6),
    "L1": lambda x: x / x.abs().sum(-1, keepdim=True),
    "L2": lambda x: F.normalize(x + 1, dim=-1),
    "layer": lambda x: F.layer_norm(x, (6,)),
    "pooling": lambda x: F.max_pool1d(x, 2),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_and_pooling_are_other_and_do_not_bend(norm):
    seen = audit(Calls(lambda m, x: NORMS[norm](x)), TOKENS)
    assert seen.other
    assert seen.bending == ()
    assert "not linear" not in str(seen)


def by_thread(x):
    found = []
    thread = threading.Thread(target=lambda: found.append(F.relu(x)))
    thread.start()
    thread.join()
    return found[0]


def by_pool(x):
    with ThreadPoolExecutor(2) as pool:
        return torch.stack(list(pool.map(torch.tanh, x)))


# (function, what was not looked at)
UNSEEN = {
    "numpy": (lambda x: torch.from_numpy(np.maximum(x.numpy(), 0)), "numpy in 0"),
    "array": (lambda x: torch.as_tensor(np.sin(np.asarray(x))), "numpy in 0"),
    "list": (lambda x: torch.tensor(x.tolist()), "Python's numbers in 0"),
    "item": (lambda x: x * max(0.0, x.sum().item()), "Python's numbers in 0"),
    "float": (lambda x: x * abs(float(x.sum())), "Python's numbers in 0"),
    "thread": (by_thread, "torch in other threads"),
    "pool": (by_pool, "torch in other threads"),
}


@pytest.mark.parametrize("unseen", UNSEEN)
def test_what_is_not_looked_at_is_named(unseen):
    f, said = UNSEEN[unseen]
    seen = audit(nn.Sequential(Calls(lambda m, x: f(x))), TOKENS)
    assert seen.unseen == (said,)
    assert f"not looked at: {said}\n" in str(seen)
    assert str(seen).endswith("1 not looked at")
    assert beside(seen) == f"not looked at: {said}"
    assert seen.to_dict()["unseen"] == [said]


def test_control_flow_and_constants_leave_nothing_unseen():
    model = Calls(lambda m, x: x if (x > 0).any() and m.p.sum().item() < 1e9 else -x)
    model.scale = float(np.asarray(model.p.detach())[0])
    assert audit(model, TOKENS).unseen == ()
    positions = Calls(lambda m, x: x[:, : len(torch.arange(5).tolist())])
    assert audit(positions, TOKENS).unseen == ()


def test_an_audit_gives_the_profiler_back():
    def mine(*event):
        pass

    for before in (None, mine):
        sys.setprofile(before)
        threading.setprofile(before)
        try:
            audit(Calls(lambda m, x: x.relu()), TOKENS)
            assert sys.getprofile() is before
            assert threading.getprofile() is before
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def test_what_stands_beside_the_gates_is_nothing_where_all_is_linear():
    assert beside(audit(nn.Linear(6, 6), TOKENS)) == ""
    seen = audit(Calls(lambda m, x: (x * (x > 0)).sin()), TOKENS)
    assert beside(seen) == "not linear beside the gates: sin 1"
    assert [op.op for op in seen.left] == ["gt"]


def test_under_a_profiler_the_audit_says_what_it_cannot_see():
    with cProfile.Profile():
        seen = audit(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(3, 2))
    assert seen.unseen == ("numpy, Python's numbers and other threads, because a profiler is on",)
