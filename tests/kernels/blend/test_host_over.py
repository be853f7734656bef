"""Gates over their input, whose calls C++ makes: those of a CPU, and those of a GPU step by step."""

import copy

import pytest
import torch
from torch._dynamo import compiled_autograd

from tests.kernels.calling import LAST, SOFT, TOLERANCE, Passes, channels, close, images
from threshold_gating import Activation, kernels
from threshold_gating.kernels import host

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.xdist_group("calls"),
]


def over(name="silu", train=SOFT, **more):
    return channels(name, train, inplace=True, **more)


def results(act, x, dy):
    """y over 2 x and every gradient, and who goes back."""
    leaf = x.detach().clone().requires_grad_()
    z = leaf * 2.0
    before = z._version
    y = act(z)
    assert y is z
    assert z._version > before
    return [y.detach(), *torch.autograd.grad(y, [leaf, *act.parameters()], dy)], y.grad_fn.name()


def exact(act, x, dy):
    with kernels.use("reference"):
        return results(copy.deepcopy(act).double(), x.double(), dy.double())[0]


def ready(driver, act, x):
    """The module after a call with its backward pass: C++ makes the next one."""
    results(act, x, torch.randn_like(x))
    driver.ran.clear()
    return act


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("name", "train"), [("silu", SOFT), ("gelu", ("tau", "theta"))])
def test_values_and_every_gradient_are_those_of_float64(driver, name, train, dtype):
    kinds = [(images(dtype).to(memory_format=LAST), 1), (images(dtype), 1)]
    for x, axis in [*kinds, (torch.randn(33, 5).to(dtype), -1)]:
        act, dy = over(name, train, axis=axis), torch.randn_like(x)
        ready(driver, act, x)
        have, node = results(act, x, dy)
        assert node == "BlendBackward"
        assert driver.ran[:2] == ["blend_forward", "blend_backward"]
        assert have[1].stride() == x.stride()
        close(have, exact(act, x, dy), dtype)


def test_hard_gates_of_a_gpu_are_written_over_their_input(driver):
    if isinstance(driver, Passes):
        pytest.skip("formulas, which C is not for")
    x, dy = images(), images()
    act = ready(driver, over("relu", ("theta", "s")), x)
    have, node = results(act, x, dy)
    assert node == "BlendBackward"
    close(have, exact(act, x, dy), torch.float32)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_node(driver, off):
    act = over()
    with off():
        act(images())
        driver.ran.clear()
        x = images()
        with kernels.use("reference"):
            want = copy.deepcopy(act)(x.clone())
        before = 0 if x.is_inference() else x._version
        y = act(x)
        assert y is x
        assert x.is_inference() or x._version == before + 1
    assert driver.ran == ["blend_forward"]
    assert y.grad_fn is None
    torch.testing.assert_close(y, want)


def test_a_call_with_gradients_follows_one_without_and_back(driver):
    act, x, dy = over(), images(), images()
    ready(driver, act, x)
    for _ in range(2):
        with torch.no_grad():
            act(x.clone())
        have, node = results(act, x, dy)
        assert node == "BlendBackward"
        close(have, exact(act, x, dy), torch.float32)
    assert driver.ran.count("blend_forward") == 4


def test_second_derivatives_are_those_of_the_formulas(driver):
    x, act = images(), over()

    def second(act, x):
        leaf = x.detach().requires_grad_()
        y = act(leaf.sin())
        first = torch.autograd.grad((y * y).sum(), [leaf, *act.parameters()], create_graph=True)
        total = sum([g.square().sum() for g in first])
        return torch.autograd.grad(total, [leaf, *act.parameters()])

    ready(driver, act, x)
    have = second(act, x)
    assert driver.ran[0] == "blend_forward"
    with kernels.use("reference"):
        want = second(copy.deepcopy(act).double(), x.double())
    close(have, want, torch.float32)


def test_what_torch_forbids_stays_forbidden(driver):
    act, leaf = over(), images().requires_grad_()
    ready(driver, act, images())
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


def test_what_comes_after_may_not_change_what_was_kept(driver):
    act, x, dy = over(), images(), images()
    ready(driver, act, x)
    leaf = x.clone().requires_grad_()
    y = act(leaf * 2.0)
    want = exact(act, x, dy)
    y.mul_(3.0)  # the gates have a copy of their input
    close([torch.autograd.grad(y, leaf, dy / 3.0)[0]], [want[1]], torch.float32)


def test_a_parameter_that_was_changed_is_refused(driver):
    act, x = over(), images()
    ready(driver, act, x)
    y = act(x.requires_grad_() * 2.0)
    with torch.no_grad():
        act.s.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_view_changes_its_base(driver):
    act, leaf = over(), images().requires_grad_()
    plain = channels()
    plain.load_state_dict(act.state_dict())
    ready(driver, act, images()[1:])
    base = leaf * 2.0
    act(base[1:])
    want = torch.cat([leaf[:1] * 2.0, plain(leaf[1:] * 2.0)])
    torch.testing.assert_close(base, want)
    have = torch.autograd.grad(base.square().sum(), leaf)[0]
    torch.testing.assert_close(have, torch.autograd.grad(want.square().sum(), leaf)[0])


def test_data_that_no_op_made_is_overwritten_and_gates_learn(driver):
    act, x = over(), images()
    ready(driver, act, x)
    z, dy = x.clone(), images()
    y = act(z)
    assert y is z
    with kernels.use("reference"):
        other = copy.deepcopy(act).double()
        want = torch.autograd.grad(other(x.double()), [*other.parameters()], dy.double())
    close(torch.autograd.grad(y, [*act.parameters()], dy), want, torch.float32)


def test_hooks_on_the_input_see_its_own_gradient(driver):
    act, x, dy = over(), images(), images()
    ready(driver, act, x)
    leaf, seen = x.clone().requires_grad_(), []
    z = leaf * 2.0
    z.register_hook(lambda g: seen.append(("input", g)))
    y = act(z)
    y.register_hook(lambda g: seen.append(("output", g)))
    y.backward(dy)
    assert [name for name, _ in seen] == ["output", "input"]
    assert torch.equal(seen[0][1], dy)
    close([2.0 * seen[1][1]], [exact(act, x, dy)[1]], torch.float32)


@pytest.mark.parametrize("off", [False, True])
def test_where_python_has_to_look_the_input_is_as_it_was(driver, off):
    act, x = over(), images()
    ready(driver, act, x)
    with torch.no_grad() if off else torch.enable_grad():
        z = x.clone() if off else x.requires_grad_() * 1.0
        if isinstance(driver, Passes):
            with torch.no_grad():
                z[0, 0, 0, :2] = torch.tensor([float("inf"), float("nan")])
        else:
            driver.refuses = True
        with kernels.use("reference"):
            want = channels_like(act)(z.detach().clone())
        y = act(z)
    assert y is z
    assert y.isfinite().sum() >= y.numel() - 2
    torch.testing.assert_close(y.detach(), want.detach(), equal_nan=True)


def channels_like(act):
    made = channels()
    made.load_state_dict(act.state_dict())
    return made


def test_an_input_that_is_the_result_of_gates_may_be_overwritten_again(driver):
    act, x, dy = over(), images(), images()
    ready(driver, act, x)
    twice = lambda f, z: f(f(z * 2.0))  # noqa: E731
    leaf = x.clone().requires_grad_()
    have = torch.autograd.grad(twice(act, leaf), [leaf, *act.parameters()], dy)
    plain = channels_like(act).double()
    exactly = x.double().requires_grad_()
    with kernels.use("reference"):
        want = torch.autograd.grad(
            twice(plain, exactly), [exactly, *plain.parameters()], dy.double()
        )
    close(have, want, torch.float32)
    assert driver.ran[:2] == ["blend_forward"] * 2


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo detected a call")
@pytest.mark.parametrize("by", ["C++", "Python"])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_autograd_takes_the_node(driver, monkeypatch, by, inplace):
    act, x, dy = channels(inplace=inplace), images(), images()
    if by == "Python":
        monkeypatch.setattr(host, "module", lambda device: None)
    own = list(act.parameters())
    for scale in (1.0, 2.0):  # the second is found in its cache
        leaf = x.clone().requires_grad_()
        for p in own:
            p.grad = None
        y = act(leaf * 2.0)
        want = torch.autograd.grad(y, [leaf, *own], scale * dy, retain_graph=True)
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
            y.backward(scale * dy)
        for have, w in zip([leaf.grad, *[p.grad for p in own]], want, strict=True):
            torch.testing.assert_close(have, w)


def test_a_module_that_is_no_longer_in_place_is_called_as_it_is_then(driver):
    act, x = over(), images()
    ready(driver, act, x)
    assert isinstance(act, Activation)
    act.inplace = False
    z = x.clone()
    assert act(z) is not z
    assert torch.equal(z, x)
