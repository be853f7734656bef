"""Calls that C++ makes: those of a CPU, and those of a GPU, whose kernels a launcher of the tests
runs step by step."""

import copy
import ctypes
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.kernels.calling import (
    LAST,
    SOFT,
    TOLERANCE,
    Passes,
    channels,
    close,
    gradients,
    images,
    of_python,
    ready,
    reference,
)
from tests.kernels.layers import moved
from threshold_gating import Activation, kernels
from threshold_gating.kernels import host, runtime
from threshold_gating.kernels.blend import host_calls

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.xdist_group("calls"),
]
LONG = 30_000  # nodes
of_a_gpu = pytest.mark.parametrize("driver", ["launched"], indirect=True)

CASES = [
    *[(name, SOFT) for name in ("silu", "tanh", "gelu_k3", "gelu")],
    *[("relu", ("theta", "s")), ("gelu", ()), ("gelu_tanh", ()), ("silu", ("tau",)), ("relu", ())],
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("name", "train"), CASES)
def test_values_and_every_gradient_are_those_of_float64(driver, name, train, dtype):
    kinds = [(images(dtype).to(memory_format=LAST), 1), (images(dtype), 1)]
    for x, axis in [*kinds, (torch.randn(33, 5).to(dtype), -1)]:
        act = channels(name, train, axis=axis) if train else Activation(name)
        dy = torch.randn_like(x)
        with kernels.use("reference"):
            want = gradients(copy.deepcopy(act).double(), x.double(), dy.double())
        close(gradients(act, x, dy), want, dtype)  # of a GPU this backward pass is Python's
        driver.ran.clear()
        have = gradients(act, x, dy)
        assert have[1].stride() == have[0].stride() == x.stride()
        if isinstance(driver, Passes) and act._structure.hard:  # formulas, which C is not for
            assert driver.ran == []
        else:
            assert driver.ran[:2] == ["blend_forward", "blend_backward"]
        close(have, want, dtype)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_node(driver, off):
    x, act = images(), channels()
    with off():
        act(x)
        driver.ran.clear()
        y = act(x)
    assert driver.ran == ["blend_forward"]
    assert y.grad_fn is None
    assert y.is_inference() == (off is torch.inference_mode)
    assert torch.equal(y, of_python(act, x, torch.ones_like(x))[0])


@pytest.mark.parametrize("learns", [(), ("rho",), ("s", "c"), ("dtheta", "c"), ("rho", "dtheta")])
@pytest.mark.parametrize("of_x", [True, False])
def test_only_what_is_asked_for_gets_a_gradient(driver, learns, of_x):
    x, act, dy = images().requires_grad_(of_x), channels(), torch.randn(3, 5, 7, 9)
    for name, p in act.named_parameters():
        p.requires_grad_(name in learns)
    if not learns and not of_x:
        assert act(x).grad_fn is None
        return
    want = dict(
        zip(("x", *dict(act.named_parameters())), reference_of_all(act, x, dy), strict=True)
    )
    for _ in range(2):  # of a GPU Python's backward pass, then C++'s
        x.grad = None
        act.zero_grad()
        act(x).backward(dy)
        found = {"x": x.grad, **{n: p.grad for n, p in act.named_parameters()}}
        assert {n for n, g in found.items() if g is not None} == {*learns, *(["x"] if of_x else [])}
        for name, grad in found.items():
            if grad is not None:
                close([grad], [want[name]], torch.float32)


def reference_of_all(act, x, dy):
    return reference(copy.deepcopy(act).requires_grad_(), x, dy)[1:]


@pytest.mark.parametrize("x", [images(), images().to(memory_format=LAST)])
def test_a_slope_may_lie_in_any_layout(driver, x):
    act = ready(driver, channels(), x)
    one = torch.randn(()).expand(x.shape)
    turned = torch.randn(9, 7, 5, 3).permute(3, 2, 1, 0)
    odd = torch.randn(x.numel() + 1)[1:].view(x.shape)
    for dy in (one, turned, odd, torch.randn_like(x).contiguous()):
        close(gradients(act, x, dy), reference(act, x, dy), torch.float32)


@of_a_gpu
def test_memory_off_its_16_bytes_goes_to_python(driver):
    act = channels(axis=-1)
    x = torch.randn(5 * 8 + 1)
    ready(driver, act, x[:-1].view(8, 5))
    odd, dy = x[1:].view(8, 5), torch.randn(8, 5)
    close(gradients(act, odd, dy), reference(act, odd, dy), torch.float32)
    assert driver.ran == []


@pytest.mark.parametrize("changed", ["x", "rho", "theta0"])
def test_what_was_saved_must_not_change(driver, changed):
    x = images()
    act = ready(driver, channels(), x)
    z = x.clone()
    y = act(z)
    with torch.no_grad():
        (z if changed == "x" else getattr(act, changed)).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_is_gone_after_its_backward_pass_unless_it_is_kept(driver):
    x = images().requires_grad_()
    act = ready(driver, channels(), x)
    y = act(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), x)


def test_second_derivatives_are_those_of_the_formulas(driver):
    x, act = images(), channels()

    def second(act, x):
        x = x.detach().requires_grad_()
        y = act(x)
        first = torch.autograd.grad((y * y).sum(), [x, *act.parameters()], create_graph=True)
        total = sum([g.square().sum() for g in first])
        return torch.autograd.grad(total, [x, *act.parameters()])

    ready(driver, act, x)
    have = second(act, x)
    assert "blend_forward" in driver.ran
    with kernels.use("reference"):
        want = second(copy.deepcopy(act).double(), x.double())
    close(have, want, torch.float32)


def test_a_batch_of_slopes_is_taken(driver):
    x, act = images().requires_grad_(), channels()
    ready(driver, act, x)
    dy = torch.randn(2, *x.shape)
    found = torch.autograd.grad(act(x), [x, act.s], dy, is_grads_batched=True)
    for k in range(2):
        want = torch.autograd.grad(act(x), [x, act.s], dy[k])
        close([f[k] for f in found], [w.double() for w in want], torch.float32)


def test_hooks_of_tensors_and_of_the_node_run(driver):
    x = images().requires_grad_()
    act = ready(driver, channels(), x)
    seen = []
    y = act(x)
    assert y.grad_fn.name() == "BlendBackward"
    y.register_hook(lambda g: seen.append("y") or 2 * g)
    x.register_hook(lambda g: seen.append("x"))
    y.grad_fn.register_hook(lambda into, out: seen.append("node"))
    y.sum().backward()
    assert sorted(seen) == ["node", "x", "y"]
    close([x.grad], [reference(act, x, 2 * torch.ones_like(x))[1]], torch.float32)
    assert "blend_backward" in driver.ran


def test_hooks_on_saved_tensors_go_to_python(driver):
    x, dy = images(), torch.randn(3, 5, 7, 9)
    act = ready(driver, channels(), x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        close(gradients(act, x, dy), reference(act, x, dy), torch.float32)
    assert packed
    assert driver.ran == []


def test_a_slope_that_is_nowhere_is_zeros(driver):
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = images().requires_grad_()
    act = ready(driver, channels(), x)
    y = act(x)
    Cut.apply(y).sum().backward()
    assert x.grad is None or not x.grad.any()


def other_memory(p, kind):
    """Memory for p that no kernel may take for what p was."""
    if kind == "wide":
        return p.detach().double()
    if kind == "flat":
        return p.detach().reshape(1, -1)
    return p.detach().t().contiguous() if kind == "turned" else torch.ones(len(p), 1)


@pytest.mark.parametrize("kind", ["smaller", "flat", "turned"])
@pytest.mark.parametrize("by", ["C++", "Python"])
def test_memory_of_other_sizes_in_a_parameter_is_refused(driver, monkeypatch, by, kind):
    x, act = images().requires_grad_(), channels()
    ready(driver, act, x)
    if by == "Python":
        monkeypatch.setattr(host, "module", lambda device: None)
        act = copy.deepcopy(act)
    y = act(x)
    act.s.data = other_memory(act.s, kind)
    driver.ran.clear()
    for call in (lambda: torch.autograd.grad(y.sum(), x), lambda: act(x)):
        with pytest.raises(ValueError, match=r"gates of 2 branches for 5 groups .* shapes \{"):
            call()
    assert driver.ran == []


@pytest.mark.parametrize("by", ["C++", "Python"])
def test_memory_of_another_type_in_a_parameter_is_read_as_that(driver, monkeypatch, by):
    x, act = images().requires_grad_(), channels()
    ready(driver, act, x)
    if by == "Python":
        monkeypatch.setattr(host, "module", lambda device: None)
        act = copy.deepcopy(act)
    want = reference(act, x, torch.ones_like(x))[1]
    y = act(x)
    act.s.data = other_memory(act.s, "wide")
    close([torch.autograd.grad(y.sum(), x)[0]], [want], torch.float32)


@pytest.mark.parametrize("shape", [(0, 5), (4, 5, 0), (1, 5), (7, 5)])
def test_other_shapes_are_other_calls(driver, shape):
    act = ready(driver, channels(), torch.randn(3, 5))
    for sizes in (shape, (3, 5)):
        x, dy = torch.randn(sizes), torch.randn(sizes)
        for have, want in zip(gradients(act, x, dy), reference(act, x, dy), strict=True):
            torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)


def test_other_backends_modes_and_types_are_other_calls(driver):
    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f, types, args=(), kwargs=None):
            return f(*args, **(kwargs or {}))

    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            return f(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        pass

    x = images()
    act = ready(driver, channels(), x)
    want = act(x)
    with kernels.use("reference"):
        torch.testing.assert_close(act(x), want)
    assert driver.ran == ["blend_forward"]
    with Dispatch():
        torch.testing.assert_close(act(x), want)
    torch.testing.assert_close(act(x.as_subclass(Own)).as_subclass(torch.Tensor), want)
    torch.testing.assert_close(act(x.double()).float(), want)
    assert driver.ran == ["blend_forward"]
    with Function():
        torch.testing.assert_close(act(x), want)
    with torch.autocast("cpu"):
        assert torch.equal(act(x), want)


def test_transforms_of_functions_go_to_python(driver):
    x = images()
    act = ready(driver, channels(), x)
    own = dict(act.named_parameters())
    call = lambda own, x: torch.func.functional_call(act, own, x)  # noqa: E731
    want = act(x).detach()
    torch.testing.assert_close(call(own, x), want)
    torch.testing.assert_close(torch.func.vmap(act)(x[None])[0], want)
    torch.testing.assert_close(torch.func.jvp(act, (x,), (torch.ones_like(x),))[0], want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        y = torch.autograd.forward_ad.unpack_dual(act(dual))
    slope = reference(act, x, torch.ones_like(x))[1]
    torch.testing.assert_close(y.tangent.double(), slope, rtol=1e-4, atol=1e-5)
    grads = torch.func.grad(lambda own: call(own, x).sum())(own)
    want = reference(act, x, torch.ones_like(x))[2:]
    close([grads[name].detach() for name in own], want, torch.float32)


def test_tensors_in_place_of_parameters_are_read(driver):
    x, dy = images(), torch.randn(3, 5, 7, 9)
    act = ready(driver, channels(), x)
    other = {n: (2 * p).detach().requires_grad_() for n, p in act.named_parameters()}
    driver.ran.clear()
    y = torch.func.functional_call(act, other, x)
    assert driver.ran == ["blend_forward"]
    own = copy.deepcopy(act)
    own.load_state_dict(other, strict=False)
    close([y.detach()], [reference(own, x, dy)[0]], torch.float32)


def test_a_parametrization_is_computed_anew(driver):
    class Twice(nn.Module):
        def forward(self, w):
            return 2 * w

    x = images()
    act = ready(driver, channels(), x)
    before = act(x)
    nn.utils.parametrize.register_parametrization(act, "s", Twice())
    y = act(x)
    assert not torch.allclose(y, before)
    y.sum().backward()
    assert act.parametrizations.s.original.grad is not None


def test_copies_and_files_of_a_module_have_no_call(driver):
    x = images()
    act = ready(driver, channels(), x)
    assert act._again is not None
    for other in (copy.deepcopy(act), copy.copy(act), pickle.loads(pickle.dumps(act))):
        assert "_again" not in vars(other)
        torch.testing.assert_close(other(x), act(x))
    assert not [name for name in act.state_dict() if "again" in name]


def test_a_module_that_is_changed_is_called_as_it_is_then(driver):
    x = torch.randn(5, 4, 5)
    act = moved(Activation("silu", share="channel", channels=5, axis=0, train=SOFT))
    ready(driver, act, x)
    act.axis = 2
    dy = torch.randn_like(x)
    close(gradients(act, x, dy), reference(act, x, dy), torch.float32)
    act.inplace = True
    z = x.clone()
    assert act(z) is z


@of_a_gpu
def test_someone_who_watches_launches_sees_python_make_them(driver):
    x = images()
    act = ready(driver, channels(), x)
    from triton import knobs

    knobs.runtime.launch_enter_hook.add(print)
    try:
        act(x)
        assert driver.ran == []
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    act(x)
    assert driver.ran == ["blend_forward"]


def test_what_the_driver_refuses_python_does(driver):
    x, dy = images(), torch.randn(3, 5, 7, 9)
    act = ready(driver, channels(), x)
    driver.refuses = True
    close(gradients(act, x, dy), reference(act, x, dy), torch.float32)
    z = x.detach().requires_grad_()
    driver.refuses = False
    y = act(z)
    driver.refuses = True
    y.backward(dy)
    close([z.grad], [reference(act, x, dy)[1]], torch.float32)


def test_an_error_in_python_reaches_who_asked(driver, monkeypatch):
    x, act = images().requires_grad_(), channels()
    y = act(x)
    driver.refuses = True
    monkeypatch.setattr(host_calls.autograd, "gradients", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()


def test_a_backward_pass_may_run_in_another_thread(driver):
    x = images().requires_grad_()
    act = ready(driver, channels(), x)
    y = act(x)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    close([x.grad], [reference(act, x, torch.ones_like(x))[1]], torch.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_module_has_the_steps_of_its_gates(driver):
    x = images()
    act = ready(driver, channels(), x)
    traced = torch.jit.trace(act, x)
    torch.testing.assert_close(traced(2 * x), act(2 * x))


@pytest.mark.filterwarnings("ignore:(Anomaly|Error) [Dd]etect:UserWarning")
def test_anomalies_are_looked_for(driver):
    x = images().requires_grad_()
    act = ready(driver, channels(), x)
    with torch.autograd.detect_anomaly():
        act(x).sum().backward()
        with torch.no_grad():
            act.s.fill_(float("nan"))
        y = act(x)
        with pytest.raises(RuntimeError, match="'BlendBackward' returned nan"):
            y.sum().backward()


def test_a_repeated_forward_pass_is_the_same(driver):
    x = images().requires_grad_()
    act = ready(driver, channels(), x)
    y = torch.utils.checkpoint.checkpoint(act, x, use_reentrant=False)
    y.sum().backward()
    close([x.grad], [reference(act, x, torch.ones_like(x))[1]], torch.float32)


def test_one_tensor_for_two_rows_is_that_of_one_module_only(driver):
    x, dy = images(), images()
    tied, other = channels(), channels()
    tied.c = tied.s
    for act in (tied, other, tied, other):
        ready(driver, act, x)
        close(gradients(act, x, dy), reference(act, x, dy), torch.float32)


def test_a_class_that_holds_its_tensors_in_another_way_is_asked_for_them(driver):
    class Louder(Activation):
        gain = 1.0

        def _held(self, x):
            tensors, shape = super()._held(x)
            return tensors._replace(s=tensors.s * self.gain), shape

    act, x = moved(Louder("silu", train=SOFT)), images()
    ready(driver, act, x)
    before = act(x)
    Louder.gain = 2.0
    assert not torch.equal(act(x), before)


def test_a_module_that_somebody_gave_another_way_of_its_own_is_asked_each_time(driver):
    act, x = channels(), images()
    ready(driver, act, x)
    before, inner = act(x), act._held

    def doubled(x):
        tensors, shape = inner(x)
        return tensors._replace(s=tensors.s * 2), shape

    act._held = doubled
    first = act(x)
    assert not torch.equal(first, before)
    assert torch.equal(act(x), first)
    del act._held
    assert torch.equal(act(x), before)
    assert torch.equal(act(x), before)


@of_a_gpu
def test_a_thread_without_a_context_gets_one(driver):
    x, dy = images(), images()
    act = ready(driver, channels(), x)
    want = reference(act, x, dy)
    driver.has_context = False  # as a thread of autograd begins
    y = act(x.requires_grad_())
    assert driver.has_context
    driver.has_context = False
    before = len(driver.ran)
    close([y.detach(), *torch.autograd.grad(y, [x, *act.parameters()], dy)], want, torch.float32)
    assert driver.has_context
    assert driver.ran[before:] == ["blend_backward", "add_parts"]


@of_a_gpu
def test_a_long_chain_of_gates_has_its_gradient_and_ends(driver):
    x, dy, act, ran = torch.randn(1, 5).requires_grad_(), torch.randn(1, 5), channels(), []
    torch.autograd.grad(act(x), x, dy)  # this backward pass, of x alone, is Python's

    class Seen:
        """What the first node of the chain holds."""

        def __call__(self, into, out):
            ran.append("hook")

    def copied(function, *given):
        """y = x and dx = dy: thousands of interpreted kernels would take minutes."""
        *_, places, _extra = given
        ran.append(driver.known[function - 1][0].kernel.fn.__name__)
        into = {"blend_forward": 2, "blend_backward": 3}[ran[-1]]
        source, target = (ctypes.c_void_p.from_address(places[k]).value for k in (into - 1, into))
        ctypes.memmove(target, source, x.nbytes)
        return 0

    driver.launch = type(driver.launch)(copied)
    host.module("cuda").drive(*driver.addresses(), True)
    y, seen = act(x), Seen()
    y.grad_fn.register_hook(seen)
    first = weakref.ref(seen)
    del seen
    for _ in range(LONG - 1):
        y = act(y)
    assert torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)
    assert ran == [*["blend_forward"] * LONG, *["blend_backward"] * LONG, "hook"]
    assert first() is not None
    del y  # a node that ended the one before it would take the stack for as many calls
    assert first() is None


@pytest.mark.compile
def test_a_compiled_graph_does_not_see_it(driver):
    x = torch.randn(4, 5)
    act = ready(driver, channels(), x)
    with kernels.use("reference"):
        compiled = torch.compile(act, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), act(x))


def test_gates_that_are_given_as_tensors_have_their_gradients(driver):
    x, dy = torch.randn(6, 5), torch.randn(6, 5)
    tau, theta = torch.rand(5) + 0.5, torch.randn(5)
    slope = torch.randn(5)

    def results(x, *own):
        own = [w.detach().requires_grad_() for w in (x, *own)]
        x, tau, theta, slope = own
        y = kernels.blend(x, tau, (theta,), (0.0, slope), (0.0, 0.0), known=True)
        return [y.detach(), *torch.autograd.grad(y, own, dy.to(x.dtype))]

    given = x, tau, theta, slope
    with kernels.use("reference"):
        want = results(*[w.double() for w in given])
    for _ in range(3):
        close(results(*given), want, torch.float32)
    assert "blend_forward" in driver.ran


def test_a_kernel_is_launched_with_what_its_signature_has():
    types = {"x": "*bf16", "R": "i32", "one": "constexpr", "N": "i64", "K": "constexpr"}
    run = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False)
    made = SimpleNamespace(
        run=run, packed_metadata=(4, 1, 64), function=7, src=SimpleNamespace(signature=types)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_fixed", lambda compiled: ())
        found = runtime._handle(made, (3, 1, 1), (5, 1, 9, 2))
        assert found == (7, (3, 1, 1), 128, 64, 1, (5, 9))
        run.launch_pdl = True
        assert runtime._handle(made, (3, 1, 1), (5, 1, 9, 2)) is None
        run.launch_pdl = False
        types["N"] = "fp32"
        assert runtime._handle(made, (3, 1, 1), (5, 1, 9, 2)) is None


def test_kernels_take_what_the_driver_is_given(with_triton):
    with_triton("compile_handles.py")


def test_a_forked_process_computes_the_same_after_threads_ran(compiled, with_triton, monkeypatch):
    monkeypatch.setenv("TG_HOST", "auto")
    with_triton("forked.py")
