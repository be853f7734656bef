"""Tiers S and general (Eq. 4), gates of each synapse: `formula` in torch, `kernels` of Triton."""
