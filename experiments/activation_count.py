"""Which activations K = 2 represents: over libraries' names and the networks of the zoo.

The part of `experiments.error_against_k` that counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

import threshold_gating as tg
from threshold_gating import taxonomy
from threshold_gating.fitted import BY_RELATIVE, FITTED

EXACT, THREE, SQUARE, NEAR, NEVER = (
    "exact at K = 1 or 2",
    "exact at K = 3",
    "exact at K = 2 or 3 with a quadratic branch",
    "approximate at every K",
    "no instance",
)
# Of transformers' names without a row, as `taxonomy.NO_ROWS` says; the shape of xIELU is learned.
NO_ROW = {"gelu_10": NEAR, "laplace": NEAR, "sqrtsoftplus": NEVER, "xielu": NEVER}
SEVERAL = {"GLU", "MultiheadAttention", "Softmin", "Softmax", "Softmax2d", "LogSoftmax"}  # inputs
FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn")
FIELDS += ("feed_forward_proj",)


def kind_of(name: str) -> str:
    """What the gates do with the activation of this name, read off its row in the taxonomy."""
    if name in NO_ROW:
        return NO_ROW[name]
    key = taxonomy.key_of(name)
    t = tg.TAXONOMY[key]
    if not taxonomy.ROWS[key].exact:
        return NEAR
    return SQUARE if t.q else EXACT if t.K <= 2 else THREE


def at_two(key: str) -> float | str:
    """The least error found at K = 2 over the line, with the function's own tails."""
    try:
        return tg.fit(taxonomy.ROWS[key].f, zero=False, K=2).sup
    except ValueError as error:
        return str(error)


def names(smoke: bool) -> dict[str, Any]:
    """The activations of each library and network of the zoo, by what the gates do with them."""
    own = {k for k in tg.TAXONOMY if k not in FITTED and k not in BY_RELATIVE}
    own -= {k for k in own if k.endswith(("_clamp", "_k3"))}
    lists = {"the taxonomy": own, "torch.nn": set(torch.nn.modules.activation.__all__) - SEVERAL}
    networks: dict[str, list[str]] = {}
    if smoke:
        lists = {"torch.nn": {"ReLU", "Mish", "GELU"}}
    else:
        from transformers.activations import ACT2FN

        lists["transformers"] = set(ACT2FN)
        networks = {**_of_timm(), **_of_transformers()}
    everything = {n for each in lists.values() for n in each}
    missed = {taxonomy.key_of(n) for n in everything - set(NO_ROW) if kind_of(n) != EXACT}
    kinds = {name: {n: kind_of(n) for n in sorted(each)} for name, each in lists.items()}
    two = {key: at_two(key) for key in sorted(missed)}
    return {"lists": kinds, "at K = 2": two, "networks": networks}


def _of_timm() -> dict[str, list[str]]:
    """Names of the activation modules of the zoo's networks of timm, built without weights."""
    import timm

    from tests.zoo.networks import TIMM

    found = {}
    for name, row in TIMM.items():
        with torch.device("meta"):
            model = timm.create_model(row["model"])
        classes = {type(m).__name__ for m in model.modules() if not any(m.children())}
        found[f"timm:{name}"] = sorted(_keys(classes - {"Identity", "Linear", *SEVERAL}))
    return found


def _of_transformers() -> dict[str, list[str]]:
    """The activations that the configurations of the zoo's architectures name by default."""
    from transformers import AutoConfig

    from tests.zoo.transformer_table import TRANSFORMERS

    found = {}
    for name in TRANSFORMERS:
        if name.endswith("-eager"):  # another way to run one that is counted
            continue
        config = AutoConfig.for_model(name)
        said = {getattr(config, field, None) for field in FIELDS}
        found[f"hf:{name}"] = sorted(_keys(str(s).removeprefix("gated-") for s in said if s))
    return found


def _keys(names: Iterable[str]) -> set[str]:
    """The rows that these names mean; names of anything else are left out."""
    found = set()
    for name in names:
        with suppress(ValueError):
            found.add(taxonomy.key_of(name))
    return found


def missed(figures: dict[str, Any]) -> tuple[int, int]:
    """Networks with an activation that K = 2 does not represent, of those whose are known."""
    networks = [set(n) for n in figures["networks"].values() if n]
    return sum(any(kind_of(a) != EXACT for a in n) for n in networks), len(networks)


def section(figures: dict[str, Any]) -> str:
    if not figures:
        return ""
    kinds = (EXACT, THREE, SQUARE, NEAR, NEVER)
    table = [f"| names of | all | {' | '.join(kinds)} |", "|" + " --- |" * (len(kinds) + 2)]
    for name, each in figures["lists"].items():
        counts = (str(sum(k == kind for k in each.values())) for kind in kinds)
        table.append(f"| {name} | {len(each)} | {' | '.join(counts)} |")
    two = figures["at K = 2"].items()
    near = ", ".join(f"{n} {e:.2g}" for n, e in two if not isinstance(e, str))
    far = ", ".join(n for n, e in two if isinstance(e, str))
    said = [f"What K = 2 misses, with its least error found over the line: {near}."]
    said += [f"No asymptote, so no bound: {far}."] if far else []
    if figures["networks"]:
        off, known = missed(figures)
        uses = Counter(key for n in figures["networks"].values() for key in n)
        most = ", ".join(f"{key} {count}" for key, count in uses.most_common())
        said.append(
            f"In the zoo {off} of {known} networks have an activation that K = 2 misses "
            f"({len(figures['networks']) - known} name none in modules or configuration; calls in "
            f"a forward are not counted). Networks by activation: {most}."
        )
    return "\n".join(["Is what K = 2 misses uninteresting?", "", *table, "", " ".join(said)])
