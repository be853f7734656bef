"""Attention by gates as an attention implementation that Hugging Face models can select.

    hugging_face.register()
    model.set_attn_implementation("tg")  # or from_pretrained(..., attn_implementation="tg")

`tg.convert` does not need it: it finds attention wherever it is called. This is for a model whose
attention alone is to be gates, and the way out of kernels that no call of torch is in (flash and
flex attention). Whoever is set to "tg" is concerned, no other model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating import logits
from threshold_gating.conversion.answering import Answering
from threshold_gating.taxonomy import TAXONOMY

AUDITED_AS = "native"  # see conversion.audit


def register() -> None:
    """Make attention by gates known to transformers as "tg", with the masks that it needs.

    The two belong together: a function without its mask would be given none, and see the future.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("tg", attention)
    AttentionMaskInterface.register("tg", sdpa_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls; the output (B, L, H, E) and no weights.

    It is transformers' own function around `F.scaled_dot_product_attention`, with that call
    answered by gates, so that caches, grouped heads, position biases and causality are as it has
    them. That function has no soft-capping; with it the logits are formed here.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("softcap") is not None:
        return _capped(module, query, key, value, attention_mask, **options), None
    with Answering(None):
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
    return out


def _capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    softcap: float,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **unused: Any,
) -> Tensor:
    """Attention with the logits cap tanh(z / cap), then masked; tanh is a gate too."""
    z = logits.attention_logits(query, key, scale=scaling, enable_gqa=True)
    z = TAXONOMY["tanh"](z / softcap) * softcap
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[-2] > 1:
        attention_mask = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
    if attention_mask is not None:
        keep = attention_mask
        z = z.masked_fill(~keep, -math.inf) if keep.dtype == torch.bool else z + keep
    p = torch.dropout(logits.softmax(z, masked=0.0), dropout, bool(dropout))
    v = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return (p.to(v.dtype) @ v).transpose(1, 2).contiguous()
