"""A Llama-style language model before and after conversion: tokens a second, in one process.

    python -m benchmarks.llm           # 1.1 G parameters, bf16, on a GPU
    python -m benchmarks.llm --smoke   # a tiny one, anywhere

Random weights: speed does not depend on them. The logits of both are compared first, by gates
(`reference`); then both run under `auto`, in turn. The limits are tokens/s over the original's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import threshold_gating as tg

LIMITS = {"prefill": 0.98, "decode, compiled": 0.98, "decode, eager": 0.95}
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
LARGE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decoder(model: Any, ids: torch.Tensor, steps: int, backend: str | None) -> Callable[[], None]:
    """Greedy decoding of `steps` tokens after `ids`, with a static cache if compiled."""
    if backend is None:

        def eager() -> None:
            cache, token = None, ids
            for _ in range(steps):
                out = model(token, past_key_values=cache, use_cache=True)
                cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

        return eager
    options: dict[str, Any] = {"mode": "reduce-overhead"} if backend == "inductor" else {}
    run = torch.compile(model.forward, fullgraph=True, backend=backend, **options)

    def compiled() -> None:
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + steps + 1)
        out = model(ids, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        for k in range(steps):
            position = torch.full((1, 1), ids.shape[1] + k, device=ids.device)
            out = run(token, past_key_values=cache, position_ids=position, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)

    return compiled


def compared(
    ours: Callable[[], None], theirs: Callable[[], None], rounds: int
) -> tuple[float, float]:
    """(median seconds of ours, of theirs), run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for k in range(rounds + 1):
        pair = [(ours, times[0]), (theirs, times[1])]
        for run, spent in pair if k % 2 else pair[::-1]:
            synchronise()
            start = time.perf_counter()
            run()
            synchronise()
            if k:  # the first round warms up and compiles
                spent.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model, without inductor")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(**(SMALL if args.smoke else LARGE), max_position_embeddings=4096)
        model = LlamaForCausalLM(config).to(dtype).eval()
    length, steps = (16, 4) if args.smoke else (2048, 64)
    ids = torch.randint(0, config.vocab_size, (1, length), device=device)
    gated = tg.convert(model, inputs={"input_ids": ids[:, :32]})
    with tg.kernels.use("reference"):
        y, z = (m(ids[:, :64]).logits.float() for m in (model, gated))
    error = float((y - z).abs().max() / y.abs().max())
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e9:.2f} G parameters, {dtype}, {device}, torch {torch.__version__}")
    print(f"logits by gates, max|d| / max|y|: {error:.1e}")
    short, backend = ids[:, : length // 16], "aot_eager" if args.smoke else "inductor"
    work = {
        "prefill": lambda m: lambda: m(batch),
        "decode, eager": lambda m: decoder(m, short, steps, None),
        "decode, compiled": lambda m: decoder(m, short, steps, backend),
    }
    batch = ids.repeat(4, 1)  # enough work that the GPU and not Python sets the time
    tokens = {"prefill": batch.numel()}
    results: dict[str, Any] = {"error": error, "device": device, "torch": torch.__version__}
    for name, make in work.items():
        ours, theirs = compared(make(gated), make(model), args.rounds)
        n = tokens.get(name, steps)
        ratio, limit = theirs / ours, LIMITS[name]
        verdict = "" if ratio >= limit else "  MISSED"
        print(
            f"{name:18} {n / ours:10.0f} tokens/s, original {n / theirs:10.0f}, "
            f"ratio {ratio:.3f} (limit {limit}){verdict}",
            flush=True,
        )
        results[name] = {"ours": n / ours, "theirs": n / theirs, "ratio": ratio, "limit": limit}
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    # bf16 rounds to 1 in 256 at each of 32 sublayers; float32 to rounding
    return 0 if error < (0.05 if dtype == torch.bfloat16 else 1e-5) else 1


if __name__ == "__main__":
    raise SystemExit(main())
