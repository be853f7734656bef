"""Neural nonlinearity as one tunable gate: y = sum_k g_k(x) (s_k x + c_k)."""

import importlib
from typing import TYPE_CHECKING, Any

from threshold_gating import (
    attention,
    conversion,
    dense,
    fitting,
    kernels,
    layers,
    primitive,
    recurrent,
    sites,
    taxonomy,
)
from threshold_gating._version import __version__ as __version__
from threshold_gating.attention import softmax
from threshold_gating.conversion import audit, calibrate, convert, verify
from threshold_gating.dense import Conv1d, Conv2d, Conv3d, Linear
from threshold_gating.fitting import fit, match
from threshold_gating.instance import TG
from threshold_gating.layers import Activation
from threshold_gating.primitive import blend, gates
from threshold_gating.recurrent import GRU, LSTM
from threshold_gating.taxonomy import TAXONOMY, family

__all__ = [
    "GRU",
    "LSTM",
    "TAXONOMY",
    "TG",
    "Activation",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Linear",
    "attention",
    "audit",
    "blend",
    "calibrate",
    "conversion",
    "convert",
    "dense",
    "family",
    "fit",
    "fitting",
    "gates",
    "kernels",
    "layers",
    "match",
    "primitive",
    "recurrent",
    "sites",
    "softmax",
    "taxonomy",
    "theory",
    "training",
    "verify",
]

if TYPE_CHECKING:
    from threshold_gating import theory, training


def __getattr__(name: str) -> Any:
    """The parts that most programs do without are imported when they are first used."""
    if name in ("theory", "training"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
