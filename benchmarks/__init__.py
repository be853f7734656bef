"""Check every kernel against float64, time every contender in one process, compare with limits.

PYTHONPATH=src python -m benchmarks [--smoke] [--only SECTION ...] [--match TEXT] [--json FILE]
PYTHONPATH=src python -m benchmarks --warm --only SECTION --checked FILE  # side by side, before
PYTHONPATH=src python -m benchmarks.pages      # RESULTS.md from h200/*.json and cpu/*.json
"""
