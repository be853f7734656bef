"""Convert a network to gates and prove that nothing was lost."""

from threshold_gating.conversion.plan import ConversionError, Site
from threshold_gating.conversion.rewrite import convert, convert_, revert

__all__ = ["ConversionError", "Site", "convert", "convert_", "revert"]
