"""The zoo: networks of timm and transformers, re-drawn so that every site matters, and converted.

`python -m tests.zoo` runs all of it; `networks` builds, `check` converts and judges.
"""
