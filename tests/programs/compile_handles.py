"""Kernels compiled for a GPU where there is none: what the driver is given is what they take."""

import re
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from threshold_gating import TAXONOMY
from threshold_gating.kernels import runtime
from threshold_gating.kernels.blend import gpu
from threshold_gating.kernels.structure import Role, Structure, Wanted


class NoGPU:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))


triton.runtime.driver.set_active(NoGPU())
run = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False)


def check(launch, wide, count):
    """`wide` of `count` tensors are like x."""
    dtypes = [torch.bfloat16 if k < wide else torch.float32 for k in range(count)]
    tensors = [torch.empty(64, dtype=dtype) for dtype in dtypes]
    made = launch.kernel.warmup(*tensors, *launch.rest, grid=launch.grid, num_warps=launch.warps)
    loaded = SimpleNamespace(
        src=made.src, packed_metadata=made.packed_metadata, function=1, run=run
    )
    with mock.patch.object(runtime, "_fixed", return_value=()):
        handle = runtime._handle(loaded, launch.grid, launch.rest)
    widths = [int(bits) // 8 for bits in re.findall(r"\.param \.u(\d+)", made.asm["ptx"])]
    # the tensors, the numbers that were not compiled in, and Triton's own two memories
    assert handle.tensors == count
    assert widths == [8] * count + [4] * len(handle.numbers) + [8, 8], (handle, widths)
    assert handle.threads == 32 * launch.warps


structure = Structure.of(TAXONOMY["silu"], ("tau", "theta", "s", "c"))
for sizes, shape in (((32, 256), (1, 256)), ((7, 33), ())):
    plan = gpu.plan(structure, Role.ALONE, sizes, (sizes[1], 1), torch.bfloat16, shape)
    back = plan._prepare(Wanted(True, False, True, True, True, True))
    check(plan.run, 3, 9)
    check(back.run, 5, 15)
    if back.add is not None:
        check(back.add, 0, 5)

# The interpreter takes what the compiler refuses: turns of several tiles, by powers and one by one,
# with another input's gradient and with sums of a norm.
soft = Wanted(True, False, True, True, True, True)
for name, role, w in (
    ("gelu_k4_one_tau", Role.TIMES, soft._replace(other=True)),
    ("gelu_k4", Role.JOINED, Wanted(True, False, False, True, False, False)),
):
    known = gpu.Constants.of(Structure.of(TAXONOMY[name], ("tau", "theta", "s", "c")), role)
    check(gpu.prepared(known, (4096, 256, 1), 2).run, 3, 9)
    check(gpu.prepared(known, (4096, 256, 1), 2, w).run, 5, 15)
print("ok")
