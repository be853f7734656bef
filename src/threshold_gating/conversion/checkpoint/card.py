"""Model card of a converted network: what was converted, its errors, and what was trained since.

It is a section of README.md between two marks. What a user wrote around it stays.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating._version import __version__
from threshold_gating.conversion.certificate import Certificate, Row
from threshold_gating.conversion.checkpoint.files import mark
from threshold_gating.conversion.hub import REPORT
from threshold_gating.conversion.learn import moved
from threshold_gating.conversion.text import jsonable

NAME = "README.md"
_BEGIN = "<!-- threshold-gating: this part is written anew at every save -->"
_END = "<!-- /threshold-gating -->"
_SECTION = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)
_FRONT = "---\nlibrary_name: {library}\ntags:\n- threshold-gating\n---\n\n# {title}\n\n"


# What was measured


def measured(certificate: Certificate, args: Any, kwargs: Any) -> dict[str, Any]:
    """What a card says of a certificate and of the inputs it was made with, as JSON values."""
    worst, metric = certificate.output, certificate.metric
    told = ("name", "baseline", "converted", "delta", "interval", "agreement", "n")
    data = {
        "ok": certificate.ok,
        "sites": len(certificate.rows),
        "compared": sum(row.ok is not None for row in certificate.rows),
        "every_input": sum(row.scope == "every input" for row in certificate.rows),
        "inputs": list(shapes("", (args, kwargs))),
        "kinds": [_worst(rows) for rows in _alike(certificate.rows)],
        "output": worst and {k: getattr(worst, k) for k in ("name", "max", "relative", "rel_rms")},
        "tol": certificate.tol,
        "metric": metric and {k: getattr(metric, k) for k in told},
        "failed": list(certificate.failed),
        "trained": certificate.trained,
        "torch": str(torch.__version__),
        "threshold_gating": __version__,
    }
    return dict(jsonable(data))


def shapes(name: str, tree: Any) -> Iterator[str]:
    """Every tensor of the inputs in words: "input_ids: int64 2 x 16"."""
    if isinstance(tree, Tensor):
        dtype = str(tree.dtype).removeprefix("torch.")
        size = " x ".join(map(str, tree.shape)) or "one number"
        yield f"{name}: {dtype} {size}" if name else f"{dtype} {size}"
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from shapes(str(key), value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from shapes(name, value)


def _alike(rows: tuple[Row, ...]) -> list[list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind, row.K, row.exact), []).append(row)
    return list(groups.values())


def _worst(rows: list[Row]) -> dict[str, Any]:
    """The largest errors of sites that are of one kind."""
    seen = [row for row in rows if row.ok is not None]
    ulp = [row.ulp for row in seen if row.ulp is not None]
    return {
        "kind": rows[0].kind,
        "K": rows[0].K,
        "exact": rows[0].exact,
        "compared": len(seen),
        "max": max((row.max for row in seen), default=None),
        "rel_rms": max((row.rel_rms for row in seen), default=None),
        "ulp": max(ulp, default=None),
    }


def keep(model: nn.Module, report: Mapping[str, Any] | None) -> None:
    """Let a network remember what was measured of it last, for its card."""
    model.__dict__[REPORT] = report


def kept(model: nn.Module) -> Mapping[str, Any] | None:
    """What was measured of a network last, if anything was."""
    return model.__dict__.get(REPORT)


# The card


def card(
    model: nn.Module,
    certificate: Certificate | None = None,
    *,
    where: str = "FOLDER_OR_HUB_NAME",
    command: str | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The card of a converted network, as Markdown.

    Args:
        model: the network.
        certificate: of `tg.verify`; by default what was measured last, when the network was
            converted or verified. Give `metric=` to `tg.verify` for a metric before and after.
        where: what `tg.load` is to be given.
        command: the command that made it; by default the lines of Python that do.
        notes: what a reader of the errors has to know beside them.
    """
    report = kept(model) if certificate is None else measured(certificate, (), {})
    far = moved(model, own=True)
    parts = [
        "## Threshold gating",
        _use(model, where, far),
        "### What was converted\n\n" + _converted(model),
        "### Errors of the conversion\n\n" + "\n\n".join([_errors(report), *notes]),
        *(["### What was trained\n\n" + _trained(far)] if far else []),
        "### How to make it again\n\n" + _reproduce(model, command),
        _versions(),
    ]
    return "\n\n".join(parts)


def _use(model: nn.Module, where: str, far: Mapping[str, Mapping[str, float]]) -> str:
    name = type(model).__name__
    lines = [
        f"The nonlinearities of this {name} are gates, y = sum_k g_k(x) (s_k x + c_k), "
        "one instance for each site.",
        "",
    ]
    hugging_face = _is_pretrained(model)
    if hugging_face:
        lines += [
            "- `tg.load` gives the converted network: `tg_config.json` and `tg_gates.safetensors` "
            "hold its gates.",
            f"- `{name}.from_pretrained` and `AutoModel` give the original architecture, with its "
            "own nonlinearities and the weights saved here.",
        ]
        if any(any(each.values()) for each in far.values()):
            lines += [
                "",
                "**The gates were trained.** What `AutoModel` gives is therefore another function "
                "than the network that was trained; use `tg.load`.",
            ]
    onto = "" if hugging_face else f", onto={name}(...)"
    lines += ["", "```python", "import threshold_gating as tg", ""]
    lines += [f'model = tg.load("{where}"{onto})', "```"]
    return "\n".join(lines)


def _is_pretrained(model: nn.Module) -> bool:
    return callable(getattr(type(model), "save_pretrained", None))


def _converted(model: nn.Module) -> str:
    from threshold_gating.conversion.checkpoint import schema  # it imports this module's users

    about = schema.structure(model)
    rows: dict[tuple[Any, ...], int] = {}
    found = [site for _, site in schema.sites_in(about) if isinstance(site, dict)]
    for site in (each for each in found if "exact" in each):  # not the gates of recurrent layers
        K = len(site["instance"]["s"]) if site["instance"] else ""
        error = "exact" if site["exact"] else f"approximate, sup {float(site['sup']):.1e}"
        key = (site["kind"], K, error)
        rows[key] = rows.get(key, 0) + 1
    kinds = [(kind, str(n), str(K), error) for (kind, K, error), n in sorted(rows.items(), key=str)]
    kinds += [("recurrent layer", "1", "", "its own gates") for _ in about["recurrent"]]
    if any(owner["calls"] == schema.AS_THEY_COME for owner in about["owners"]):
        kinds.append(("calls of functions", "as they come", "", "not counted"))
    total = f"{sum(rows.values())} sites."
    return _table(("kind", "sites", "K", "instance"), kinds) + f"\n\n{total}"


def _errors(report: Mapping[str, Any] | None) -> str:
    if report is None:
        return (
            "Nothing was measured: the network was converted without inputs, and `tg.verify` was "
            "not called."
        )
    inputs = "; ".join(report["inputs"]) or "not on record"
    when = (
        f"after training: {report['trained']}" if report.get("trained") else "before any training"
    )
    said = (
        "Measured by `tg.verify` with the gates evaluated (native off), against the original "
        f"network, {when}. Inputs: {inputs}. `max` is max|d| and `rel` is "
        "rms(d)/rms(y), at each site, of the original's own input to it; the worst site of each "
        "kind is shown. ulp are units in the last place."
    )
    rows = [
        (
            each["kind"],
            "" if each["K"] is None else str(each["K"]),
            str(each["compared"]),
            _number(each["max"]),
            _number(each["rel_rms"]),
            "" if each["ulp"] is None else f"{float(each['ulp']):.3g}",
        )
        for each in report["kinds"]
    ]
    lines = [said, "", _table(("kind", "K", "compared", "max", "rel", "ulp"), rows), ""]
    if (worst := report["output"]) is not None:
        lines.append(
            f"Output {worst['name'] or '(the tensor itself)'}: max|d| {_number(worst['max'])}, "
            f"max|d|/max|y| {_number(worst['relative'])}, rms(d)/rms(y) "
            f"{_number(worst['rel_rms'])}."
        )
    lines.append(
        f"{report['compared']} of {report['sites']} sites were compared, "
        f"{report['every_input']} hold for every input; "
        + ("the certificate is ok." if report["ok"] else f"failed: {', '.join(report['failed'])}.")
    )
    if (m := report["metric"]) is not None:
        low, high = (float(v) for v in m["interval"])
        lines += [
            "",
            f"{m['name']}: {float(m['baseline']):.6g} before, {float(m['converted']):.6g} after; "
            f"difference {float(m['delta']):+.4g} [{low:+.4g}, {high:+.4g}] (95 %), equal on "
            f"{float(m['agreement']):.2%} of {m['n']} samples.",
        ]
    return "\n".join(lines)


def _number(value: Any) -> str:
    return "" if value is None else f"{float(value):.1e}" if float(value) else "0"


def _trained(far: Mapping[str, Mapping[str, float]]) -> str:
    if not any(any(each.values()) for each in far.values()):
        return f"{len(far)} gates can learn and are where they started."
    names = ("log tau", "theta", "s", "c")
    header = ("gate", "max|d log tau|", "max|d theta|", "max|d s|", "max|d c|")
    most = sorted(far, key=lambda gate: -max(far[gate].values(), default=0.0))[:20]
    rows = [(g, *(_number(far[g].get(n)) for n in names)) for g in most]
    more = f"\n\nThe {len(most)} of {len(far)} gates that moved most." if len(far) > 20 else ""
    return _table(header, rows) + more


def _reproduce(model: nn.Module, command: str | None) -> str:
    if command is not None:
        return f"```sh\n{command}\n```"
    name = type(model).__name__
    source = getattr(getattr(model, "config", None), "_name_or_path", "") or "ORIGINAL"
    # a folder of the machine where it was made says nothing to anybody else
    source = source if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) else "ORIGINAL"
    make = f'{name}.from_pretrained("{source}")' if _is_pretrained(model) else f"{name}(...)"
    lines = [
        "```python",
        "import threshold_gating as tg",
        'config = tg.conversion.load("FOLDER").config  # sites as they started, and what learns',
        f"converted = tg.convert({make}, config=config, inputs=...)",
        "```",
    ]
    return "\n".join(lines)


def _versions() -> str:
    names = {"threshold-gating": __version__, "torch": str(torch.__version__)}
    try:
        import transformers

        names["transformers"] = transformers.__version__
    except ImportError:
        pass
    names["Python"] = platform.python_version()
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in names.items()) + "."


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(("---",) * len(header)), *map(line, rows)])


def put(model: nn.Module, folder: Path, text: str | None = None) -> None:
    """Write the card into README.md of `folder`: as its marked section, or at its end."""
    path = folder / NAME
    section = f"{_BEGIN}\n{text or card(model)}\n{_END}"
    name = type(model).__name__
    library = "transformers" if _is_pretrained(model) else "threshold-gating"
    try:
        before = path.read_text("utf-8")
    except FileNotFoundError:
        before = _FRONT.format(library=library, title=f"{name}, converted to gates")
    if _SECTION.search(before):
        after = _SECTION.sub(lambda _: section, before, count=1)
    else:
        after = f"{before.rstrip()}\n\n{section}\n"
    if after != before:
        new = folder / f".tg{mark()}"
        new.write_text(after, "utf-8")
        os.replace(new, path)
