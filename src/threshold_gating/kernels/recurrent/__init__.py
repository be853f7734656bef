"""Recurrent layers by their gates: `lstm`, a layer in one direction with one launch a step."""
