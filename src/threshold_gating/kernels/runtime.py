"""How kernels of Triton are launched: with little Python around a call. Imports no Triton."""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreting() -> bool:
    """Whether Triton runs its kernels step by step on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_installed() -> bool:
    return _INSTALLED


def _found() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ImportError:  # someone forbids it
        return False


_INSTALLED = _found()  # here, for Dynamo may not look


def capturing() -> bool:
    """Whether what runs now is recorded as a CUDA graph."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


_READ_BY_GRAPHS: dict[Any, Any] = {}


def cached(table: Callable[..., Any], *key: Any) -> Any:
    """What the cache `table` has of `key`, for good if a graph is captured, which reads it later.

    The cache itself may forget it then, and its memory would hold something else.
    """
    found = table(*key)
    if capturing():
        _READ_BY_GRAPHS[table, key] = found
    return found


def readable(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gate tensors as kernels read them; only mixed precision and odd views are copied for it."""
    float32 = torch.float32
    for t in tensors:
        if t.dtype is not float32 or not t.is_contiguous() or t.is_neg():
            return tuple([w.detach().float().contiguous().resolve_neg() for w in tensors])
    return tensors


def total(sums: Tensor, axis: int) -> Tensor:
    """The second stage of a sum: parts added up, where there are several."""
    return sums.sum(axis) if sums.shape[axis] > 1 else sums.select(axis, 0)


_address, _device = Tensor.data_ptr, Tensor.get_device  # mapped, they take two thirds of the time


class Handle(NamedTuple):
    """A compiled kernel as the driver launches it."""

    function: int
    grid: tuple[int, ...]
    threads: int
    shared: int  # bytes
    tensors: int
    numbers: tuple[int, ...]  # that come behind the tensors


class Launch:
    """A kernel for a grid, with all but its tensors: to be called with these again and again.

    Once compiled, it is called past Triton's own look-up, which takes longer than small kernels
    run; with the addresses in place of the tensors, which Triton would ask for one by one.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], warps: int, rest: Sequence[Any]) -> None:
        self.kernel, self.warps, self.rest = kernel, warps, tuple(rest)
        self.grid = (*grid, 1, 1)[:3]
        self.ready: dict[Any, Callable[..., None]] = {}
        self.compiled: dict[Any, Any] = {}

    def __call__(self, tensors: tuple[Tensor, ...], kinds: Any = None) -> None:
        """Run; `kinds` stands for the types of the tensors, if the caller knows them."""
        x = tensors[0]
        if not x.is_cuda or (kinds is None and type(x) not in (Tensor, torch.nn.Parameter)):
            self._ordinary(tensors)
            return
        places = [*map(_address, tensors)]
        odd = functools.reduce(operator.or_, places) & 15
        # Triton compiles anew for other types and for addresses that are no multiples of 16.
        device: int = x.get_device()
        key = device, tuple([t.dtype for t in tensors]) if kinds is None else kinds
        run = self.ready.get(key)
        if {*map(_device, tensors)} != {device}:  # an address does not say where it lies
            devices = ", ".join(sorted({str(t.device) for t in tensors}))
            raise RuntimeError(
                f"gates and input must be on one device, got {devices}; "
                "move the module and its input with .to(device)."
            )
        if run is not None and not odd and torch._C._cuda_getDevice() == device:
            run(*places, *self.rest)
            return
        with torch.cuda.device(x.device):
            compiled = self._ordinary(tensors)
        if not odd:
            self.ready[key] = _runner(compiled, self.grid, device)
            self.compiled[key] = compiled

    def handle(self, device: int, kinds: Any) -> Handle | None:
        """The compiled kernel for `host`; None if there is none yet, or Triton must launch it."""
        compiled = self.compiled.get((device, kinds))
        return None if compiled is None else _handle(compiled, self.grid, self.rest)

    def beside(
        self, given: tuple[Tensor, ...], made: Sequence[Tensor], others: tuple[Tensor, ...]
    ) -> None:
        """Run for tensors in this order, of which the caller has `made` some: these are on the
        device of x, the first, and lie as they should. The types follow from that of x."""
        x = given[0]
        device = x.get_device()
        foreign = (*given, *others)
        places = [*map(_address, foreign)]
        run = self.ready.get((device, x.dtype))
        if (
            run is None
            or functools.reduce(operator.or_, places) & 15
            or [*map(_device, foreign)].count(device) != len(foreign)
            or torch._C._cuda_getDevice() != device
        ):  # a longer look, which says what is wrong
            self((*given, *made, *others), x.dtype)
            return
        n = len(given)
        run(*places[:n], *map(_address, made), *places[n:], *self.rest)

    def along(self, tensors: tuple[Tensor, ...], lines: Tensor, backwards: bool = False) -> None:
        """Run for each line of `lines`, the kernel's last tensor, from the first or from the last.

        Python takes as long for a launch as a short kernel runs: what it looks up, it does once.
        """
        order = range(len(lines))[:: -1 if backwards else 1]
        self((*tensors, lines[order[0]]))
        kinds = tuple([t.dtype for t in (*tensors, lines)])
        run, places = self.ready.get((lines.get_device(), kinds)), [*map(_address, tensors)]
        start, size = lines.data_ptr(), lines.stride(0) * lines.element_size()
        if run is None or functools.reduce(operator.or_, places, start | size) & 15:
            for k in order[1:]:
                self((*tensors, lines[k]))
            return
        with torch.cuda.device(lines.device):
            for k in order[1:]:
                run(*places, start + k * size, *self.rest)

    def _ordinary(self, tensors: tuple[Tensor, ...]) -> Any:
        kernel = self.kernel
        # of another type while a graph is made: see `blend.graph`
        if type(tensors[0]) not in (Tensor, torch.nn.Parameter):
            kernel = torch.library.wrap_triton(kernel)
        return kernel[self.grid](*tensors, *self.rest, num_warps=self.warps)


def _runner(compiled: Any, grid: tuple[int, ...], device: int) -> Callable[..., None]:
    """A compiled kernel as a function of its arguments, on the current stream of its device.

    `compiled[grid]` does more for each launch before it comes to its C function: it asks for the
    device and for memory that our kernels do not need, and describes the launch to absent hooks.
    """
    ordinary: Callable[..., None] = compiled[grid]
    fixed = _fixed(compiled)
    if fixed is None:
        return ordinary
    launch, as_tuple = compiled.run.launch, fixed[-1] is not None
    stream = torch._C._cuda_getCurrentRawStream
    enter, leave = hooks()

    def direct(*arguments: Any) -> None:
        if enter or leave:  # someone, as Triton's profiler, wants to know of every launch
            ordinary(*arguments)
        elif as_tuple:
            launch(*grid, stream(device), *fixed, arguments)
        else:
            launch(*grid, stream(device), *fixed, *arguments)

    return direct


def hooks() -> tuple[Any, Any]:
    """Who wants to know of launches: two lists, to which someone may add later, or True."""
    from triton import knobs

    both = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    enter, leave = (getattr(hook, "calls", True) for hook in both)
    return enter, leave


def _handle(compiled: Any, grid: tuple[int, ...], rest: Sequence[Any]) -> Handle | None:
    """A kernel that the driver launches with no more than its arguments; None for any other."""
    if _fixed(compiled) is None or compiled.run.launch_cooperative_grid or compiled.run.launch_pdl:
        return None
    warps, blocks, shared = compiled.packed_metadata[:3]
    types = [*compiled.src.signature.values()]
    count = len(types) - len(rest)
    passed = [(kind, n) for kind, n in zip(types[count:], rest, strict=True) if kind != "constexpr"]
    known = all(str(kind).startswith("*") for kind in types[:count])
    if blocks != 1 or not known or any(kind not in ("i32", "i64") for kind, _ in passed):
        return None
    numbers = tuple([n for _, n in passed])
    return Handle(compiled.function, grid, 32 * warps, shared, count, numbers)


def _fixed(compiled: Any) -> tuple[Any, ...] | None:
    """What Triton's C function takes between the stream and the arguments of the kernel.

    Triton 3.6 takes these one by one, 3.7 as one tuple and their types before it. None for any
    other and for kernels that need memory of their own: they are launched by Triton's own means.
    """
    from triton import __version__ as version

    run, metadata = compiled.run, compiled.packed_metadata
    known = version.startswith(("3.6.", "3.7.")) and type(run).__name__ == "CudaLauncher"
    if not known or run.global_scratch_size or run.profile_scratch_size:
        return None
    first = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    # The Nones: two memories, what the hooks are told, the two hooks.
    if version.startswith("3.6."):
        return *first, None, None, metadata, None, None, None
    types = run.arg_annotations, run.kernel_signature
    return *first, metadata, None, None, None, None, None, *types
