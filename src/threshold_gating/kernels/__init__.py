"""The functions of `primitive` as fast as this machine runs them; `backend` chooses how."""

from __future__ import annotations

from threshold_gating.kernels.attention.function import attention
from threshold_gating.kernels.backend import (
    BACKENDS,
    Backend,
    BackendError,
    backend,
    either,
    takes_native,
    use,
)
from threshold_gating.kernels.blend.function import blend, evaluate
from threshold_gating.kernels.host import build
from threshold_gating.kernels.lowering import native, opened, overwritten
from threshold_gating.kernels.product.formula import Conv
from threshold_gating.kernels.product.function import gated_product
from threshold_gating.kernels.recurrent.lstm import lstm
from threshold_gating.kernels.structure import Structure
from threshold_gating.kernels.synapse.function import synaptic

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendError",
    "Conv",
    "Structure",
    "attention",
    "backend",
    "blend",
    "build",
    "either",
    "evaluate",
    "gated_product",
    "lstm",
    "native",
    "opened",
    "overwritten",
    "synaptic",
    "takes_native",
    "use",
]
