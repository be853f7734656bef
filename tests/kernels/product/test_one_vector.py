"""One vector under hard gates reads one column an input; interpreted here, compiled where marked gpu."""

import copy
import gc
import itertools

import pytest
import torch

import threshold_gating as tg
from threshold_gating.kernels.product import one_vector

# Over the largest true value: up to 330 terms added in float32 in another order; the gate's
# constants and the result of 16 bits are rounded to 1 in 256 and 1 in 2,048.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


# A second threshold, constants, and an owner for each
THREE = tg.TG(float("inf"), (-1, 0.5), (1, 2, 1), (0.5, 1, 2), owner=("hi", "lo"))
CASES = (
    ("relu", "channel", ()),
    ("leaky_relu", "layer", ()),
    ("relu", "channel", ("theta",)),
    ("leaky_relu", "layer", ("theta",)),
    (THREE, "channel", ()),
    (THREE, "layer", ("theta",)),
    (THREE, "channel", ("theta", "c")),
)


# Inputs and outputs, which tiles fill or do not; the last are several parts on a GPU as well
SIZES = ((70, 150), (64, 128), (330, 40))


def check(device, dtype=torch.float32):
    """The kernel against float64, in parts and in one, and that it was the kernel."""
    torch.manual_seed(0)
    usual = one_vector._PROGRAMS
    try:
        for one_vector._PROGRAMS in (1, usual):
            one_vector._ready.cache_clear()
            for case, size in zip(CASES, itertools.cycle(SIZES), strict=False):
                bias = one_vector._PROGRAMS == 1 or case[1] == "layer"
                check_one(*case, size, device, dtype, bias)
    finally:
        one_vector._PROGRAMS = usual
        one_vector._ready.cache_clear()


def spoil_parts():
    """NaN wherever a program should leave its part before another one reads it."""
    for scratch in one_vector._SCRATCH.values():
        assert not scratch[: one_vector._COUNTERS].any()
        scratch[one_vector._COUNTERS :] = float("nan")


def check_one(init, share, train, size, device, dtype, bias):
    layer = tg.Linear(*size, init=init, share=share, train=train, bias=bias)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
        layer = layer.to(device, dtype)
        x = torch.randn(1, size[0], device=device).to(dtype)
        x[0, 3:5] = torch.tensor([0.0, 0.5])  # at a threshold, where there is one
        x[0, 5] = -1.0
        spoil_parts()
        with tg.kernels.use("triton"):
            have = layer(x)
        with tg.kernels.use("reference"):
            want = copy.deepcopy(layer).double()(x.double())
    assert one_vector._COPIES[id(layer.weight)].weight() is layer.weight
    error = float((have.double() - want).abs().max() / want.abs().max())
    assert error < TOLERANCE[dtype], f"{init} {share} {train} {size}: {error:.1e}"
    with torch.no_grad(), tg.kernels.use("triton"):
        layer.weight.mul_(2)
        again = layer(x)
    bias = 0 if layer.bias is None else layer.bias.detach().double()
    # twice the weights, twice the sum: both are rounded to the dtype beside the bias
    bound = 4 * TOLERANCE[dtype] * float(have.abs().max())
    assert float(((again.double() - bias) / 2 - (have.double() - bias)).abs().max()) < bound


def check_parts():
    """Every size is covered by its parts, and by no more of them than there is room for."""
    for outer, inner in itertools.product((1, 31, 64, 100, 4096, 11008, 2**17), repeat=2):
        for tile in ((16, 32), (64, 64), (128, 256)):
            across, chunk, parts = one_vector._cut(outer, inner, tile)
            assert across * tile[1] >= outer > (across - 1) * tile[1]
            assert chunk % tile[0] == 0
            assert chunk * parts >= inner > chunk * (parts - 1)
            if parts > 1:
                assert across <= one_vector._COUNTERS
                assert parts * outer <= one_vector._PROGRAMS * tile[1]


def check_a_counter_that_is_off():
    """Were a counter not back at zero, a sum would be made before its last part is there."""
    layer, x = tg.Linear(70, 40, init="relu"), torch.randn(70)
    with torch.no_grad(), tg.kernels.use("triton"):
        right = layer(x)
        spoil_parts()
        (scratch,) = one_vector._SCRATCH.values()
        scratch[1] = 1  # the strip of the last 8
        wrong = layer(x)
        scratch[1] = 0
    torch.testing.assert_close(wrong[:32], right[:32], rtol=0, atol=0)
    assert wrong[32:].isnan().all()


def check_copies():
    """The copy of the weights goes with them, and follows a move to other memory."""
    layer, x = tg.Linear(6, 5, init="relu"), torch.randn(6)
    with torch.no_grad(), tg.kernels.use("triton"):
        before = layer(x)
        layer.weight.data = 2 * layer.weight
        torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias))
        key = id(layer.weight)
        assert key in one_vector._COPIES
        del layer
        gc.collect()
        assert key not in one_vector._COPIES
    with torch.inference_mode(), tg.kernels.use("triton"):
        layer = tg.Linear(6, 5, init="relu")
        before = layer(x)
        layer.weight.mul_(2)  # which an inference tensor does not count
        torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias))


@pytest.mark.slow  # the pairs interpret this kernel as well
def test_the_kernel_equals_float64_step_by_step(step_by_step):
    step_by_step("interpret_one_vector.py")


@pytest.mark.gpu
def test_a_recorded_graph_sees_later_weights():
    layer, x = tg.Linear(64, 32, init="relu", bias=False).cuda(), torch.randn(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer(x)
        before = layer(x)
        layer.weight.mul_(2)
        graph.replay()
        torch.testing.assert_close(y, 2 * before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_kernel_equals_float64(dtype):
    check("cuda", dtype)


@pytest.mark.gpu
def test_parts_in_several_streams_give_the_same_bits():
    layer = tg.Linear(4096, 512, init="relu", bias=False).to("cuda", torch.bfloat16)
    x = torch.randn(4096, device="cuda").to(torch.bfloat16)
    with torch.no_grad():
        want = layer(x)
        assert one_vector._SCRATCH
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        found = []
        for stream in 50 * streams:
            with torch.cuda.stream(stream):
                found.append(layer(x))
        torch.cuda.synchronize()
    assert all(torch.equal(y, want) for y in found)
    spoil_parts()  # which looks at the counters
