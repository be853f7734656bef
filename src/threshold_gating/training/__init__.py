"""Training with gates: tiers, parameter groups, families, hardening, folding, metrics, logs."""

from threshold_gating.training.callbacks import (
    GateWarning,
    GateWatch,
    WatchConfig,
    lightning_callback,
    trainer_callback,
)
from threshold_gating.training.closeness import LayerError, Promotion, difference
from threshold_gating.training.families import (
    FamilyReport,
    family_penalty,
    family_report,
    left_family,
    project_families_,
)
from threshold_gating.training.folding import fold_batchnorm
from threshold_gating.training.following import PromotionError
from threshold_gating.training.groups import check_decay, gate_parameters, param_groups
from threshold_gating.training.hardening import Hardening, anneal_, harden
from threshold_gating.training.health import Rule, Stuck
from threshold_gating.training.metrics import Reached, steps_to_baseline, steps_to_peak
from threshold_gating.training.promotion import Demotion, demote, half_transfer, promote
from threshold_gating.training.telemetry import JsonLines, gate_histograms, gate_scalars, log_gates

# fmt: off
__all__ = [
    "Demotion", "FamilyReport", "GateWarning", "GateWatch", "Hardening", "JsonLines", "LayerError",
    "Promotion", "PromotionError", "Reached", "Rule", "Stuck", "WatchConfig", "anneal_",
    "check_decay", "demote", "difference", "family_penalty", "family_report", "fold_batchnorm",
    "gate_histograms", "gate_parameters", "gate_scalars", "half_transfer", "harden", "left_family",
    "lightning_callback", "log_gates", "param_groups", "project_families_", "promote",
    "steps_to_baseline", "steps_to_peak", "trainer_callback",
]
# fmt: on
