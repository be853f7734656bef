"""Networks that others trained, before and after conversion; `run` has the whole story."""
