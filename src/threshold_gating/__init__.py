"""Neural nonlinearity as one tunable gate: y = sum_k g_k(x) (s_k x + c_k)."""

from threshold_gating import kernels, layers, primitive, taxonomy
from threshold_gating.instance import TG
from threshold_gating.layers import Activation
from threshold_gating.primitive import blend, gates
from threshold_gating.taxonomy import TAXONOMY, family

__version__ = "0.1.0"

__all__ = [
    "TAXONOMY",
    "TG",
    "Activation",
    "blend",
    "family",
    "gates",
    "kernels",
    "layers",
    "primitive",
    "taxonomy",
]
