"""Eq. 3 by three engines: `cpu` (`tiles`), `gpu` (`kernels`, `formulas`), compiled `graph`s."""
