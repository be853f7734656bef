"""A Llama-style language model before and after conversion: prefill and decoding.

Random weights: speed does not depend on them. The logits of both are compared first, by gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import threshold_gating as tg
from benchmarks.timing import Contenders, Place, Work

SECTION, PAIRS = "llm", ("frozen module", "frozen times", "attention", "compiled")
# max|d| / max|y| by dtype: bf16 rounds to 1 in 256 at each of 32 sublayers.
ERRORS = {torch.bfloat16: 0.05, torch.float32: 1e-5}
CONFIG = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip


class Sizes(NamedTuple):
    """The network, tokens of a prompt, tokens to decode after a sixteenth of it."""

    config: tuple[tuple[str, int], ...]
    dtype: torch.dtype
    length: int
    steps: int


LARGE = Sizes(tuple(CONFIG.items()), torch.bfloat16, 2048, 64)  # 1.1 G parameters


def llm(sizes: Sizes, place: Place) -> Iterator[Work]:
    """The limits are 1 / 0.98 and, eager, 1 / 0.95: tokens a second over the original's."""
    error = {"": ERRORS[sizes.dtype]}
    build = partial(_errors, sizes, place.device)
    yield Work(SECTION, "logits: error", build, error, PAIRS, unit="error")
    for name, limit, decoded in (
        ("prefill of 4 prompts", 1.02, _prefill),
        ("decode, eager", 1.05, _eager),
        ("decode, compiled", 1.02, _compiled),
    ):
        if decoded is not _compiled or place.compile is not None:
            build = partial(_times, sizes, place, decoded)
            limits = {"original": limit}
            yield Work(SECTION, name, build, limits, PAIRS, replay=False, slow=True)


@lru_cache(1)
def _models(sizes: Sizes, device: str) -> tuple[Any, Any, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        options: dict[str, Any] = dict(sizes.config)
        config = LlamaConfig(**options, max_position_embeddings=4096)
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        model = model.to(sizes.dtype).eval()
        ids = torch.randint(0, config.vocab_size, (1, sizes.length))
    return model, tg.convert(model, inputs={"input_ids": ids[:, :32]}), ids


def _errors(sizes: Sizes, device: str) -> Contenders:
    def error() -> float:
        model, gated, ids = _models(sizes, device)
        with tg.kernels.use("reference"):
            y, z = (m(ids[:, :64]).logits.float() for m in (model, gated))
        return float((y - z).abs().max() / y.abs().max())

    return {"ours": error}


def _times(sizes: Sizes, place: Place, made: Callable[..., Callable[[], Any]]) -> Contenders:
    model, gated, ids = _models(sizes, place.device)
    return {
        name: made(m, ids, sizes.steps, place) for name, m in (("original", model), ("ours", gated))
    }


def _prefill(model: Any, ids: Tensor, steps: int, place: Place) -> Callable[[], Any]:
    return partial(model, ids.repeat(4, 1))  # so that the GPU and not Python sets the time


def _eager(model: Any, ids: Tensor, steps: int, place: Place) -> Callable[[], Any]:
    """Greedy decoding after a sixteenth of the prompt."""

    def decode() -> None:
        cache, token = None, ids[:, : ids.shape[1] // 16]
        for _ in range(steps):
            out = model(token, past_key_values=cache, use_cache=True)
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

    return decode


def _compiled(model: Any, ids: Tensor, steps: int, place: Place) -> Callable[[], Any]:
    """The same with a static cache, compiled without what Python costs."""
    from transformers import StaticCache

    assert place.compile is not None
    options = {"mode": "reduce-overhead"} if place.device == "cuda" else {}
    run, short = place.compile(model.forward, fullgraph=True, **options), ids.shape[1] // 16

    def decode() -> None:
        cache = StaticCache(config=model.config, max_cache_len=short + steps + 1)
        out = model(ids[:, :short], past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        for k in range(steps):
            position = torch.full((1, 1), short + k, device=ids.device)
            out = run(token, past_key_values=cache, position_ids=position, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)

    return decode
