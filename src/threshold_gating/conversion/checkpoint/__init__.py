"""Converted networks on disk: the files, and the record of their gates."""
