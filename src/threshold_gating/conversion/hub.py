"""`save_pretrained`, `push_to_hub` and the Trainer's checkpoints of a converted network.

Each object gets what it needs: neither a class nor transformers itself is changed. Copies and
pickles keep it.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

_SAVE = "save_pretrained"
UPLOAD = "_upload_modified_files"  # of transformers: all its ways to the hub go through it
REPORT = "tg_report"  # what verify measured, see checkpoint.card


def guard(model: nn.Module) -> None:
    """Let every part of a converted network that can `save_pretrained` keep its gates there."""
    unguard(model)
    for name, module in model.named_modules():
        if callable(getattr(type(module), _SAVE, None)):
            module.__dict__[_SAVE] = _Saving(module, _is_answered_above(model, name))
            if callable(getattr(type(module), UPLOAD, None)):
                module.__dict__[UPLOAD] = _Uploading(module)
            hooks = OrderedDict(module._load_state_dict_pre_hooks)  # its own, if this is undone
            module.__dict__["_load_state_dict_pre_hooks"] = hooks
            module.register_load_state_dict_pre_hook(_resume)


def unguard(model: nn.Module) -> None:
    """Undo `guard`."""
    model.__dict__.pop(REPORT, None)
    for module in model.modules():
        for name, kind in ((_SAVE, _Saving), (UPLOAD, _Uploading)):
            if isinstance(vars(module).get(name), kind):
                del module.__dict__[name]
        before = module._load_state_dict_pre_hooks
        # torch wraps what is registered
        own = [k for k, h in before.items() if getattr(h, "hook", h) is _resume]
        others = OrderedDict((k, h) for k, h in before.items() if k not in own)
        if own:
            module.__dict__["_load_state_dict_pre_hooks"] = others


def _is_answered_above(model: nn.Module, name: str) -> bool:
    """Whether calls of a part are answered, as they come, by what is around it."""
    parts = name.split(".") if name else []
    around = (model.get_submodule(".".join(parts[:k])) for k in range(len(parts)))
    return any("tg_sites" in vars(m) and vars(m)["tg_sites"] is None for m in around)


class _Own:
    """A method of a module's class, and what it is replaced by in the object."""

    name: str

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def own(self) -> Any:
        """The class's method, bound."""
        return getattr(type(self.module), self.name).__get__(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)


class _Saving(_Own):
    """`save_pretrained` with the gates beside what the class writes."""

    name = _SAVE

    def __init__(self, module: nn.Module, above: bool) -> None:
        super().__init__(module)
        self.above = above

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from threshold_gating.conversion.checkpoint import beside  # it imports this module

        return beside.save(self.module, self.own, self.above, *args, **kwargs)


class _Uploading(_Own):
    """What uploads a folder, once gates and card are in it."""

    name = UPLOAD

    def __call__(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        from threshold_gating.conversion.checkpoint import beside  # it imports this module

        beside.before_upload(self.module, working_dir)
        return self.own(working_dir, *args, **kwargs)


_TRAINER = ("transformers.trainer", "transformers.trainer_utils")

# The Trainer reads a checkpoint's weights itself and hands them to `load_state_dict`. Gates are not
# among them, and a state dict does not say where it is from. The Trainer's frame does.


def _resume(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Add the gates to weights that the Trainer loads of one of its checkpoints."""
    from threshold_gating.conversion.checkpoint import pretrained, schema  # they import this one

    missing = [name for name in schema.gate_state(module) if prefix + name not in state]
    if not missing or (frames := list(_trainer())) == []:
        return
    folder = next((path for frame in frames for path in _folders(frame)), None)
    if folder is None:
        warnings.warn(
            f"Trainer: the checkpoint that it loads holds no gates (no tg_config.json), so "
            f"{len(missing)} learned tensors of gates stay as they are, {missing[0]!r} among them; "
            "give a checkpoint that was saved of the converted network, or load the gates with "
            "tg.load(FOLDER, onto=model).",
            stacklevel=2,
        )
        return
    for name, t in pretrained.gates_for(folder, module, state, prefix).items():
        state[prefix + name] = t


def _trainer() -> Iterator[Any]:
    """The frames of Hugging Face's Trainer, the innermost first, while it loads a checkpoint."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in _TRAINER:
            yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _folders(frame: Any) -> Iterator[Path]:
    """Folders with gates that a frame has the name of, or of a file in them."""
    for value in list(frame.f_locals.values()):
        # any text may be there: os.path says no where pathlib has an error (a text of 300 letters)
        if isinstance(value, str | os.PathLike) and os.path.exists(value):
            folder = Path(value) if os.path.isdir(value) else Path(value).parent
            if (folder / "tg_config.json").is_file():
                yield folder
