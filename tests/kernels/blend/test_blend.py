"""The choice of backend, and the lowering to torch's ops."""

import copy
import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import Activation, Linear, kernels, primitive
from threshold_gating.instance import TG
from threshold_gating.kernels import layout, runtime, structure, weights
from threshold_gating.kernels.blend import autograd, cpu, one_pass, steps
from threshold_gating.kernels.call import of_call
from threshold_gating.kernels.lowering import native
from threshold_gating.kernels.structure import Role
from threshold_gating.taxonomy import (
    ROWS,
    TAXONOMY,
    hardshrink,
    hardtanh,
    leaky_relu,
    softshrink,
    threshold,
)

LOWERED = [key for key, t in TAXONOMY.items() if kernels.native(t) is not None]


@pytest.mark.parametrize("key", LOWERED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lowered_instance_is_torchs_own_op(key, dtype):
    x = torch.randn(1003).to(dtype)
    assert ROWS[key].exact
    assert torch.equal(kernels.native(TAXONOMY[key])(x), ROWS[key].f(x))


@pytest.mark.parametrize(
    ("t", "f"),
    [
        (leaky_relu(0.3), lambda x: F.leaky_relu(x, 0.3)),
        (threshold(0.4, -2), lambda x: F.threshold(x, 0.4, -2)),
        (hardtanh(-0.3, 2), lambda x: F.hardtanh(x, -0.3, 2)),
        (hardshrink(0.2), lambda x: F.hardshrink(x, 0.2)),
        (softshrink(0.7), lambda x: F.softshrink(x, 0.7)),
        (TG(float("inf"), 0, (1, 1), (0, 0), clamp=(-2, 3)), lambda x: F.hardtanh(x, -2, 3)),
    ],
)
def test_parameters_of_a_lowered_family_reach_the_op(t, f):
    x = torch.randn(1003)
    assert torch.equal(kernels.native(t)(x), f(x))
    assert torch.equal(t(x), f(x))


def test_the_rows_people_use_most_are_lowered():
    wanted = {"relu", "leaky_relu", "silu", "sigmoid", "tanh", "mish", "hardtanh", "relu6"}
    assert wanted | {"hardsigmoid", "hardswish", "hardshrink", "softshrink"} <= set(LOWERED)


def test_no_approximation_is_lowered():
    assert not [key for key in LOWERED if not ROWS[key].exact]
    assert kernels.native(TAXONOMY["gelu"]) is None
    assert kernels.native(TAXONOMY["quick_gelu"]) is None  # torch has no such op


def test_a_parameter_that_differs_by_a_little_is_not_lowered():
    for key in LOWERED:
        t = TAXONOMY[key]
        data = t.to_dict()
        data["c"] = [c + 1e-6 for c in data["c"]]
        data.pop("anchor", None)
        off = TG.from_dict(data)
        op = kernels.native(off)
        x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
        assert op is None or (op(x) - off(x)).abs().max() < 1e-12, key


def test_use_acts_at_once_and_a_with_block_restores():
    before = kernels.backend()
    with kernels.use("reference"):
        assert kernels.backend() == "reference"
        with kernels.use("native"):
            assert kernels.backend() == "native"
        assert kernels.backend() == "reference"
    assert kernels.backend() == before
    kernels.use("reference")
    assert kernels.backend() == "reference"
    kernels.use(before)


def test_a_with_block_restores_after_an_error():
    with pytest.raises(KeyError), kernels.use("reference"):
        raise KeyError
    assert kernels.backend() == "auto"


def test_native_off_really_evaluates_the_gates():
    act = Activation("silu")
    act.tau0.fill_(3.0)  # break the gate: only a path that evaluates it can notice
    x = torch.randn(100)
    assert torch.equal(act(x), F.silu(x))  # auto: torch's op
    with kernels.use("reference"):
        torch.testing.assert_close(act(x), x * torch.sigmoid(3 * x))


def test_native_runs_the_op_of_an_instance_or_refuses():
    x, silu = torch.randn(5), TAXONOMY["silu"]
    layers = [Linear(5, 2, tier=tier) for tier in ("W", "S", "general")]
    with kernels.use("native"):
        assert torch.equal(kernels.blend(x, silu), F.silu(x))
        for refused in (
            lambda: kernels.blend(x, TAXONOMY["gelu"]),
            lambda: kernels.blend(x, silu, v=x),
            lambda: kernels.blend(x, silu, up=x),
            lambda: kernels.blend(x, 1.0, (0.0,), (0.0, 1.0), (0.0, 0.0)),
            *(lambda layer=layer: layer(x) for layer in layers),
        ):
            with pytest.raises(kernels.BackendError, match="no native op"):
                refused()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("many", [1, 9000])
def test_a_learned_hard_threshold_that_is_nan_gives_nan(groups, many):
    step = TG(math.inf, (0.0,), (0.0, 0.0), (0.0, 1.0))
    act = Activation(step, share="channel", channels=groups, train=("theta",))
    with torch.no_grad():
        act.dtheta[:, -1] = math.nan
        x = torch.randn(many, groups)
        y = act(x)
    assert y[:, -1].isnan().all()
    assert torch.equal(y[:, :-1], (x[:, :-1] > 0).float())


@pytest.mark.parametrize("K", [2, 3])
def test_tensors_that_overflow_before_a_gate_makes_them_small_are_finite(K):
    theta = [torch.tensor([[at]]) for at in (-8.5, 0.015)[: K - 1]]
    s = [torch.tensor([[slope]]) for slope in (-3e38, 3e38, -1.0)[:K]]
    c = [torch.zeros(1, 1)] * K
    x = torch.tensor([[-90.0], [-0.5], [1e-3], [90.0]]).expand(4, 3)
    y = kernels.blend(x, torch.tensor([[1.702]]), theta, s, c)
    want = primitive.blend(x.double(), 1.702, *([float(w) for w in row] for row in (theta, s, c)))
    torch.testing.assert_close(y, want.float(), rtol=1e-5, atol=1e30)  # of terms of 1e38


def test_native_refuses_an_instance_that_torch_does_not_have():
    with kernels.use("native"):
        assert torch.equal(Activation("relu")(torch.ones(1)), torch.ones(1))
        for act in (Activation("gelu"), Activation("relu", train="s")):
            with pytest.raises(kernels.BackendError) as caught:
                act(torch.ones(1))
            assert str(caught.value) == (
                "this instance has no native op (it is learned, approximate or not one of torch's); "
                "use the backend 'auto' or 'reference' for it."
            )


def test_an_unknown_backend_is_refused_and_changes_nothing():
    with pytest.raises(kernels.BackendError) as caught:
        kernels.use("cuda")
    assert str(caught.value) == (
        "no backend 'cuda' (tg.kernels.use or the environment's TG_BACKEND); "
        "this version has auto, native, reference, triton."
    )
    assert kernels.backend() == "auto"


def test_the_environment_sets_the_first_choice():
    code = "import threshold_gating as tg; print(tg.kernels.backend())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TG_BACKEND": "reference"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "reference\n"


class OnDevice:
    """As much of a tensor as a launch asks for, on a device that may not be here."""

    is_cuda, dtype = True, torch.float32

    def __init__(self, index):
        self.index, self.device = index, "cpu" if index < 0 else f"cuda:{index}"

    def data_ptr(self):
        return 16

    def get_device(self):
        return self.index


def test_a_kernel_that_is_ready_is_given_no_address_of_another_device(monkeypatch):
    run, calls = runtime.Launch(None, (1,), 4, (7,)), []
    run.ready[0, "float"] = lambda *given: calls.append(given)
    monkeypatch.setattr(runtime, "_address", OnDevice.data_ptr)
    monkeypatch.setattr(runtime, "_device", OnDevice.get_device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    run((OnDevice(0), OnDevice(0)), "float")
    assert calls == [(16, 16, 7)]
    with pytest.raises(RuntimeError, match=r"one device, got cpu, cuda:0; move the module"):
        run((OnDevice(0), OnDevice(-1)), "float")
    assert len(calls) == 1


@pytest.mark.parametrize("key", ["relu", "leaky_relu"])
def test_hard_gates_take_nested_tensors(key):
    parts = [torch.randn(2), torch.randn(3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    act = Activation(key)
    y = kernels.blend(x, act._structure, act._held)
    for have, part in zip(y.unbind(), parts, strict=True):
        torch.testing.assert_close(have, kernels.blend(part, act._structure, act._held))


def test_of_what_a_caller_made_itself_only_the_address_is_asked(monkeypatch):
    run, calls = runtime.Launch(None, (1,), 4, (7,)), []
    run.ready[0, torch.float32] = lambda *given: calls.append(given)
    monkeypatch.setattr(runtime, "_address", OnDevice.data_ptr)
    monkeypatch.setattr(runtime, "_device", OnDevice.get_device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    here, made = OnDevice(0), OnDevice(0)
    made.get_device = None
    run.beside((here, here), (made,), (here,))
    assert calls == [(16, 16, 16, 16, 7)]
    for given, others in (((here, OnDevice(-1)), (here,)), ((here,), (OnDevice(-1),))):
        with pytest.raises(RuntimeError, match=r"one device, got cpu, cuda:0; move the module"):
            run.beside(given, (here,), others)
    assert len(calls) == 1


class Compiled:
    """As much of a compiled kernel as a launch asks for, around Triton's own launcher."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self, memory=0):
        from triton.backends.nvidia.driver import CudaLauncher

        self.run, self.started, self.ordinary = CudaLauncher.__new__(CudaLauncher), [], 0
        vars(self.run).update(
            {"global_scratch_size": memory, "global_scratch_align": 1, "num_ctas": 1},
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=True,
            arg_annotations=["a"],
            kernel_signature=b"s",
            launch=lambda *given: self.started.append(given),
        )

    def __getitem__(self, grid):
        def start(*given):
            self.ordinary += 1
            about = self.function, self.packed_metadata, None, None, None
            self.run(*grid, 5, *about, *given)

        return start


@pytest.fixture
def compiled(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    return Compiled()


def test_a_kernel_is_started_with_what_triton_gives_its_c_function(compiled):
    runtime._runner(compiled, (2, 3, 1), 0)(16, 32, 7)
    assert compiled.ordinary == 0
    compiled[2, 3, 1](16, 32, 7)
    ours, theirs = compiled.started
    assert ours == theirs


def test_whoever_wants_to_know_of_launches_is_told(compiled):
    from triton import knobs

    run = runtime._runner(compiled, (2, 3, 1), 0)
    knobs.runtime.launch_enter_hook.add(print)
    try:
        run(16)
        assert compiled.ordinary == 1
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    run(16)
    assert compiled.ordinary == 1
    assert len(compiled.started) == 2


def test_a_launch_that_is_not_understood_is_left_to_triton(compiled, monkeypatch):
    import triton

    assert runtime._fixed(compiled) is not None
    assert runtime._fixed(Compiled(memory=128)) is None
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    assert runtime._fixed(compiled) is None


def test_an_op_takes_every_layout_and_copies_only_what_is_not_dense():
    image = torch.randn(2, 6, 3, 4)
    last = image.to(memory_format=torch.channels_last)
    odd = image[:1].as_strided((1, 6, 3, 4), (1, 12, 4, 1))  # contiguous, says torch
    channel, positions = [1, 6, 1, 1], [1, 6, 3, 4]
    for x, shape, sizes, copied in (
        (image, channel, (2, 6, 12), False),
        (last, channel, (24, 6, 1), False),
        (last, [], (1, 1, 144), False),
        (last, positions, (2, 72, 1), True),
        (odd, positions, (1, 72, 1), False),
        (image[:, :, ::2], channel, (2, 6, 8), True),
    ):
        taken, found = layout.dense(x, shape)
        assert found == sizes
        assert torch.equal(taken, x)
        assert (taken.data_ptr() != x.data_ptr()) == copied


@pytest.mark.parametrize(
    ("parameter", "x", "spread"),
    [
        ((1, 6, 1, 1), (5, 6, 32, 32), (5, 6, 1, 1)),  # an image is a stretch
        ((1, 6, 1, 1), (5, 6, 65, 64), (5, 6, 65, 1)),  # one line of it, where it is too long
        ((1, 6, 1, 1), (5, 6, 2, 8192), (1, 6, 1, 1)),  # not even that
        ((1, 2, 1, 1), (5, 2, 8, 8), (5, 2, 1, 1)),
        ((6,), (5, 7, 6), (6,)),  # tokens: the sum goes across memory
        ((1,), (5, 6, 7), (1,)),  # one for all
        ((6, 1, 1), (5, 6, 8, 8), (5, 6, 1, 1)),
    ],
)
def test_compiled_sums_have_two_stages_where_that_helps(parameter, x, spread):
    t = torch.randn(parameter, requires_grad=True)
    image = torch.randn(x)
    wide = steps._spread(t, image)
    assert wide.shape == spread
    (have,) = torch.autograd.grad((wide * image).sum(), t)
    (want,) = torch.autograd.grad((t * image).sum(), t)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-3)  # up to 82,000 terms of float32


INF = float("inf")


def both(x, *parameters, **options):
    """y of the CPU's own kernels, and of the reference in float64."""
    wide = [w.double() if isinstance(w, torch.Tensor) else w for w in (x, *parameters)]
    return kernels.blend(x, *parameters, **options), primitive.blend(*wide, **options).float()


@pytest.mark.parametrize("owner", [("lo", "hi"), ("hi", "lo"), ("hi", "hi")])
def test_a_threshold_belongs_to_its_owner_on_a_cpu(owner):
    x = torch.tensor([-1.0, 1.0, 0.0], requires_grad=True)
    s = [torch.tensor([w]) for w in (2.0, 3.0, 5.0)]
    y = kernels.blend(x, INF, (-1.0, 1.0), s, (0.0, 0.0, 0.0), owner=owner)
    slope = torch.autograd.grad(y.sum(), x)[0]
    want = [2.0 if owner[0] == "lo" else 3.0, 3.0 if owner[1] == "lo" else 5.0, 3.0]
    assert slope.tolist() == want
    assert y.tolist() == [-want[0], want[1], 0.0]


@pytest.mark.parametrize("most", [1, 4, 13, 32, 1000])
@pytest.mark.parametrize("sizes", [(7, 3, 5), (4, 5, 6), (1, 1, 100), (9, 1, 1), (1, 9, 2)])
def test_tiles_cover_memory_once_and_none_is_too_large(sizes, most):
    count = torch.zeros(sizes)
    for part in cpu._parts(sizes, most):
        count[part] += 1
        assert count[part].numel() <= most
    assert (count == 1).all()


@pytest.mark.parametrize("c", [(-1.0, 2.0), (-1.0, 0.5, 3.0)])
def test_more_than_a_tile_is_computed_in_several(c, monkeypatch):
    monkeypatch.setattr(one_pass, "ready", lambda *given: None)
    x = torch.randn(2 * max(cpu._TILE.values()) + 3)
    given = (2.0, (-0.5, 0.5)[: len(c) - 1], (0.1, 1.0, 0.3)[: len(c)], c)
    torch.testing.assert_close(*both(x, *given))


def test_far_below_all_thresholds_the_first_branch_is_all_there_is():
    # a tau for each threshold: no power of one exponential, the first logit is 0 by definition
    x = torch.tensor([-400.0, -300.0])
    have, want = both(x, (1.0, 2.0), (0.0, 1.0), (torch.tensor(1.5), 0.5, 1.0), (1.0, 2.0, 3.0))
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(have, 1.5 * x + 1)


@pytest.mark.parametrize("thresholds", [(20.0, -20.0), (5.0, -40.0)])
@pytest.mark.parametrize("tau", [10.0, (10.0, 7.0)])
def test_thresholds_out_of_order_give_what_float64_gives(tau, thresholds):
    x = torch.linspace(-60, 60, 25)
    c = (torch.tensor(0.0), 5.0, 10.0)
    torch.testing.assert_close(*both(x, tau, thresholds, (0.0, 1.0, 0.0), c))


@pytest.mark.parametrize("second", [True, False])
def test_a_second_derivative_knows_the_owner_and_what_is_read(second):
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    v = torch.tensor([3.0, -2.0], requires_grad=True) if second else None
    s = torch.tensor([[2.0], [5.0]], requires_grad=True)
    for tau, owner in ((INF, ("hi",)), (1.0, None)):
        found = []
        for run in (kernels.blend, primitive.blend):
            y = run(x, tau, (0.0,), s, (0.0, 1.0), v=v, owner=owner)
            read = x if v is None else v
            first = torch.autograd.grad((y**2).sum(), [read, s], create_graph=True)
            found.append([*first, *torch.autograd.grad(first[0].sum(), [read, s])])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize(("s", "c"), [((0, 0), (-1, 1)), ((-1, 1), (0, 0)), ((-1, 1), (-2, 2))])
def test_opposite_branches_keep_their_digits_near_the_threshold(s, c):
    x = torch.tensor([1e-6, -3e-5, 1e-3])
    have, want = both(x, 1.0, (0.0,), s, c)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=0)  # some ulp; a difference has none


def test_a_second_derivative_counts_a_dependence_between_inputs_once():
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (kernels.blend, primitive.blend):
        theta = x.mean()  # as where a threshold is computed from the data
        y = run(x, 2.0, [theta], (0.5, 1.0), (0.0, 1.0), v=x**2)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), x)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("c", [(-1.0, 2.0), (-1.0, 0.5, 3.0)])
def test_the_steps_for_a_compiler_keep_the_type(dtype, c):
    x = torch.randn(200).to(dtype)
    given = (2.0, (-0.5, 0.5)[: len(c) - 1], (0.1, 1.0, 0.3)[: len(c)], c)
    y, want = traced(x, *given), primitive.blend(x, *given)
    assert y.dtype == dtype
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize("key", ["gelu", "gelu_tanh", "gelu_k4", "mish", "elu_k4"])
def test_the_steps_for_a_compiler_have_small_weights_right(key):
    t = TAXONOMY[key]
    known = structure.exact(t)
    assert known.weights >= weights.Weights.SMALL
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.tensor([1e30, -1e30, 3e38, INF, -INF])])
    y, want = steps.steps(x, None, known, known.rows(structure.Tensors())), t(x.double())
    # an argument of 70 is off by its rounding, 4e-6, where the gate is not yet shut
    torch.testing.assert_close(y.double(), want, rtol=4e-6, atol=1e-6)
    assert y[-5:].tolist() == want[-5:].float().tolist()
    assert steps.steps(x[:1] * math.nan, None, known, known.rows(structure.Tensors())).isnan()


def test_a_gated_unit_can_be_differentiated_twice():
    x, up, dy = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    given = (1.0, (0.0,), (0.0, 1.0), (0.0, 0.0))
    # only a GPU has a kernel for it, which leaves this to the formulas
    f = functools.partial(autograd._formula, of_call(*given)[0], Role.TIMES, ())
    none = [None] * 6
    found = autograd.differentiated(f, (x, up, *none), dy, (True, True, *map(bool, none)))[:2]
    y = up * primitive.blend(x, *given)
    want = torch.autograd.grad(y, (x, up), dy, create_graph=True)
    torch.testing.assert_close(tuple(found), want)


def test_numbers_that_make_no_gate_are_refused_as_by_the_reference():
    x = torch.zeros(3)
    lines = ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    for tau, theta, words in (
        (0.0, (0.0, 1.0), "tau must be positive"),
        ((1.0, -1.0), (0.0, 1.0), "tau must be positive"),
        (INF, (1.0, 0.0), "non-decreasing"),
        # one hard gate among soft ones is NaN at its threshold
        ((1.0, INF), (0.0, 1.0), "at every threshold or at none"),
        ((INF, torch.tensor(1.0)), (0.0, 1.0), "at every threshold or at none"),
    ):
        for run in (kernels.blend, primitive.blend):
            with pytest.raises(ValueError, match=words):
                run(x, tau, theta, *lines)


def test_axes_with_another_between_them_are_left_to_the_reference():
    # parameters along axes 0 and 2: not one run of memory
    shape, x = (2, 1, 3), torch.randn(2, 4, 3)
    theta = torch.randn(1, *shape)
    structure, _ = of_call(1.0, theta, (0.0, 1.0), (0.0, 0.0))
    assert cpu.plan(structure, x.shape, x.stride(), shape) is None
    torch.testing.assert_close(*both(x, 1.0, theta, (0.0, 1.0), (0.0, 0.0)))
    one = x[:, :1]
    assert cpu.plan(structure, one.shape, one.stride(), shape) is not None


def test_nan_is_not_lost_between_constant_hard_branches():
    x = torch.tensor([float("nan"), 2.0])
    for c in ((-1.0, 1.0), (torch.tensor(-1.0), 1.0)):
        y = kernels.blend(x, INF, (0.0,), (0.0, 0.0), c)
        assert y[0].isnan()
        assert y[1] == 1


def traced(x, *parameters):
    """y in the steps that a compiler gets, or of the reference where these have none."""
    return steps.steps(x, None, *of_call(*parameters))


@pytest.mark.parametrize("run", [primitive.blend, kernels.blend, traced])
@pytest.mark.parametrize("c", [(3.0, 3.0), (0.0, 0.0), (-1.0, 1.0), (3.0, 3.0, 3.0)])
@pytest.mark.parametrize("tau", [1.0, INF])
def test_nan_is_not_lost_where_branches_do_not_depend_on_x(run, c, tau):
    x = torch.tensor([float("nan"), 200.0])  # at which the last gate is open
    y = run(x, tau, (0.0, 1.0)[: len(c) - 1], (0.0,) * len(c), c)
    assert y.isnan().tolist() == [True, False]
    assert y[1] == c[-1]


@pytest.mark.parametrize(
    ("name", "bounds"), [("clamp", (-1, 2)), ("clamp_min", (0.5,)), ("clamp_max", (3,))]
)
def test_a_clamp_is_torchs_own_at_its_bounds_too(name, bounds):
    low = None if name == "clamp_max" else float(bounds[0])
    high = None if name == "clamp_min" else float(bounds[-1])
    below, above = ([] if b is None else [b] for b in (low, high))
    s, c = [0] * len(below) + [1] + [0] * len(above), [*below, 0, *above]
    owner = ["hi"] * len(below) + ["lo"] * len(above)
    t = TG(INF, [*below, *above], s, c, owner=owner)
    op = native(t)
    assert op.args[0] is getattr(torch, name)
    x = torch.tensor([-3, -1, 0.5, 2, 3, 7, INF, -INF], requires_grad=True)
    want = torch.clamp(x, low, high)
    for y in (op(x), t(x)):
        assert torch.equal(y, want)
        grads = [torch.autograd.grad(z[:6].sum(), x, retain_graph=True)[0] for z in (y, want)]
        assert torch.equal(*grads)
    other = TG(INF, t.theta, s, c, owner=[{"lo": "hi", "hi": "lo"}[o] for o in owner])
    # its gradient at a bound is that of the outside
    assert native(other) is None or native(other).args[0] is not getattr(torch, name)


# What a call means, and what it may not say


def test_numbers_keep_their_digits_beside_tensors_of_fewer():
    x = torch.randn(500, dtype=torch.float64)
    for tau, theta in (
        (2.0, [0.5, torch.tensor(1)]),
        ([1.1, torch.tensor(3.0, dtype=torch.bfloat16)], [0.1, 0.9]),
        (float("inf"), [0.5, torch.tensor(1)]),
        (1.0, [0.1, torch.tensor(0.7)]),
    ):
        given = (tau, theta, [0.0, 1.0, 2.0], [0.0, 0.0, 0.1])
        for z in (x, x.repeat(40)):
            have, want = kernels.blend(z, *given), primitive.blend(z, *given)
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_torchs_own_op_does_not_lose_the_other_input(name):
    x, other = torch.randn(2, 9).unbind(0)
    structure = kernels.Structure.of(TAXONOMY["silu"])
    held = kernels.Structure.of(TAXONOMY["silu"]).tensors(
        dict(Activation("silu").named_buffers()), None
    )
    with kernels.use(name):
        times = kernels.blend(x, structure, held, (), native=True, up=other)
        read = kernels.blend(x, structure, held, (), native=True, v=other)
    torch.testing.assert_close(times, F.silu(x) * other)
    torch.testing.assert_close(read, torch.sigmoid(x) * other)


def test_few_hard_elements_have_the_same_bits_with_and_without_gradients():
    jump = TG(float("inf"), (0.3,), (0.5, -2.0), (1.0, 0.25))
    x = torch.randn(1000)
    for act in (Activation(jump, train=("s", "c", "theta")), Activation("relu", train=("c",))):
        with torch.no_grad():
            for p in act.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
            without = act(x)
        assert torch.equal(without, act(x).detach())
    with torch.no_grad():
        act.v[1] = float("inf")
        without = act(x)
    torch.testing.assert_close(without, act(x).detach(), rtol=0, atol=0, equal_nan=True)


def test_structure_has_no_gradient():
    act = Activation(TG(1.702, (0.1,), (0.0, 1.0), (0.0, 0.5)))
    act.s.requires_grad_(), act.c.requires_grad_()
    x = torch.randn(50)
    act(x).sum().backward()
    found = act.c.grad.clone()
    act.c.grad = None
    with kernels.use("reference"):
        act(x).sum().backward()
    torch.testing.assert_close(found, act.c.grad)
    assert act.s.grad is None or not act.s.grad.any()


@pytest.mark.parametrize("early", [False, True])
def test_a_traced_function_keeps_its_parameters_as_inputs(early):
    from torch.fx.experimental.proxy_tensor import make_fx

    act, x = Activation("silu", train=("tau", "theta")), torch.randn(7)
    act(x)  # a call before must not matter
    own = dict(act.named_parameters())

    def run(parameters, z):
        return torch.func.functional_call(act, parameters, (z,))

    graph = make_fx(run, pre_dispatch=early)(own, x)
    other = {name: p + 1 for name, p in own.items()}
    torch.testing.assert_close(graph(other, x), run(other, x))


@pytest.mark.parametrize("key", ["silu", "gelu_k3", "relu"])
def test_a_parameter_of_a_subclass_is_not_read_as_plain_memory(key):
    from torch.testing._internal.two_tensor import TwoTensor

    act, x = Activation(key, train=("s",), share="channel", channels=5, axis=-1), torch.randn(4, 5)
    act.s = nn.Parameter(TwoTensor(act.s.detach().clone(), 2 * act.s.detach()))
    y = act(x)
    assert type(y) is TwoTensor
    other = copy.deepcopy(act)
    other.s = nn.Parameter(2 * act.s.detach().a)
    torch.testing.assert_close(y.b, other(x))


def test_an_infinite_value_of_a_branch_that_is_not_taken_is_not_seen():
    x, v = torch.tensor([-1.0, 1.0]), torch.tensor([float("inf")] * 2)
    t = TG(float("inf"), (0.0,), (0.0, 1.0), (0.0, 0.0))
    for size in (1, 2**14):
        with torch.no_grad():
            y = kernels.blend(x.repeat(size), t, v=v.repeat(size))
        assert y.tolist() == [0.0, float("inf")] * size


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, t, s: kernels.blend(x, t, 7.0), "an instance stands alone, .*; got 7.0 as well"),
        (lambda x, t, s: kernels.blend(x, t, form="product"), "an instance stands alone"),
        (lambda x, t, s: kernels.blend(x, s), r"beside a Structure come tensors, shape.*got 0 arg"),
        (lambda x, t, s: kernels.blend(x, s, (1, 2, 3)), "beside a Structure come tensors, shape"),
        (lambda x, t, s: kernels.blend(x, s, 1, 2, owner=("hi",)), "got 2 arguments, owner"),
        (lambda x, t, s: kernels.blend(x, 1.0, [0.0], [0, 1], [0, 0], inplace=True), "inplace=True goes with a Structure"),
        (lambda x, t, s: kernels.blend(x, 1.0, [0.0], [0, 1], [0, 0], foo=1), "no option 'foo'; there are v, up"),
        (lambda x, t, s: kernels.gated_product(x, s, 1, 2), "gated_product: beside a Structure come"),
        (lambda x, t, s: kernels.gated_product(x, s, 1, 2, 3, form="product"), "3 arguments, form"),
    ],
)  # fmt: skip
def test_what_a_call_would_not_use_is_refused(call, words):
    t = TAXONOMY["silu"]
    with pytest.raises(TypeError, match=words):
        call(torch.randn(3), t, kernels.Structure.of(t))


def test_a_form_that_is_none_is_refused_whatever_the_backend():
    for name in ("auto", "reference"):
        with kernels.use(name), pytest.raises(ValueError, match="bogus"):
            kernels.blend(torch.randn(3), 1.0, [0.0], [0, 1], [0, 0], form="bogus")


def test_every_module_of_kernels_with_a_nonlinear_op_says_what_its_ops_are():
    """Or an audit would take its gates for torch's own functions."""
    root = Path(kernels.__file__).parent
    words = ("aten.sigmoid", "aten.tanh", "aten.exp", "aten.clamp")
    for path in root.rglob("*.py"):
        text = path.read_text()
        if any(word in text for word in words) and path.name not in ("lowering.py", "structure.py"):
            assert "AUDITED_AS" in text, path.relative_to(root)


@pytest.mark.parametrize("by", ["C", "steps"])
@pytest.mark.parametrize("key", ["silu", "gelu_k4"])
@pytest.mark.parametrize("groups", [5, 1])
def test_parameters_of_another_shape_are_refused(key, by, groups, monkeypatch):
    if by == "steps":
        monkeypatch.setattr(one_pass, "ready", lambda *given: None)
    share = {"share": "channel", "channels": 5} if groups == 5 else {}
    act = Activation(key, axis=-1, train=("tau", "theta", "s", "c"), **share)
    x, own = torch.randn(7, 5, requires_grad=True), act.s.detach()
    others = (
        own.t().contiguous(),
        own.view(1, -1),
        own[:, :1],
        own[:, :3:2],
        own[:1],
        torch.zeros(7),
    )
    for other in others:
        if other.shape == own.shape:
            continue
        act.s.data = own
        y = act(x)
        act.s.data = other
        with pytest.raises(ValueError, match=rf"for {groups} groups .* along the first axis; got"):
            act(x)
        # by us, or by autograd, which finds the gradient's shape wrong
        with pytest.raises((ValueError, RuntimeError), match=r"first axis; got|invalid gradient"):
            torch.autograd.grad(y.sum(), x)
