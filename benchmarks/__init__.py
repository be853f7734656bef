"""Check every kernel against float64, time every contender in one process, compare with limits.

PYTHONPATH=src python -m benchmarks [--smoke] [--only SECTION ...] [--match TEXT] [--json FILE]
PYTHONPATH=src python -m benchmarks --jobs N --go-on --json FILE  # checked side by side
PYTHONPATH=src python -m benchmarks.pages      # RESULTS.md from h200/*.json and cpu/*.json
"""
