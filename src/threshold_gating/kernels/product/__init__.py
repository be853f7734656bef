"""Tier W (Eq. 4): `formula` in plain torch, `two_soft` gates and `one_vector` under hard ones."""
