"""Insight into the gates of a network: read them, record them, compare them, draw them."""

from threshold_gating.insight.changes import Change, Changes, compare
from threshold_gating.insight.drawing import film, ridges
from threshold_gating.insight.maps import chaos_map, heads
from threshold_gating.insight.reading import read
from threshold_gating.insight.recording import History, history, record
from threshold_gating.insight.records import Reading, SiteReading

# fmt: off
__all__ = [
    "Change", "Changes", "History", "Reading", "SiteReading", "chaos_map", "compare", "film",
    "heads", "history", "read", "record", "ridges",
]
# fmt: on
