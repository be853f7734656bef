"""Tables of `tg spice` about several circuits: Table 3, log sum exp, the trade-off, presets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from threshold_gating.cli.printing import say
from threshold_gating.hardware import cell_error, characterise, devices, lse, measure, steering
from threshold_gating.hardware.cells import Pair
from threshold_gating.hardware.spice import Netlist, number
from threshold_gating.instance import TG
from threshold_gating.taxonomy import TAXONOMY

DRAWS = 100
CELSIUS = (-40.0, 27.0, 125.0)
TAILS = (1e-9, 3e-9, 1e-8, 3e-8, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
# Table 3 of the paper. A slope of 0.01 is below the mismatch of a mirror; elu needs c = 4e5.
FAMILIES: dict[str, dict[str, TG]] = {
    "multiplicative, exact": {
        "relu": TAXONOMY["relu"],
        "leaky_relu 0.1": TG(tau=float("inf"), theta=(0.0,), s=(0.1, 1.0), c=(0.0, 0.0)),
        "silu": TAXONOMY["silu"],
    },
    "multiplicative, approx.": {
        "gelu_k2": TAXONOMY["gelu_k2"],
        "elu_k3_one_tau": TAXONOMY["elu_k3_one_tau"],
        "mish": TAXONOMY["mish"],
    },
    "saturating": {"hardtanh": TAXONOMY["hardtanh"], "relu6": TAXONOMY["relu6"]},
    "constant": {"sigmoid": TAXONOMY["sigmoid"], "tanh": TAXONOMY["tanh"]},
}

Row = Sequence[str]


class Answer(NamedTuple):
    """What a command has to say: tables with their titles, and the same as JSON; curves to draw."""

    tables: list[tuple[str, list[Row]]]
    result: dict[str, Any]
    draw: Callable[[Any], None] | None = None


# What was asked for


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    return {"corner": args.corner, "celsius": args.celsius}


def cell_of(args: argparse.Namespace, key: str, instance: TG | None = None) -> steering.Cell:
    if args.models not in (None, "sky130"):
        raise ValueError(f"cells are made of sky130 transistors; got --models {args.models}.")
    return steering.Cell(
        key,
        instance or TAXONOMY[key],
        bias=amperes(args, "bias", 100e-9),
        swing=args.swing or 0.2,
        real=args.tail != "ideal",
        device=args.transistor,
        supply=args.supply or 1.8,
        quiet=amperes(args, "class_ab", 0.0),
    )


def amperes(args: argparse.Namespace, name: str, default: float) -> float:
    """The current that an option gives; zero, a negative one and another unit are refused."""
    text = getattr(args, name)
    if text is None:
        return default
    option = f"--{name.replace('_', '-')}"
    try:
        current = number(text, "A")
    except ValueError:
        current = 0.0
    if not current > 0:
        raise ValueError(f"{option} is a current above 0 in amperes, as 10n or 1e-8; got {text!r}.")
    return current


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def shares(draws: int) -> tuple[tuple[float, str], ...]:
    """The quantiles that are shown; below 20 draws the largest stands for that of 95 %."""
    return (0.5, "median"), ((0.95, "95 %") if draws >= 20 else (1.0, "largest"))


def copies(made: Netlist) -> int:
    """How often the current x, or a half of it, is copied: transistors on its mirrors, less diodes.

    The mirrors of x are mx and px; a class-AB branch has mp and pp for one half, pn and mn for the
    other.
    """
    wires = [line.split()[1:3] for line in made.elements if line[0] == "x"]
    return sum(gate in _MIRRORS_OF_X and drain != gate for drain, gate in wires)


_MIRRORS_OF_X = frozenset(("mx", "px", "mp", "pp", "pn", "mn"))


# The tables


def families(args: argparse.Namespace, tell: Any) -> Answer:
    rows: list[Row] = [
        ("family", "activation", "K", "nfet", "pfet", "R", "x copies", "um^2", "nA", "error")
    ]
    rows[0] = (*rows[0], "trimmed")
    result = []
    every = [(family, name, t) for family, named in FAMILIES.items() for name, t in named.items()]
    for k, (family, name, t) in enumerate(every):
        tell(name, k / len(every))
        cell = cell_of(args, name, t)
        made = steering.netlist(cell)
        answer = cell_error.response(cell)
        m = cell_error.match(cell, answer.x, answer.y[0])
        count = made.count()
        kinds = [str(count.get(kind, 0)) for kind in ("nfet", "pfet", "res")]
        numbers = (f"{steering.area(made):.0f}", f"{answer.current * 1e9:.0f}", f"{m.error:.2%}")
        rows.append(
            (family, name, str(t.K), *kinds, str(copies(made)), *numbers, f"{m.trimmed:.2%}")
        )
        result.append({"family": family, "activation": name, "K": t.K, "devices": count})
        result[-1] |= {"area": steering.area(made), "current": answer.current, **m._asdict()}
    tails = "real" if args.tail != "ideal" else "ideal"
    title = (
        f"Table 3 as circuits, {tails} tails, I_b = {cell.bias * 1e9:g} nA, "
        f"swing {args.swing or 0.2:g} V"
    )
    return Answer([(title, rows)], {"families": result})


def log_sum_exp(args: argparse.Namespace, tree: lse.Tree, tell: Any) -> Answer:
    rows: list[Row] = [
        ("circuit", "inputs", "nfet", "pfet", "tau (1/V)", "gain", "logits", "gates", "settling")
    ]
    one, flat = replace(tree, inputs=2), replace(tree, flat=True)
    named = {"softplus": one, "one stage": flat, "tree of pairs": tree}
    result = []
    for k, (kind, each) in enumerate(named.items()):
        tell(kind, k / 10)
        law, count = lse.measure(each, **conditions(args)), lse.netlist(each).count()
        settled = lse.settling(each, **conditions(args))
        kinds = (str(count["nfet"]), str(count.get("pfet", 0)))
        rows.append((kind, str(each.inputs), *kinds, *_law(law), f"{settled * 1e9:.3g} ns"))
        result.append({"circuit": kind, "inputs": each.inputs, "devices": count, **law._asdict()})
        result[-1] |= {"settling": settled}
    more: list[Row] = [("circuit", "condition", "tau (1/V)", "gain", "logits", "gates")]
    for k, (kind, each) in enumerate(list(named.items())[1:]):
        tell(f"{kind}: temperature", 0.3 + k / 3)
        warm = {t: lse.measure(each, corner=args.corner, celsius=t) for t in (-40.0, 125.0)}
        more += [(kind, f"{t:g} C", *_law(law)) for t, law in warm.items()]
        tell(f"{kind}: mismatch", 0.4 + k / 3)
        spread = lse.mismatch(each, args.draws or DRAWS, args.seed, **conditions(args))
        for word, laws in (("as built", spread.built), ("own tau, gain, shift", spread.trimmed)):
            for share, part in shares(len(laws)):
                logits, gates = (quantile([law[i] for law in laws], share) for i in (3, 4))
                more.append(
                    (
                        kind,
                        f"{part} of {len(laws)}, {word}",
                        "",
                        "",
                        f"{logits:.4f}",
                        f"{gates:.4f}",
                    )
                )
        result[k + 1] |= {
            "temperature": {f"{t:g}": law._asdict() for t, law in warm.items()},
            "mismatch": [law._asdict() for law in spread.built],
            "trimmed": [law._asdict() for law in spread.trimmed],
        }
    title = (
        f"log sum exp, {tree.tail:g} A a tail, {args.celsius:g} C: "
        "v(out) = gain LSE(tau v) / tau + shift"
    )
    tables = [(title, rows), ("Largest errors of log sum exp, and of the softmax gates", more)]
    return Answer(tables, {"lse": result})


def _law(law: lse.Law) -> tuple[str, ...]:
    return (f"{law.tau:.2f}", f"{law.gain:.4f}", f"{law.error:.4f}", f"{law.gates:.4f}")


def tradeoff(args: argparse.Namespace, tell: Any) -> Answer:
    """The nearer the curve to a logistic one, the more a network sees of mismatch."""
    rows: list[Row] = [
        ("tail (A)", "tau (1/V)", "off logistic", "sigma(theta) mV", "tau sigma(theta)")
    ]
    result = []
    for k, tail in enumerate(TAILS):
        tell(f"{tail:g} A", k / len(TAILS))
        spec = Pair(args.models or "sky130-binned", tail=tail)
        fit = measure.fit(*measure.transfer(spec))
        spread = measure.mismatch(spec, args.draws or DRAWS, args.seed)
        seen = fit.tau * spread.sigma_theta
        numbers = (f"{fit.tau:.2f}", f"{fit.deviation:.2%}", f"{spread.sigma_theta * 1e3:.2f}")
        rows.append((f"{tail:g}", *numbers, f"{seen:.4f}"))
        result.append(
            {"tail": tail, **fit._asdict(), "sigma_theta": spread.sigma_theta, "seen": seen}
        )

    def draw(axes: Any) -> None:
        tails = [row["tail"] for row in result]
        axes[0].semilogx(tails, [row["tau"] for row in result], "o-", label="tau (1/V)")
        axes[0].semilogx(
            tails, [1e3 * row["deviation"] for row in result], "s-", label="off logistic (1e-3)"
        )
        axes[0].set(xlabel="tail current (A)")
        axes[1].semilogx(tails, [row["seen"] for row in result], "o-", label="tau sigma(theta)")
        axes[1].set(xlabel="tail current (A)", ylabel="what a network sees", ylim=(0, None))

    title = f"The price of a logistic curve: sky130 pair 5/1 um, {args.draws or DRAWS} pairs a row"
    return Answer([(title, rows)], {"tradeoff": result}, draw)


def presets(args: argparse.Namespace, tell: Any) -> Answer:
    made = characterise.measured(pairs=args.draws or characterise.PAIRS, tell=tell)
    result = {name: devices.to_dict(each) for name, each in made.items()}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        say(f"wrote {args.out}")
    rows: list[Row] = [
        ("preset", "tail", "tau", "sigma(theta)", "sigma(tau)", "noise", "settling", "energy")
    ]
    for p in made.values():
        spread = (f"{p.sigma_theta * 1e3:.2f} mV", f"{p.sigma_tau:.2%}", f"{p.noise * 1e3:.2f} mV")
        times = (f"{p.settling * 1e9:.3g} ns", f"{p.energy * 1e15:.3g} fJ")
        rows.append((p.name, f"{p.tail:g} A", f"{p.tau:.2f} /V", *spread, *times))
    return Answer([("Presets, measured", rows)], result)
