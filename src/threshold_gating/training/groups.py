"""Parameter groups for an optimiser: weights, biases and gates.

Weight decay pulls a gate to where it started (rho, dtheta) or to a branch that is gone (s, c),
which regularises nothing, so gates are never decayed; they also have a rate of their own. Every
optimiser of torch takes the groups, and so does whatever takes such an optimiser:

    torch.optim.AdamW(param_groups(model, 1e-3, gate_lr_scale=0.25, weight_decay=0.05))

    def configure_optimizers(self):  # Lightning
        return torch.optim.AdamW(param_groups(self, 1e-3, weight_decay=0.05))

    Trainer(model, args, optimizers=(optimizer, None), ...)  # Hugging Face; its own decays gates

Under FSDP2 the groups are made after `fully_shard`, as the optimiser is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from threshold_gating.conversion import learn
from threshold_gating.nn.dense import TIERED
from threshold_gating.nn.rnn import GRU, LSTM


def gate_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of gates and of the branches they choose from, by name; frozen ones too.

    All of an `Activation` (also the child `gate` of tiers W, S and general) and of the gates that a
    converted module holds for its calls (`tg_relu_0_rho`), the constants `c` that
    tier S shares in a whole layer, and `gate_..` of LSTM and GRU. Not `const` of the general tier:
    it has one entry for each weight of a branch, starts as a multiple of it and is trained like it.

    >>> from threshold_gating import Linear
    >>> list(gate_parameters(nn.Sequential(nn.Linear(2, 3), Linear(3, 2))))
    ['1.gate.rho', '1.gate.dtheta']
    """
    more = (p for module in model.modules() for p in _more_gates(module))
    gates = {id(p) for p in (*learn.gate_parameters(model).values(), *more)}
    return {name: p for name, p in model.named_parameters() if id(p) in gates}


def param_groups(
    model: nn.Module, lr: float, gate_lr_scale: float = 1.0, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for an optimiser of torch: "weights", "biases", "gates", without empty ones.

    Weights alone are decayed. As in timm, biases are all that is called so or has one axis (norms,
    scales), and what the model itself lists in `no_weight_decay()`. Each parameter that is trained
    is in one group, once if it is shared; `param_names` are their names in the model, in order.

    Args:
        lr: the rate of weights and biases.
        gate_lr_scale: the rate of the gates over `lr`; the paper has 0.25 to 4.
        weight_decay: of the weights.
    """
    if not (lr >= 0 and gate_lr_scale >= 0 and weight_decay >= 0):
        raise ValueError(
            "param_groups: lr, gate_lr_scale and weight_decay must not be negative; "
            f"got {lr}, {gate_lr_scale}, {weight_decay}."
        )
    gates = {id(p) for p in gate_parameters(model).values()}
    asked: Callable[[], Iterable[str]] = getattr(model, "no_weight_decay", tuple)
    kept = set(asked())
    groups = [
        {"name": "weights", "lr": lr, "weight_decay": weight_decay},
        {"name": "biases", "lr": lr, "weight_decay": 0.0},
        {"name": "gates", "lr": lr * gate_lr_scale, "weight_decay": 0.0},
    ]
    members: dict[str, dict[str, nn.Parameter]] = {str(g["name"]): {} for g in groups}
    for name, p in model.named_parameters():
        if p.requires_grad:
            plain = p.dim() <= 1 or name.rpartition(".")[2] == "bias" or name in kept
            which = "gates" if id(p) in gates else "biases" if plain else "weights"
            members[which][name] = p
    return [
        {"params": list(own.values()), "param_names": list(own), **group}
        for group, own in zip(groups, members.values(), strict=True)
        if own
    ]


def check_decay(
    optimizer: torch.optim.Optimizer | Iterable[dict[str, Any]], model: nn.Module
) -> list[str]:
    """Warn of trained gates of `model` that `optimizer` decays or does not have; return them.

    Groups may be given instead. One that says nothing of its decay counts as decayed: AdamW's
    default is not 0. In an optimiser it does not: one without the option (LBFGS, Rprop) has none.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        decay = dict(_decays(optimizer.param_groups, 0.0))
    else:
        decay = dict(_decays(optimizer, float("inf")))
    trained = {n: p for n, p in gate_parameters(model).items() if p.requires_grad}
    decayed = [n for n, p in trained.items() if decay.get(id(p))]
    missing = [n for n, p in trained.items() if id(p) not in decay]
    for names, what in ((decayed, "are decayed"), (missing, "are in no group")):
        if names:
            warnings.warn(
                f"gate parameters {what}: {', '.join(names)}; param_groups(model, lr, "
                "weight_decay=...) has every gate in a group without decay.",
                UserWarning,
                stacklevel=2,
            )
    return decayed + missing


def _more_gates(module: nn.Module) -> Iterator[nn.Parameter]:
    """The gates of the tiers below A and of recurrent layers, which are no gates of a site."""
    for name, p in module.named_parameters(recurse=False):
        constants = name == "c" and isinstance(module, tuple(TIERED.values()))
        if constants or (name.startswith("gate_") and isinstance(module, LSTM | GRU)):
            yield p


def _decays(groups: Iterable[dict[str, Any]], unsaid: float) -> Iterator[tuple[int, float]]:
    """The decay of each parameter, by its id; `unsaid` where a group does not say."""
    for group in groups:
        params = group["params"]
        for p in [params] if isinstance(params, torch.Tensor) else params:
            yield id(p), group.get("weight_decay", unsaid)
