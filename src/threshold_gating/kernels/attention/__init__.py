"""Attention by gates (Eq. 11): the way a call takes (`function`) and the kernels of Triton."""
