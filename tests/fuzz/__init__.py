"""Random gates and random networks against what they must equal; `make fuzz` runs many."""
