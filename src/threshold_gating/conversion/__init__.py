"""Convert a network to gates, prove that nothing was lost, keep and reload the result."""

from threshold_gating.conversion.audit import Audit, audit
from threshold_gating.conversion.calibration import Calibration, SiteFit, calibrate
from threshold_gating.conversion.certificate import Certificate, verify
from threshold_gating.conversion.checkpoint import load, save
from threshold_gating.conversion.config import Checkpoint
from threshold_gating.conversion.files import CheckpointError, load_weights
from threshold_gating.conversion.plan import ConversionError, Site
from threshold_gating.conversion.rewrite import convert, convert_, revert
from threshold_gating.conversion.thresholds import fixed_thresholds

__all__ = [
    "Audit",
    "Calibration",
    "Certificate",
    "Checkpoint",
    "CheckpointError",
    "ConversionError",
    "Site",
    "SiteFit",
    "audit",
    "calibrate",
    "convert",
    "convert_",
    "fixed_thresholds",
    "load",
    "load_weights",
    "revert",
    "save",
    "verify",
]
