"""What acts.py imports from the folder that it stands in."""

DOUBLE = 2
