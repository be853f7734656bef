"""Attention by gates on a GPU against torch: checked against float64 first, then timed in turn.

bf16, causal, inputs drawn anew. Times are medians of rounds in which every contender is called
once, in an order drawn anew: all see the same clocks, so those that are the same come out equal.
`SDPA` is the fastest of its backends, `FA2` the backend FlashAttention-2, `Flex` compiled
FlexAttention, which is timed only. A limit that is missed is printed as MISSED.

    python -m benchmarks.attention [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from threshold_gating import kernels, logits
from threshold_gating.nn import attention

# shape [B, H, S, D]: the limit of the literal forward, in times FA2
SHAPES = {(4, 16, 4096, 128): 2.0, (8, 16, 2048, 64): 2.5}
BACKENDS = {
    "FA2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Norm of the error over the norm of the values: bf16 operands and gates, each rounded to 2^-9.
ERROR_LIMIT = 5e-3
HEADS = 16  # everywhere, for Triton compiles anew for a number that 16 does not divide
LENGTHS = (2048, 4096, 8192, 16384)
GROWTH_LIMIT = 2.2  # peak memory of twice the length, over that of one; quadratic would be 4


def limits(literal):
    """(contender, pass): (what it is compared with, the most that it may take of its time)."""
    return {
        ("native", "forward"): ("SDPA", 1.02),
        ("native", "both"): ("SDPA", 1.02),
        ("fused", "forward"): ("FA2", 1.05),
        ("fused", "both"): ("FA2", 1.2),
        ("fused tau", "forward"): ("FA2", 1.05),
        ("fused tau", "both"): ("FA2", 1.2),
        ("literal", "forward"): ("FA2", literal),
        ("literal", "both"): ("FA2", 1.8),
        ("statistics", "forward"): ("fused", 1.25),
    }


def draw(shape, requires_grad=True):
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(requires_grad)
        for _ in range(3)
    ]


def through(backend, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex(shape):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def gated(shape):
    """Our ways to the same output, as functions of q, k and v."""
    tau = torch.ones(shape[1], device="cuda", requires_grad=True)
    attend = partial(attention.scaled_dot_product_attention, is_causal=True)
    return {
        "native": partial(attend, way="native"),
        "fused": partial(attend, way="fused"),
        "fused tau": partial(attend, way="fused", tau=tau),
        "statistics": lambda *qkv: attention.with_statistics(*qkv, is_causal=True)[0],
        "literal": partial(attend, way="literal"),
    }


def torchs():
    """Those of torch."""
    return {name: partial(through, backend) for name, backend in BACKENDS.items()}


def relative(have, want):
    return ((have.double() - want).norm() / want.norm()).item()


def check(head):
    """Worst error of values and gradients of every contender, on heads of 1024 tokens."""
    torch.manual_seed(0)
    shape = (1, HEADS, 1024, head)
    qkv, do = draw(shape), torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in qkv]
    with kernels.use("reference"):
        want = logits.attend(*exact, is_causal=True)
    wanted = torch.autograd.grad(want, exact, do.double())
    errors = {}
    for name, f in {**torchs(), **gated(shape)}.items():
        have = f(*qkv)
        grads = torch.autograd.grad(have, qkv, do)
        pairs = zip((have, *grads), (want, *wanted), strict=True)
        errors[name] = max(relative(a, b) for a, b in pairs)
    return errors


def timed(functions, rounds=100):
    """Milliseconds of each function, the median over rounds."""
    for f in functions.values():
        f()
    # Written before each call, it empties the L2 cache and keeps the GPU at work until the call has
    # been queued, so that no launch is timed. Nothing waits for the GPU before the last round.
    buffer = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    taken = {name: [] for name in functions}
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            buffer.zero_()
            begin.record()
            functions[name]()
            end.record()
            taken[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        for name, pairs in taken.items()
    }


def times(shape):
    """{pass: {contender: ms}}, the best of torch's own backends as SDPA."""
    qkv = draw(shape)
    do = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    found = {**torchs(), "Flex": flex(shape), **gated(shape)}

    def both(f):
        torch.autograd.grad(f(*qkv), qkv, do)

    with torch.no_grad():
        forward = timed({name: partial(f, *qkv) for name, f in found.items()})
    backward = timed({name: partial(both, f) for name, f in found.items()})
    for each in (forward, backward):
        each["SDPA"] = min(each[name] for name in BACKENDS)
    return {"forward": forward, "both": backward}


def peak_memory(way, length):
    """Bytes that forward and backward take beyond inputs and gradients, of heads of 64."""
    qkv = draw((1, HEADS, length, 64))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention.scaled_dot_product_attention(*qkv, is_causal=True, way=way)
    torch.autograd.grad(out, qkv, torch.ones_like(out))
    return torch.cuda.max_memory_allocated() - before


def verdict(value, limit):
    return "ok" if value <= limit else "MISSED"


def print_times(shape, measured, errors):
    allowed = limits(SHAPES[shape])
    print(f"\n[B, H, S, D] = {list(shape)}, error over norm against float64, limit {ERROR_LIMIT}")
    print(f"{'':<11}{'pass':<9}{'ms':>7}{'/SDPA':>8}{'/FA2':>7}{'/Flex':>7}{'error':>10}  limit")
    for stage, each in measured.items():
        for name in (*BACKENDS, "Flex", "native", "fused", "fused tau", "statistics", "literal"):
            ms = each[name]
            line = (
                f"{name:<11}{stage:<9}{ms:>7.3f}{ms / each['SDPA']:>8.3f}{ms / each['FA2']:>7.3f}"
            )
            line += f"{ms / each['Flex']:>7.3f}"
            line += f"{errors[name]:>10.1e}" if name in errors else f"{'-':>10}"
            if (name, stage) in allowed:
                to, limit = allowed[name, stage]
                ratio = ms / each[to]
                line += f"  {ratio:.3f} of {to}, at most {limit}: {verdict(ratio, limit)}"
            if errors.get(name, 0) > ERROR_LIMIT:
                line += "  error MISSED"
            print(line, flush=True)


def print_memory():
    print(
        f"\npeak memory of both passes, {HEADS} heads of 64; twice the length:"
        f" at most x {GROWTH_LIMIT}"
    )
    found = {}
    for way in ("fused", "literal"):
        peaks = found[way] = [peak_memory(way, length) for length in LENGTHS]
        growth = max(b / a for a, b in pairwise(peaks))
        row = ", ".join(f"{n}: {b / 2**20:.1f} MiB" for n, b in zip(LENGTHS, peaks, strict=True))
        print(f"{way:<9}{row}; x {growth:.2f}: {verdict(growth, GROWTH_LIMIT)}")
    return found


def main():
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.attention: needs a CUDA device")
    torch.set_float32_matmul_precision("highest")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, causal")
    report = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "shapes": []}
    for shape in SHAPES:
        errors = check(shape[-1])
        measured = times(shape)
        print_times(shape, measured, errors)
        report["shapes"].append({"shape": shape, "ms": measured, "errors": errors})
    report["memory"] = print_memory()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
