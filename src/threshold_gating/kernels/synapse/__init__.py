"""Tiers S and general: gates of each synapse."""
