"""Gates over their input, whose calls C++ makes: those of a CPU, and those of a GPU step by step."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from tests.kernels.calling import (
    LAST,
    SOFT,
    TOLERANCE,
    Passes,
    channels,
    close,
    gradients,
    images,
    ready,
    reference,
)
from threshold_gating import kernels
from threshold_gating.kernels import host

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.xdist_group("calls"),
]


class Doubled(nn.Module):
    """What gates may overwrite: it is no leaf, and nobody has kept it."""

    def forward(self, x):
        return x * 2.0


def over(name="silu", train=SOFT, **more):
    return nn.Sequential(Doubled(), channels(name, train, inplace=True, **more))


def away(net):
    """The same gates, which leave their input as it is."""
    made = channels()
    made.load_state_dict(net[1].state_dict())
    return made


def is_made_in_cpp(net, x):
    """Whether C++ recorded a call that overwrote its input."""
    z = net[0](x.requires_grad_())
    before = z._version
    y = net[1](z)
    return y is z and z._version > before and y.grad_fn.name() == "BlendBackward"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("name", "train"), [("silu", SOFT), ("gelu", ("tau", "theta"))])
def test_values_and_every_gradient_are_those_of_float64(driver, name, train, dtype):
    kinds = [(images(dtype).to(memory_format=LAST), 1), (images(dtype), 1)]
    for x, axis in [*kinds, (torch.randn(33, 5).to(dtype), -1)]:
        net, dy = over(name, train, axis=axis), torch.randn_like(x)
        ready(driver, net, x)
        have = gradients(net, x, dy)
        assert driver.ran[:2] == ["blend_forward", "blend_backward"]
        assert have[1].stride() == x.stride()
        close(have, reference(net, x, dy), dtype)
        assert is_made_in_cpp(net, x)


@pytest.mark.parametrize("needs", [False, True])
def test_the_original_of_a_lazy_clone_stays_as_it_is(driver, needs):
    net, x = over(), images()
    ready(driver, net, x)
    kept = x.detach().clone()
    with torch.set_grad_enabled(needs):
        clone = torch._lazy_clone(x.requires_grad_(needs))
        y = net[1](clone)
    assert y is clone
    assert not needs or y.grad_fn.name() == "BlendBackward"
    assert torch.equal(x, kept)
    close([y.detach()], [net[1](kept).detach()], torch.float32)


def test_what_is_no_answer_to_whether_x_is_overwritten_is_the_users_error(driver):
    class Unsure:
        def __bool__(self):
            raise LookupError("of the user")

    net, x = over(), images()
    ready(driver, net, x)
    net[1].inplace = Unsure()
    with pytest.raises(LookupError, match="of the user"):
        net(x)


def test_hard_gates_of_a_gpu_are_written_over_their_input(driver):
    if isinstance(driver, Passes):
        pytest.skip("formulas, which C is not for")
    x, dy = images(), images()
    net = ready(driver, over("relu", ("theta", "s")), x)
    close(gradients(net, x, dy), reference(net, x, dy), torch.float32)
    assert is_made_in_cpp(net, x)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_node(driver, off):
    net = over()
    with off():
        net(images())
        driver.ran.clear()
        x = images()
        with kernels.use("reference"):
            want = away(net)(x)
        before = 0 if x.is_inference() else x._version
        y = net[1](x)
        assert y is x
        assert x.is_inference() or x._version == before + 1
    assert driver.ran == ["blend_forward"]
    assert y.grad_fn is None
    torch.testing.assert_close(y, want)


def test_a_call_with_gradients_follows_one_without_and_back(driver):
    net, x, dy = over(), images(), images()
    ready(driver, net, x)
    for _ in range(2):
        with torch.no_grad():
            net(x)
        close(gradients(net, x, dy), reference(net, x, dy), torch.float32)
    assert driver.ran.count("blend_forward") == 4
    assert is_made_in_cpp(net, x)


def test_second_derivatives_are_those_of_the_formulas(driver):
    x, net = images(), over()

    def second(net, x):
        leaf = x.detach().requires_grad_()
        y = net(leaf.sin())
        first = torch.autograd.grad((y * y).sum(), [leaf, *net.parameters()], create_graph=True)
        total = sum([g.square().sum() for g in first])
        return torch.autograd.grad(total, [leaf, *net.parameters()])

    ready(driver, net, x)
    have = second(net, x)
    assert driver.ran[0] == "blend_forward"
    with kernels.use("reference"):
        want = second(copy.deepcopy(net).double(), x.double())
    close(have, want, torch.float32)


def test_what_torch_forbids_stays_forbidden(driver):
    net, leaf = over(), images().requires_grad_()
    ready(driver, net, images())
    act = net[1]
    kept = leaf.exp()  # torch's exp keeps its result
    act(kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    kept = leaf.exp()
    with torch.no_grad():
        act(kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        act(leaf)
    with torch.inference_mode():
        z = images()
    with torch.no_grad(), pytest.raises(RuntimeError, match="outside InferenceMode"):
        act(z)
    y = net(leaf)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_what_cannot_be_saved_is_refused_before_anything_is_written(driver):
    net, x = over("silu", ("s",)), images()
    ready(driver, net, x)
    with torch.inference_mode():
        theta = net[1].theta0.clone()
    net[1]._buffers["theta0"] = theta
    z = x.requires_grad_() * 2.0
    before, version = z.detach().clone(), z._version
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        net[1](z)
    assert z._version == version
    assert torch.equal(z, before)


def test_what_comes_after_may_not_change_what_was_kept(driver):
    net, x, dy = over(), images(), images()
    ready(driver, net, x)
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    want = reference(net, x, dy)
    y.mul_(3.0)  # the gates have a copy of their input
    close([torch.autograd.grad(y, leaf, dy / 3.0)[0]], [want[1]], torch.float32)


def test_a_parameter_that_was_changed_is_refused(driver):
    net, x = over(), images()
    ready(driver, net, x)
    y = net(x.requires_grad_())
    with torch.no_grad():
        net[1].s.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_view_changes_its_base(driver):
    net, leaf = over(), images().requires_grad_()
    ready(driver, net, images()[1:])
    base = leaf * 2.0
    net[1](base[1:])
    want = torch.cat([leaf[:1] * 2.0, away(net)(leaf[1:] * 2.0)])
    torch.testing.assert_close(base, want)
    have = torch.autograd.grad(base.square().sum(), leaf)[0]
    torch.testing.assert_close(have, torch.autograd.grad(want.square().sum(), leaf)[0])


def test_data_that_no_op_made_is_overwritten_and_gates_learn(driver):
    net, x = over(), images()
    ready(driver, net, x)
    z, dy = x.clone(), images()
    y = net[1](z)
    assert y is z
    want = reference(away(net), x, dy)[2:]
    close(torch.autograd.grad(y, [*net.parameters()], dy), want, torch.float32)


def test_hooks_see_their_own_gradients_and_what_is_retained(driver):
    net, x, dy = over(), images(), images().transpose(2, 3).contiguous().transpose(2, 3)
    ready(driver, net, x)
    leaf, seen = x.clone().requires_grad_(), []
    z = net[0](leaf)
    z.register_hook(lambda g: seen.append(("input", g)))
    y = net[1](z)
    y.register_hook(lambda g: seen.append(("output", g)))
    y.retain_grad()
    y.backward(dy)
    assert [name for name, _ in seen] == ["output", "input"]
    assert torch.equal(seen[0][1], dy)
    assert torch.equal(y.grad, dy)
    close([2.0 * seen[1][1]], [reference(net, x, dy)[1]], torch.float32)


def test_hooks_on_saved_tensors_are_asked(driver):
    net, x, dy = over(), images(), images()
    ready(driver, net, x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        have = gradients(net, x, dy)
    assert packed
    close(have, reference(net, x, dy), torch.float32)


@pytest.mark.parametrize("off", [False, True])
def test_where_python_has_to_look_the_input_is_as_it_was(driver, off):
    net, x = over(), images()
    ready(driver, net, x)
    with torch.no_grad() if off else torch.enable_grad():
        if off:
            net(x)
            driver.ran.clear()
        z = x.clone() if off else x.requires_grad_() * 1.0
        if isinstance(driver, Passes):
            with torch.no_grad():
                z[0, 0, 0, :2] = torch.tensor([float("inf"), float("nan")])
        else:
            driver.refuses = True
        with kernels.use("reference"):
            want = away(net)(z.detach())
        y = net[1](z)
    if isinstance(driver, Passes):
        assert set(driver.ran) == {"blend_forward refused"}
    assert y is z
    assert y.isfinite().sum() >= y.numel() - 2
    torch.testing.assert_close(y.detach(), want.detach(), equal_nan=True)


def test_an_input_that_is_the_result_of_gates_may_be_overwritten_again(driver):
    net, x, dy = over(), images(), images()
    ready(driver, net, x)
    twice = nn.Sequential(*net, net[1])
    close(gradients(twice, x, dy), reference(twice, x, dy), torch.float32)
    assert driver.ran[:2] == ["blend_forward"] * 2


def test_a_module_is_called_in_place_while_it_says_so(driver):
    net, x = over(), images()
    ready(driver, net, x)
    for way in (False, True, False):
        net[1].__dict__["inplace"] = way  # past what forgets how the last call was made
        z = x.clone()
        assert (net[1](z) is z) == way
        assert torch.equal(z, x) == (not way)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo detected a call")
@pytest.mark.parametrize(("by", "inplace"), [("C++", False), ("C++", True), ("Python", True)])
def test_compiled_autograd_takes_the_node(driver, monkeypatch, by, inplace):
    if by == "Python":
        monkeypatch.setattr(host, "module", lambda device: None)
    compiled_autograd.reset()
    graphs = []

    def compiler(graph):
        graphs.append(graph)
        return torch.compile(graph, backend="eager")

    def backward(net, x, learns):
        """By a compiled graph, and without one."""
        dy, leaf = torch.randn_like(x), x.detach().clone().requires_grad_()
        for name, p in net.named_parameters():
            p.grad = None
            p.requires_grad_(learns or not name.endswith("s"))
        asked = [leaf, *[p for p in net.parameters() if p.requires_grad]]
        y = net(leaf)
        want = torch.autograd.grad(y, asked, dy, retain_graph=True)
        with compiled_autograd._enable(compiler):
            y.backward(dy)
        for p, w in zip(asked, want, strict=True):
            torch.testing.assert_close(p.grad, w)

    # other gates of the same sizes, other sizes, other needs: none is taken for another
    first, other = (
        nn.Sequential(Doubled(), channels(n, inplace=inplace)) for n in ("silu", "tanh")
    )
    few = nn.Sequential(Doubled(), channels("silu", ("s",), inplace=inplace))
    x, small = images(), images()[:2]
    cases = [(first, x, True), (other, x, True), (first, small, True), (few, x, True)]
    cases += [(first, x, False)]
    for net, z, _ in cases:
        ready(driver, net, z)
    driver.ran.clear()
    for case in cases:
        backward(*case)
    made = len(graphs)
    for case in cases:
        backward(*case)
    assert 0 < made == len(graphs) <= len(cases)  # and found again
    assert ("blend_backward" in driver.ran) == (by == "C++")
