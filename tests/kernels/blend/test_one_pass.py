"""Soft gates as compiled C: right to float32 everywhere, on any number of threads, or left to torch."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from threshold_gating import TAXONOMY, TG, Activation, kernels
from threshold_gating.kernels import compiler
from threshold_gating.kernels.backend import BackendError
from threshold_gating.kernels.blend import cpu, one_pass, tiles
from threshold_gating.kernels.structure import Gate, exact

works, said = one_pass.status()
pytestmark = pytest.mark.skipif(not works, reason=said)

GELU = TAXONOMY["gelu"]
LEARNED = ("tau", "theta", "s", "c")
# One for each way of gates: K = 2, about the middle, one tau, a tau for each threshold, the same
# from either end, with constants, thresholds out of order.
KEYS = ("silu", "tanh", "mish", "gelu", "gelu_tanh", "gelu_k4", "softplus", "dsilu", "elu_k4")
OWN = TG((1.5, 2.0, 1.4), (-2.0, 0.1, 2.0), (0.2, -0.3, 1.2, 1.0), (0.1, 0.5, -0.4, 0.3))
INSTANCES = {key: TAXONOMY[key] for key in KEYS} | {"own": OWN}


@pytest.fixture
def no_tiles(monkeypatch):
    """Whatever is left to torch fails."""

    def refused(*args):
        raise AssertionError("tiles were asked")

    for name in ("forward", "backward"):
        monkeypatch.setattr(tiles, name, refused)


@pytest.mark.parametrize("name", INSTANCES)
def test_values_and_slopes_are_those_of_float64(name, no_tiles):
    t = INSTANCES[name]
    x = torch.linspace(-30, 30, 20_011, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    y, want = kernels.blend(x, t), t(wide)
    slopes = [torch.autograd.grad(v.sum(), at)[0] for v, at in ((y, x), (want, wide))]
    # an argument of 100 is off by its rounding, 6e-6; branches are up to 4
    for have, right in ((y.detach(), want.detach()), slopes):
        assert float(((have - right).abs() / (1 + right.abs())).max()) < 4e-6


@pytest.mark.parametrize("key", ["silu", "mish", "gelu", "gelu_k4", "gelu_tanh"])
def test_far_out_the_gate_that_wins_is_all_there_is(key, no_tiles):
    x = torch.tensor([40.0, 1e3, 1e30, 3e38], requires_grad=True)
    for sign, want in ((1, 1.0), (-1, 0.0)):
        y = kernels.blend(x * sign, TAXONOMY[key])
        far = slice(None if sign > 0 else 1, None)  # silu(-40) is 2e-16
        assert y[far].tolist() == (x * sign * want)[far].tolist()
        assert torch.autograd.grad(y.sum(), x)[0][1:].tolist() == [want * sign] * 3


def test_a_gate_that_is_nearly_shut_keeps_its_digits(no_tiles):
    x = torch.linspace(-80, -10, 1001)
    y, want = kernels.blend(x, TG(1, 0, (0, 1), (0, 0))), x.double() * x.double().sigmoid()
    assert float(((y - want) / want).abs().max()) < 80 * 1.2e-7  # the rounding of an argument


@pytest.mark.parametrize("name", INSTANCES)
def test_strange_numbers_are_what_they_are_to_tiles(name, monkeypatch):
    t = INSTANCES[name]
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1e30, -3e38])
    y = [kernels.blend(x, t), kernels.blend(x[3:], t)]
    monkeypatch.setattr(one_pass, "ready", lambda *given: None)
    want = kernels.blend(x, t)
    torch.testing.assert_close(y[0], want, rtol=2e-6, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(y[1], want[3:], rtol=2e-6, atol=1e-7)


def test_one_strange_number_does_not_change_the_others():
    x = torch.randn(50_000)
    y = kernels.blend(x, TAXONOMY["gelu"])
    x[777] = math.nan
    torch.testing.assert_close(kernels.blend(x, TAXONOMY["gelu"])[:777], y[:777])


def gradients(act, x, dy):
    return torch.autograd.grad(act(x), [x, *act.parameters()], dy)


CASES = [("silu", "layer"), ("gelu", "channel"), ("gelu_tanh", "channel"), ("mish", "neuron")]


def case(key, share, shape=(3, 40, 17, 23), dtype=torch.float32):
    channels = {"layer": None, "channel": shape[1], "neuron": shape[1:]}[share]
    act = Activation(key, share=share, channels=channels, train=LEARNED)
    with torch.no_grad():
        for p in act.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = torch.randn(shape).to(dtype).requires_grad_()
    return act, x, torch.randn(shape).to(dtype)


@pytest.mark.parametrize(("key", "share"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_learned_gates_have_the_gradients_of_tiles(key, share, dtype, monkeypatch):
    act, x, dy = case(key, share, dtype=dtype)
    with torch.no_grad():
        act.rho.view(-1)[0] = -7.5  # beyond its bound it has no gradient
    found = [act(x), *gradients(act, x, dy)]
    monkeypatch.setattr(one_pass, "ready", lambda *given: None)
    for have, want in zip(found, [act(x), *gradients(act, x, dy)], strict=True):
        narrow = have.dtype != torch.float32
        size = float(want.detach().abs().max())  # a sum over up to 47,000 elements, or one rounding
        atol = size * (torch.finfo(dtype).eps if narrow else 2e-5)
        torch.testing.assert_close(have, want, rtol=0, atol=atol)
    at = [name for name, _ in act.named_parameters()].index("rho")
    assert found[2 + at].view(-1)[0] == 0


@pytest.mark.parametrize(("key", "share"), CASES)
def test_threads_and_chunks_do_not_change_what_comes_out(key, share, monkeypatch, no_tiles):
    act, x, dy = case(key, share)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([act(x), *gradients(act, x, dy)])
    finally:
        torch.set_num_threads(before)
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )
    for chunk, columns, groups in ((1, 1, 1), (7, 3, 2), (2000, 16, 3), (10**6, 10**6, 10**6)):
        monkeypatch.setattr(one_pass, "_CHUNK", chunk)
        monkeypatch.setattr(one_pass, "_COLUMNS", columns)
        monkeypatch.setattr(one_pass, "_GROUPS", groups)
        one_pass._cut.cache_clear()
        for have, want in zip([act(x), *gradients(act, x, dy)], found[0], strict=True):
            # the same terms in another order
            torch.testing.assert_close(
                have, want, rtol=0, atol=2e-5 * float(want.detach().abs().max())
            )
    one_pass._cut.cache_clear()


@pytest.mark.parametrize("last", [0, 15, 16, 17, 390])
@pytest.mark.parametrize("backward", [False, True])
def test_a_strange_number_anywhere_in_a_run_is_reported(last, backward, monkeypatch):
    asked = []
    for name in ("forward", "backward"):
        given = getattr(tiles, name)
        monkeypatch.setattr(tiles, name, lambda *a, f=given: asked.append(f) or f(*a))
    for share in ("layer", "channel"):
        act, x, dy = case("silu", share)
        y = act(x)
        (dy if backward else x.data).view(3, 40, 391)[1, 38, last] = math.inf
        assert not asked
        torch.autograd.grad(y, [x, *act.parameters()], dy) if backward else act(x)
        assert asked
        asked.clear()


def test_few_and_many_branches_are_taken(no_tiles):
    x = torch.linspace(-9, 9, 999)
    for K in (2, 3, 6, 8):
        theta = tuple(k - K / 2 for k in range(K - 1))
        t = TG(1.3, theta, tuple(k / K for k in range(K)), tuple((-1.0) ** k for k in range(K)))
        torch.testing.assert_close(kernels.blend(x, t).double(), t(x.double()), rtol=0, atol=3e-6)


def test_weights_that_leave_float32_are_left_to_torch():
    far = TG(4.0, (-40.0, 0.0, 40.0), (0.0, 0.3, 0.7, 1.0), (0.0,) * 4)
    assert one_pass._known(exact(far), torch.float32) is None
    x = torch.linspace(-60, 60, 1001)
    torch.testing.assert_close(kernels.blend(x, far), far(x.double()).float(), rtol=1e-5, atol=1e-5)


def test_parameters_of_another_type_or_layout_are_read_as_they_are(no_tiles):
    act = Activation("silu", share="channel", channels=4, train=LEARNED)
    x, want = torch.randn(5, 4), None
    with torch.no_grad():
        act.dtheta += torch.arange(4.0)
        want = act(x)
        act.dtheta.data = torch.stack([act.dtheta.data] * 2, -1)[..., 0]  # not contiguous
        act.tau0 = act.tau0.double()
        assert torch.equal(act(x), want)


def test_a_view_that_negates_is_not_taken_for_its_memory():
    z = torch.randn(64, dtype=torch.complex64)
    lazy, t = z.conj().imag, TAXONOMY["gelu"]
    assert lazy.is_neg()
    torch.testing.assert_close(kernels.blend(lazy, t), kernels.blend(lazy.resolve_neg(), t))


def test_whoever_looks_at_ops_sees_those_of_the_gates_and_of_their_gradients():
    seen = []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(9, requires_grad=True)
    y = kernels.blend(x, GELU)
    want = [y, torch.autograd.grad(y, x, torch.ones(9), retain_graph=True)[0]]
    found = []
    for look in (
        lambda: kernels.blend(x.detach(), GELU),
        lambda: torch.autograd.grad(y, x, torch.ones(9))[0],
    ):
        with Looking():
            found.append(look())
        assert torch.ops.aten.exp2_.default in seen
        seen.clear()
    torch.testing.assert_close(found, want)


def test_gradients_without_memory_are_left_to_torch():
    act, x, _ = case("gelu", "layer", (3, 5, 2, 2))
    for held in ([x], [x, *act.parameters()]):
        zeros = torch.autograd.grad(act(x), held, torch._efficientzerotensor(x.shape))
        assert not any(map(torch.any, zeros))
    y = act(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        (dx,) = torch.autograd.grad(y, x, torch.ones(x.shape))
    assert (type(dx), dx.shape) == (FakeTensor, x.shape)


def test_zeros_without_memory_are_zeros():
    torch.testing.assert_close(kernels.blend(torch._efficientzerotensor(5), GELU), torch.zeros(5))
    act, x = Activation("gelu", train=LEARNED), torch.randn(9)
    want = act(x)
    assert not act.dtheta.any()
    act.dtheta.data = torch._efficientzerotensor(act.dtheta.shape)
    torch.testing.assert_close(act(x), want)


@pytest.mark.parametrize("learned", [False, True])
def test_a_batch_of_gradients_at_once_has_the_gradients_one_by_one(learned):
    x = torch.randn(4, requires_grad=True)
    act = Activation("gelu", train=LEARNED) if learned else lambda x: kernels.blend(x, GELU)
    inputs = [x, *act.parameters()] if learned else [x]
    rows = [torch.autograd.grad(act(x), inputs, dy) for dy in torch.eye(4)]
    found = torch.autograd.grad(act(x), inputs, torch.eye(4), is_grads_batched=True)
    for have, want in zip(found, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(have, torch.stack(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", ["layer", "channel"])
@pytest.mark.parametrize("unpack", [torch.Tensor.contiguous, torch.Tensor.double])
def test_saved_tensors_may_come_back_in_another_type_or_layout(share, unpack):
    act, x, dy = case("gelu", share, (2, 6, 5, 4))
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    want = gradients(act, x, dy)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = act(x)
    torch.testing.assert_close(torch.autograd.grad(y, [x, *act.parameters()], dy), want)


def test_saved_tensors_of_another_size_are_refused():
    x = torch.randn(9000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:1].clone()):
        y = kernels.blend(x, GELU)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.grad(y.sum(), x)


def test_saved_parameters_of_another_size_are_not_written_past():
    act, x, dy = case("silu", "channel")
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t[:, :1].clone() if t is act.s else t
    )
    with hooks:
        y = act(x)
    with pytest.raises(ValueError, match="got tensors of the shapes"):
        torch.autograd.grad(y, [x, *act.parameters()], dy)


def test_each_gradient_is_memory_of_its_own():
    act, x, dy = case("silu", "channel")
    for grad in gradients(act, x, dy):
        assert grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("channels", [63, 64, 65, 200])
def test_a_channel_has_the_same_bits_among_many_and_alone(key, channels, no_tiles):
    torch.manual_seed(0)
    many = Activation(key, share="channel", channels=channels, train=LEARNED)
    for w in many.parameters():
        w.data += 0.1 * torch.randn_like(w)
    x = torch.randn(5, channels, 7)
    y = many(x)
    for k in (0, channels // 2, channels - 1):
        one = Activation(key, share="channel", channels=1, train=LEARNED)
        for name, w in many.named_parameters():
            getattr(one, name).data.copy_(w.data[..., k : k + 1])
        assert torch.equal(y[:, k : k + 1], one(x[:, k : k + 1].contiguous()))


@pytest.mark.parametrize("key", ["silu", "tanh", "mish", "gelu"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["dtheta", "s", "c"])
def test_parameters_that_are_not_finite_are_left_to_torch(key, bad, name, monkeypatch):
    act, x = Activation(key, train=LEARNED), torch.tensor([-3.0, -0.4, 0.0, 0.6, 2.0])
    getattr(act, name).data.view(-1)[0] = bad
    y = act(x)
    assert not math.isnan(bad) or (name == "dtheta") <= bool(y.isnan().all())
    monkeypatch.setattr(one_pass, "ready", lambda *given: None)
    assert torch.equal(y.nan_to_num(7.0), act(x).nan_to_num(7.0))


@pytest.mark.parametrize("rest", [{"s": 1e-8}, {"c": 1e-8}, {"c": 0.0}])
def test_a_last_branch_that_is_small_is_all_there_is_far_out(rest, no_tiles):
    rows = {name: (0.0,) + (2.0 * (name in rest),) * 3 + (rest.get(name, 0.0),) for name in "sc"}
    t = TG(1.0, (-4.0, -4 / 3, 4 / 3, 4.0), rows["s"], rows["c"])
    x = torch.tensor([100.0, 1e4])
    torch.testing.assert_close(kernels.blend(x, t), t(x.double()).float(), rtol=3e-7, atol=1e-38)


@pytest.mark.parametrize("tau", [10.0, (8.0, 9.0, 10.0, 11.0)])
def test_thresholds_far_from_0_keep_their_digits(tau, no_tiles):
    t = TG(tau, (999.3, 999.4, 999.6, 999.7), (0.0, 0.5, 0.2, 0.7, 1.0), (0.0,) * 5)
    x = torch.linspace(998, 1002, 801, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    y, want = kernels.blend(x, t), t(wide)
    # x and thresholds are exact to 3e-5, which is 4 tau 3e-5 in an argument; x - mid is exact
    torch.testing.assert_close(y.detach(), want.detach().float(), rtol=3e-6, atol=3e-6)


def test_a_tau_at_the_end_of_float32_is_left_to_torch():
    x = torch.tensor([-1.0, 0.0, 1.0])
    assert kernels.blend(x, TG(3.3e38, 0.0, (0.0, 1.0), (0.0, 0.5))).tolist() == [0.0, 0.25, 1.5]


def test_parameters_of_another_size_are_not_read():
    act = Activation("gelu", train=LEARNED)
    act.s.data = act.s.data[:1].clone()
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        act(torch.randn(5))


def test_folded_parameters_are_not_kept_where_they_are_larger_than_x(monkeypatch, no_tiles):
    act, x, dy = case("gelu", "neuron", (2, 40, 17, 23))
    want = gradients(act, x, dy)
    plan = cpu.plan(act._structure, x.shape, x.stride(), (1, 40, 17, 23))
    assert plan.read(x, act._held(x)[0]).ready is None
    monkeypatch.setattr(cpu, "_MOST_KEPT", 10**9)
    assert plan.read(x, act._held(x)[0]).ready is not None
    assert all(map(torch.equal, gradients(act, x, dy), want))


def test_a_forked_process_computes_the_same_after_threads_ran(with_triton):
    with_triton("forked.py")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("0.240226477f", "0.2405f"),
        ("dx = slope * dy;", "dx = 1.001f * slope * dy;"),
        ("sums[(TURN + m) * stride] += turn[m];", "sums[TURN * stride] += turn[m];"),
        ("const float *q = p + (lane) * i;", "const float *q = p;"),
    ],
)
def test_code_that_is_wrong_is_not_used(tmp_path, monkeypatch, right, wrong):
    source = tmp_path / "blend.c"
    text = one_pass._SOURCE.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler._folder.cache_clear()
    monkeypatch.setattr(one_pass, "_SOURCE", source)
    try:
        found = one_pass.code.__wrapped__(3, int(Gate.ONE_TAU))
    finally:
        compiler._folder.cache_clear()
    assert isinstance(found, str)
    assert "the code that the compiler made is off by" in found


@pytest.mark.parametrize("text", ["int other;", None])
def test_a_source_without_the_functions_is_not_used(tmp_path, monkeypatch, text):
    source = tmp_path / "blend.c"
    if text is not None:
        source.write_text(text)
    monkeypatch.setattr(one_pass, "_SOURCE", source)
    found = one_pass.code.__wrapped__(2, 0)
    assert isinstance(found, str)
    assert ("lacks a function" if text else "nothing can be compiled") in found


def test_what_the_environment_wants_and_cannot_have_is_said(monkeypatch):
    def no_compiler(*given):
        raise compiler.CompilerError("no C compiler was found")

    code = one_pass.code.__wrapped__
    monkeypatch.setattr(one_pass, "library", no_compiler)
    monkeypatch.setattr(one_pass, "code", code)
    assert code(5, 2) == "no C compiler was found"
    assert one_pass.status() == (False, "not compiled: no C compiler was found")
    monkeypatch.setattr(one_pass, "_wanted", "c")
    with pytest.raises(BackendError, match=r"TG_CPU=c asks for compiled gates, but no C compiler"):
        code(5, 2)
    monkeypatch.setattr(one_pass, "_wanted", "torch")
    assert one_pass.status() == (False, "not compiled: TG_CPU=torch")


def test_without_a_compiler_gates_are_what_they_were(monkeypatch):
    x, t = torch.randn(99), TAXONOMY["gelu"]
    want = kernels.blend(x, t)
    monkeypatch.setattr(one_pass, "code", lambda K, gate: "no C compiler was found")
    monkeypatch.setattr(one_pass, "_known", one_pass._known.__wrapped__)
    monkeypatch.setattr(one_pass, "kind_of", one_pass.kind_of.__wrapped__)
    torch.testing.assert_close(kernels.blend(x, t), want)


def test_the_choice_is_checked_in_this_process_too(monkeypatch):
    monkeypatch.setenv("TG_CPU", "C")
    with pytest.raises(BackendError, match=r"TG_CPU is one of auto, torch, c; got 'C'\."):
        one_pass.chosen()
    monkeypatch.setenv("TG_CPU", "")
    assert one_pass.chosen() == "auto"
