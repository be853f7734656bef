"""`save_pretrained` of a converted network: it writes the weights alone, and warns.

What stands at the sites is not in its files, so `from_pretrained` makes the network without gates:
choices that were frozen are gone, and tensors of learned gates are "unexpected" there.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from threshold_gating.nn.activation import Activation

_SAVE = "save_pretrained"


def guard(model: nn.Module) -> None:
    """Have every part of a converted network that can `save_pretrained` say what that leaves out.

    Per object: neither a class nor transformers itself is changed. Copies and pickles keep it.
    """
    for module in model.modules():
        if callable(getattr(type(module), _SAVE, None)) and _SAVE not in vars(module):
            module.__dict__[_SAVE] = _Telling(module)


def unguard(model: nn.Module) -> None:
    """Undo `guard`."""
    for module in model.modules():
        if isinstance(vars(module).get(_SAVE), _Telling):
            del module.__dict__[_SAVE]


class _Telling:
    """The `save_pretrained` of a module, after a warning."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        acts = [m for m in self.module.modules() if isinstance(m, Activation)]
        learned = sum(bool(act.learned) for act in acts)
        lost = f", the {learned} learned ones are dropped as unexpected keys" if learned else ""
        warnings.warn(
            f"save_pretrained: {save_directory} gets the weights without the gates. "
            f"from_pretrained makes the network with its own nonlinearities{lost}. Save the gates "
            "with tg.conversion.save(model, DIR, gates_only=True), and restore them with "
            "tg.conversion.load(DIR, from_pretrained(...)).",
            stacklevel=2,
        )
        return getattr(type(self.module), _SAVE)(self.module, save_directory, *args, **kwargs)
