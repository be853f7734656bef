"""Analog hardware: measured transistors, cells of them, and what they do to a network."""
