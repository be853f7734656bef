"""Modules to put into networks: activations, layers of every tier, recurrent layers, attention."""

from threshold_gating.nn.activation import Activation
from threshold_gating.nn.attention import softmax
from threshold_gating.nn.dense import Conv1d, Conv2d, Conv3d, Linear
from threshold_gating.nn.rnn import GRU, LSTM

__all__ = ["GRU", "LSTM", "Activation", "Conv1d", "Conv2d", "Conv3d", "Linear", "softmax"]
