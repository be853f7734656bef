"""`prove`: an instance compared with the function it replaces, on every finite number of a type.

There are 65,280 bfloat16 numbers, 63,488 float16 and 4,278,190,080 float32 ones, so what is said of
an element-wise instance can be tried on all of them. Three values are compared at each x: that of
the gates, that of the function in the same type ("torch's"), and the true one: the function in
float64. An ulp is the distance between neighbouring numbers of the type at the true value.

Of each block of inputs the largest errors are kept; the input where the largest of all happens is
found by evaluating its block once more.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating import kernels, taxonomy
from threshold_gating.conversion.enumeration import FORMATS, Walk, name_of
from threshold_gating.conversion.record import Proof, Worst, vector
from threshold_gating.conversion.site_error import LIMITS, RECORDED, difference
from threshold_gating.instance import TG
from threshold_gating.primitive import gates
from threshold_gating.taxonomy import ROWS, TAXONOMY

Function = Callable[[Tensor], Tensor]

_STEP = {"cpu": 2**17, "cuda": 2**26}  # inputs at a time: what a cache holds, what fills a GPU
_STEPS = 64  # to a piece of work on a CPU, half a second of it
_FOLDER = Path(__file__).parent  # `tg prove all --json proofs_DEVICE.json` makes what is on record


def prove(
    t: TG,
    f: Function,
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "",
    sup: float = 0.0,
    truth: Function | None = None,
    gate: Function | None = None,
    device: str | torch.device = "cpu",
    backend: kernels.Backend = "reference",
    sample: int | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> Proof:
    """Compare `t` with `f` on every finite number of `dtype`; an interrupt gives what was covered.

    Args:
        t: the instance. Its gates are evaluated, never an op of torch that equals them.
        f: the function that it replaces, element-wise.
        dtype: float32, float16 or bfloat16.
        name: what to call it (by default the name of its row).
        sup: the largest error that `t` claims; 0 claims to be exact.
        truth: `f` in float64, where a better formula is known than `f` itself.
        gate: what evaluates `t` (by default the backend does).
        device, backend: where and by what the gates are evaluated.
        sample: try about so many inputs, of every exponent, which is no proof.
        jobs: processes that share the work of a CPU.
        progress: is told how many inputs are done, and of how many.

    >>> prove(TAXONOMY["relu"], torch.relu, torch.bfloat16).differs
    0
    """
    _check(dtype, device := torch.device(device), jobs)
    walk = Walk.over(dtype, sample)
    evaluate = gate or partial(kernels.evaluate, t)
    task = _Task(t, f, truth or f, evaluate, sup, walk, device)
    found = _Found(walk)
    with kernels.use(backend), torch.no_grad():
        try:
            with _pieces(task, jobs) as pieces:
                for piece in pieces:
                    found.add(*piece)
                    progress(found.inputs, 2 * walk.count)
        except KeyboardInterrupt:
            pass  # the record says how far it came
        return found.proof(task, name or taxonomy.name_of(t) or "instance", backend)


def _check(dtype: torch.dtype, device: torch.device, jobs: int) -> None:
    if dtype not in FORMATS:
        known = ", ".join(map(name_of, FORMATS))
        raise ValueError(
            f"prove: {name_of(dtype)} cannot be tried; the types with few enough numbers are "
            f"{known}."
        )
    if jobs < 1 or (jobs > 1 and device.type != "cpu"):
        raise ValueError(
            f"prove: jobs must be 1 or more processes that share a CPU; got jobs={jobs} on "
            f"{device}."
        )
    if jobs > 1 and "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError("prove: jobs need a system that can fork; leave them out here.")


def prove_row(key: str, dtype: torch.dtype = torch.float32, **options: Any) -> Proof:
    """`prove` for a row of the taxonomy."""
    row = ROWS[key]
    truth = TRUTHS.get(key)
    return prove(TAXONOMY[key], row.f, dtype, name=key, sup=row.sup, truth=truth, **options)


# What is measured

_OWN, _TORCHS, _DISTANCE, _ERROR = range(4)  # the errors that are kept of each block
_COUNTS = ("differs", "zeros", "nan", "infinite", "torch_nan", "torch_infinite", "loose", "beyond")


@dataclass(frozen=True)
class _Task:
    """One comparison: what is evaluated, and on what."""

    t: TG
    f: Function
    truth: Function
    gate: Function
    sup: float
    walk: Walk
    device: torch.device

    @property
    def step(self) -> int:
        """How many blocks are evaluated at a time."""
        return max(1, _STEP.get(self.device.type, _STEP["cpu"]) // self.walk.block)

    def largest(self, sign: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The largest of each error in each of these blocks, and the counts over all of them."""
        found, total = [], torch.zeros(len(_COUNTS), dtype=torch.int64)
        for start in range(first, last, self.step):
            stop = min(start + self.step, last)
            errors, counts = self.errors(sign, start, stop)
            found.append(torch.stack([_by_block(e, stop - start, self.walk.block) for e in errors]))
            total += counts
        return torch.cat(found, 1), total

    def errors(self, sign: int, first: int, last: int) -> tuple[list[Tensor | None], Tensor]:
        """The four errors at each input of these blocks (None: all zero), and the counts."""
        x, bits = self.walk.values(sign, first, last, self.device), self.walk.format.bits
        truth = _rounded_to_infinity(self.truth(x.double()), x.dtype)
        have, want = self.gate(x), self.f(x.clone()).to(x.dtype)  # f may work in place
        unit, own = _unit(truth, x.dtype), _distance(have, truth)
        if torch.equal(have.view(bits), want.view(bits)):
            ulp = own.div_(unit)
            return [ulp, ulp, None, None], torch.zeros(len(_COUNTS), dtype=torch.int64)
        torchs, apart = _distance(want, truth), _distance(have, want.double())
        apart.masked_fill_(apart.isinf(), 0.0)  # these are counted
        counts = self._counts(x, have, want, own - torchs, unit)
        return [own.div_(unit), torchs.div_(unit), apart / unit, apart], counts

    def _counts(self, x: Tensor, have: Tensor, want: Tensor, worse: Tensor, unit: Tensor) -> Tensor:
        bits = self.walk.format.bits
        equal = have == want
        differs = ~(equal | (have.isnan() & want.isnan()))
        zeros = equal & (have.view(bits) != want.view(bits))
        odd = [
            test(one) & ~test(other)
            for one, other in ((have, want), (want, have))
            for test in (torch.isnan, torch.isinf)
        ]
        fine = unit.clamp_min(torch.finfo(x.dtype).eps) if self.sup else unit
        worse = worse - self.sup * RECORDED - LIMITS["element"][x.element_size() < 4] * fine
        loose = differs & ~(worse <= 0)  # also where it is NaN
        counts = torch.stack([each.count_nonzero() for each in (differs, zeros, *odd, loose)]).cpu()
        beyond = int((~(worse[loose] <= rounding(self.t, x[loose]))).sum()) if counts[-1] else 0
        return torch.cat([counts, torch.tensor([beyond])])

    def at(self, kind: int, sign: int, block: int) -> float:
        """The input at which the largest error of this kind in a block happens."""
        # Evaluated with its neighbours, as it was: torch's code for the last few elements of a
        # tensor may differ from that for many in a last digit.
        first = block // self.step * self.step
        last = min(first + self.step, self.walk.blocks)
        error = self.errors(sign, first, last)[0][kind]
        assert error is not None
        size, start = self.walk.block, (block - first) * self.walk.block
        offset = int(error[start : start + size].argmax())
        return self.walk.values(sign, block, block + 1)[offset].item()


def _by_block(error: Tensor | None, blocks: int, size: int) -> Tensor:
    """The largest in each block, the last of which may be shorter."""
    if error is None:
        return torch.zeros(blocks, dtype=torch.float64)
    missing = blocks * size - len(error)
    whole = torch.cat([error, error.new_zeros(missing)]) if missing else error
    return whole.view(blocks, size).amax(1).cpu()


def _distance(y: Tensor, truth: Tensor) -> Tensor:
    """|y - truth|: infinite where only one is infinite or NaN, 0 where both are the same."""
    d = (y - truth).abs_()
    return d if math.isfinite(d.sum().item()) else difference(y, truth)


def _unit(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance to the next number of `dtype` at each value: its power of two, times eps."""
    info = torch.finfo(dtype)
    power = (truth.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return power.clamp_(info.tiny, 2.0 ** (math.frexp(info.max)[1] - 1)).mul_(info.eps)


def _rounded_to_infinity(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """What is too large for `dtype` is infinite there, and rightly so."""
    if truth.abs().amax() <= torch.finfo(dtype).max:
        return truth
    narrow = truth.to(dtype).double()
    return torch.where(narrow.isinf(), narrow, truth)


class _Found:
    """What the pieces of a task add up to."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.inputs = walk, 0
        self.largest = torch.zeros(4, 2, walk.blocks, dtype=torch.float64)
        self.counts = torch.zeros(len(_COUNTS), dtype=torch.int64)

    def add(self, sign: int, first: int, last: int, largest: Tensor, counts: Tensor) -> None:
        self.largest[:, sign, first:last] = largest
        self.counts += counts
        self.inputs += min(last * self.walk.block, self.walk.count) - first * self.walk.block

    def proof(self, task: _Task, name: str, backend: str) -> Proof:
        walk, interrupted = self.walk, self.inputs < 2 * self.walk.count
        every = slice(0, 2 * walk.blocks)
        span, inside = (None, every) if interrupted else self._within(*open_gates(task.t))
        worst = partial(self._worst, task)
        counts = dict(zip(_COUNTS, self.counts.tolist(), strict=True))
        return Proof(
            name=name,
            dtype=name_of(walk.dtype),
            device=task.device.type,
            backend=backend,
            torch=str(torch.__version__),
            vector=vector(task.device),
            inputs=self.inputs,
            complete=walk.complete and not interrupted,
            interrupted=interrupted,
            sup=task.sup,
            **counts,
            error=worst(_ERROR, every),
            distance=worst(_DISTANCE, every),
            ulp=worst(_OWN, every),
            torch_ulp=worst(_TORCHS, every),
            within=span,
            ulp_within=worst(_OWN, inside),
            torch_within=worst(_TORCHS, inside),
            special=_special(task),
        )

    def _along_the_line(self, kind: int) -> Tensor:
        """The largest errors from the far negative numbers over zero to the far positive ones."""
        return torch.cat([self.largest[kind, 1].flip(0), self.largest[kind, 0]])

    def _worst(self, task: _Task, kind: int, among: slice) -> Worst:
        errors = self._along_the_line(kind)[among]
        value, place = errors.max().item(), int(errors.argmax()) + among.start
        if not value:
            return Worst()
        blocks = self.walk.blocks
        sign, block = (0, place - blocks) if place >= blocks else (1, blocks - 1 - place)
        return Worst(value, task.at(kind, sign, block))

    def _within(self, low: float, high: float) -> tuple[tuple[float, float] | None, slice]:
        """The range from `low` to `high` and beyond as far as no error is larger; its blocks."""
        near, far = (edge.double() for edge in self.walk.edges())
        starts, ends = torch.cat([-far.flip(0), near]), torch.cat([-near.flip(0), far])
        ulp = self._along_the_line(_OWN)
        inside = ((starts >= low) & (ends <= high)).nonzero().flatten().tolist()
        if not inside:
            return None, slice(0, len(ulp))
        first, last = inside[0], inside[-1]
        larger = (ulp > ulp[first : last + 1].max()).nonzero().flatten().tolist()
        first = max((k + 1 for k in larger if k < first), default=0)
        last = min((k - 1 for k in larger if k > last), default=len(ulp) - 1)
        left = -math.inf if first == 0 else starts[first].item()
        right = math.inf if last == len(ulp) - 1 else ends[last].item()
        return (left, right), slice(first, last + 1)


def open_gates(t: TG) -> tuple[float, float]:
    """Where no gate of `t` underflows in float32: none is smaller than the least normal number."""
    if t.hard:
        return -math.inf, math.inf
    # The largest of K gates is 1/K or more, and another one smaller by exp(difference of logits).
    reach = -math.log(torch.finfo(torch.float32).tiny) - math.log(t.K)
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,) * len(t.theta)
    slopes = [0.0, *accumulate(taus)]
    shifts = [0.0, *accumulate(tau * at for tau, at in zip(taus, t.theta, strict=True))]
    low, high = -math.inf, math.inf
    for a, b in combinations(range(t.K), 2):
        slope, shift = slopes[b] - slopes[a], shifts[b] - shifts[a]
        low, high = max(low, (shift - reach) / slope), min(high, (shift + reach) / slope)
    return low, high


def rounding(t: TG, x: Tensor) -> Tensor:
    """How far the gates may be off by rounding their own steps in float32, at each x.

    An argument tau (x - theta) is off by a few eps of its parts, and a gate, which is exponential
    in the arguments, by that many eps of itself, or of the least normal number if it is smaller.
    Triton's exponential is 0 there, so its gates may be off by all of that number. Branches that
    cancel keep the errors of both.
    """
    x, info = x.double(), torch.finfo(torch.float32)
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,) * len(t.theta)
    arguments, size, closed = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    flushed = info.tiny if kernels.backend() == "triton" and not t.hard else 0.0
    for tau, theta in zip(taus, t.theta, strict=True):
        arguments += 0.0 if t.hard else tau * (x.abs() + abs(theta))
    each = gates(x, t.tau, t.theta, form=t.form, owner=t.owner)
    for g, q, s, c in zip(each, t.q or (0.0,) * t.K, t.s, t.c, strict=True):
        branch = abs(q) * x * x + abs(s) * x.abs() + abs(c)
        size += (g + info.tiny) * branch
        closed += flushed * branch
    return info.eps * (LIMITS["element"][0] + arguments) * size + closed


def _special(task: _Task) -> tuple[tuple[str, str, str], ...]:
    x = torch.tensor([math.inf, -math.inf, math.nan], dtype=task.walk.dtype, device=task.device)
    values = zip(*(y.tolist() for y in (x, task.gate(x), task.f(x.clone()))), strict=True)
    return tuple((str(x), str(y), str(z)) for x, y, z in values if str(y + 0.0) != str(z + 0.0))


# Several processes

_Piece = tuple[int, int, int, Tensor, Tensor]
_shared: _Task | None = None  # forked processes inherit it; functions cannot be sent


@contextmanager
def _pieces(task: _Task, jobs: int) -> Iterator[Iterator[_Piece]]:
    """The work done piece by piece, here or by so many processes."""
    global _shared
    pieces = list(task.walk.pieces(task.step * (1 if task.device.type == "cuda" else _STEPS)))
    if jobs == 1:
        yield ((*piece, *task.largest(*piece)) for piece in pieces)
        return
    _shared = task
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _alone)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; these processes use one thread of torch's.
            warnings.simplefilter("ignore", DeprecationWarning)
            results = pool.map(_work, pieces)  # forks
        done = zip(pieces, results, strict=True)
        yield ((*p, torch.tensor(y, dtype=torch.float64), torch.tensor(n)) for p, (y, n) in done)
    finally:
        pool.shutdown(cancel_futures=True)
        _shared = None


def _alone() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means


def _work(piece: tuple[int, int, int]) -> tuple[Any, Any]:
    assert _shared is not None
    with torch.no_grad():
        largest, counts = _shared.largest(*piece)
    # as numbers: a tensor is sent as an open file, and few may be open
    return largest.tolist(), counts.tolist()


# What is on record


def _tanhshrink(x: Tensor) -> Tensor:
    """x - tanh(x), by its series where the difference cancels."""
    z, series = x * x, torch.zeros_like(x)
    for term in (-21844 / 6081075, 1382 / 155925, -62 / 2835, 17 / 315, -2 / 15, 1 / 3):
        series = series * z + term
    return torch.where(x.abs() < 0.05, x * z * series, x - torch.ops.aten.tanh.default(x))


# Better formulas in float64 than the function itself, by the name of the row.
TRUTHS: dict[str, Function] = {"tanhshrink": _tanhshrink}


def kind_of(module: nn.Module) -> str | None:
    """The row that one of torch's own modules is, by its class: leaky_relu for nn.LeakyReLU."""
    if type(module).__module__ != nn.ReLU.__module__:
        return None
    name = type(module).__name__.lower()
    return next((key for key in TAXONOMY if key.replace("_", "") == name), None)


def holds_for_every_input(
    t: TG, f: str | nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Proof | None:
    """The complete proof on record that `t` is `f`, or None: nothing is known of every input then.

    Figures of soft gates depend on torch's own functions; the proof says with which torch it was
    made.

    Args:
        t: the instance at a site.
        f: what it replaces: the name of torch's function ("silu"), or the module.
        dtype, device: with which and where the gates are evaluated, by the reference.
    """
    key = f if isinstance(f, str) else kind_of(f)
    if key is None or TAXONOMY.get(key) != t:
        return None
    found = on_record().get((key, name_of(dtype), torch.device(device).type))
    return found if found is not None and found.holds else None


@cache
def on_record() -> dict[tuple[str, str, str], Proof]:
    """The complete proofs that come with the library, by row, type and device."""
    texts = (path.read_text("utf-8") for path in sorted(_FOLDER.glob("proofs_*.json")))
    found = [Proof.from_dict(each) for text in texts for each in json.loads(text)["proofs"]]
    return {(each.name, each.dtype, each.device): each for each in found if each.complete}
