"""Random networks, converted and compared: a test that keeps finding. `python -m tests.fuzz`."""
