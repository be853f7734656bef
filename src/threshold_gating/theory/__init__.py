"""The paper's theorem, lemma and remarks, computed for any function.

The claims are in `claims`, random networks (`edge_of_chaos`, `xi`) in `meanfield`, live ones
(`layer_report`) in `network`; `explain` is all in one record, whose text is made in `explanation`.
"""

from threshold_gating.fitting.shape import (
    Asymptote,
    Asymptotes,
    Corner,
    Curve,
    Derivatives,
    asymptotes,
    corners,
    curve,
    derivatives,
    inflections,
    is_monotone,
)
from threshold_gating.theory.claims import (
    GradientPath,
    Hardening,
    Inflected,
    branches_for,
    crossing,
    curvature_ratio,
    explain,
    gradient_path,
    hardening,
    kappa,
    lemma_instance,
    remarks_12_13,
    residual,
    trust_radius,
    well_behaved,
)
from threshold_gating.theory.explanation import Crossing, Explanation, Residual, WellBehaved
from threshold_gating.theory.meanfield import (
    CorrelationMap,
    DepthScale,
    EdgeOfChaos,
    Moments,
    correlation_map,
    edge_of_chaos,
    measured_correlations,
    moments,
    xi,
)
from threshold_gating.theory.network import LayerReport, LayerTheory, layer_report

# fmt: off
__all__ = [
    "Asymptote", "Asymptotes", "Corner", "CorrelationMap", "Crossing", "Curve", "DepthScale",
    "Derivatives", "EdgeOfChaos", "Explanation", "GradientPath", "Hardening", "Inflected",
    "LayerReport", "LayerTheory", "Moments", "Residual", "WellBehaved", "asymptotes",
    "branches_for", "corners",
    "correlation_map", "crossing", "curvature_ratio", "curve", "derivatives", "edge_of_chaos",
    "explain", "gradient_path", "hardening", "inflections", "is_monotone", "kappa",
    "layer_report", "lemma_instance", "measured_correlations", "moments", "remarks_12_13",
    "residual", "trust_radius", "well_behaved", "xi",
]
# fmt: on
