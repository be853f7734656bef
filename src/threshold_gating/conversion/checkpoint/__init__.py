"""Converted networks on disk: the files, and what they say of the gates."""
