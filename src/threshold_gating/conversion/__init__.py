"""Conversion of networks to gates: converted, checked against the original, saved and loaded."""

from threshold_gating.conversion.apply import convert, convert_, revert
from threshold_gating.conversion.audit import Audit, audit
from threshold_gating.conversion.calibration import Calibration, SiteFit, calibrate
from threshold_gating.conversion.certificate import Certificate
from threshold_gating.conversion.checkpoint.card import card
from threshold_gating.conversion.checkpoint.files import CheckpointError, load_weights
from threshold_gating.conversion.checkpoint.save_load import load, save
from threshold_gating.conversion.checkpoint.schema import Checkpoint
from threshold_gating.conversion.config import GateConfig
from threshold_gating.conversion.learn import gate_parameters, learned_gates
from threshold_gating.conversion.site import ConversionError, Site
from threshold_gating.conversion.thresholds import fixed_thresholds
from threshold_gating.conversion.verification import verify

AUDITED_AS = "machinery"  # see conversion.audit

# fmt: off
__all__ = [
    "Audit", "Calibration", "Certificate", "Checkpoint", "CheckpointError", "ConversionError",
    "GateConfig", "Site", "SiteFit", "audit", "calibrate", "card", "convert", "convert_",
    "fixed_thresholds", "gate_parameters", "learned_gates", "load", "load_weights", "revert",
    "save", "verify",
]
# fmt: on
