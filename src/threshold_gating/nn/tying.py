"""What each tier of Table 1 leaves free: which sharing it has, what it starts from, its size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from threshold_gating import taxonomy
from threshold_gating.instance import TG
from threshold_gating.nn.activation import names_of

# The pairs of Table 1. Gates per neuron are gates per channel unless there are positions.
Tier = Literal["W", "S", "general"]
TierShare = Literal["layer", "channel", "neuron", "synapse", "channel_pair"]
Accuracy = Literal["full", "fast"]
SHARES: dict[str, tuple[TierShare, ...]] = {
    "W": ("layer", "channel", "neuron"),
    "S": ("synapse", "channel_pair", "channel"),
    "general": ("synapse",),
}
_STARTS = {2: "silu", 3: "gelu_k3", 4: "gelu_k4", 5: "gelu_k5"}


def parameter_count(weights: int, K: int, tier: str, gates: int = 0, *, c: bool = False) -> int:
    """Parameters of a layer by Table 1, without its bias.

    Args:
        weights: those of the dense layer.
        K: number of branches, with one tau.
        tier: "W", "S" or "general".
        gates: how many gates there are: 1 for a layer, the channels, or the synapses.
        c: whether the constants are learned: in tier W K for each gate, in S K in all.

    >>> parameter_count(100, 2, "general", gates=100), parameter_count(100, 2, "W", gates=10)
    (600, 220)
    """
    constants = {"W": K * gates * c, "S": K * c, "general": K * weights}[tier]
    return K * weights + K * gates + constants


def share_of(name: str, tier: str, share: str | None) -> TierShare:
    if tier == "A":
        raise ValueError(
            f"{name}: tier A is tg.Activation(...) in front of torch's layer; "
            "a layer of its own has tier 'W', 'S' or 'general'."
        )
    if tier not in SHARES:
        raise ValueError(f"{name}: tier is one of {', '.join(SHARES)}; got {tier!r}.")
    chosen = share or ("channel" if tier == "W" else "synapse")
    if chosen not in SHARES[tier]:
        raise ValueError(
            f"{name}: tier {tier} has share {', '.join(SHARES[tier])} (Table 1); got {share!r}."
        )
    return chosen


def accuracy_of(name: str, accuracy: str, t: TG, share: str) -> Accuracy:
    if accuracy not in ("full", "fast"):
        raise ValueError(f"{name}: accuracy is 'full' or 'fast'; got {accuracy!r}.")
    per_synapse = share in ("synapse", "channel_pair")
    if accuracy == "fast" and not (per_synapse and t.K == 2 and not t.hard):
        asked = f"{t.K} {'hard' if t.hard else 'soft'} branches and share={share!r}"
        raise ValueError(
            f"{name}: accuracy='fast' is for two soft branches with gates of each synapse or pair "
            f"of channels; got {asked}. Leave it out: 'full' has every gate."
        )
    return "fast" if accuracy == "fast" else "full"


def record_of(name: str, K: int | None, init: TG | str | None) -> TG:
    if init is None:
        if K is not None and K not in _STARTS:
            raise ValueError(f"{name}: K = {K} needs init, an instance with {K} branches.")
        init = _STARTS[K or 2]
    t = init if isinstance(init, TG) else taxonomy.TAXONOMY[taxonomy.key_of(init)]
    if K is not None and t.K != K:
        raise ValueError(f"{name}: K = {K} was asked for, but init has {t.K} branches.")
    if t.K < 2 or t.q is not None or t.clamp is not None:
        raise ValueError(
            f"{name}: tiers have two or more affine branches and no clamp; "
            f"got {taxonomy.name_of(t) or t!r} ('hardtanh' and 'hardswish_k3' are such ones)."
        )
    return t


def trained_of(name: str, t: TG, train: Iterable[str] | None) -> tuple[str, ...]:
    """What is learned beside the weights: by default all that gates have."""
    if train is None:
        return ("theta",) if t.hard else ("tau", "theta")
    names = names_of(name, train)
    if "s" in names:
        raise ValueError(
            f"{name}: the slopes are in the weights of the branches; train takes tau, theta, c."
        )
    return names


def branches_of(t: TG, free_constants: bool) -> tuple[TG, tuple[float, ...]]:
    """`t` with slopes 0 or 1 only, and the factors of the weights that make up for it."""
    if free_constants:
        return replace(t, s=(1.0,) * t.K, c=(0.0,) * t.K, anchor=None), t.s
    s, c, factors = [], [], []
    for sk, ck in zip(t.s, t.c, strict=True):
        constant = sk == 0 and ck != 0
        s.append(0.0 if constant else 1.0)
        c.append(ck if constant else 0.0 if sk == 0 else ck / sk)
        factors.append(1.0 if constant else sk)
    return replace(t, s=tuple(s), c=tuple(c), anchor=None), tuple(factors)
