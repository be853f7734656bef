"""The explorer: one page in which an instance is turned by hand, as files that need no network.

`files` gives everything by name: the page with its data inside, and what it refers to. `tg explore`
serves exactly these, `write` puts them into a folder, and the documentation has them too. What the
page computes while it is used is in the JavaScript beside this file; tests compare it with torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from threshold_gating import taxonomy
from threshold_gating._version import __version__
from threshold_gating.conversion.text import jsonable
from threshold_gating.hardware import devices
from threshold_gating.hardware.drawn import normal
from threshold_gating.taxonomy import ROWS, TAXONOMY

PAGE = "index.html"
# In the order in which the page loads them: each uses those before it.
PARTS = (
    *("explorer.css", "gates.js", "theory.js", "pairs.js", "state.js"),
    *("plot.js", "draw.js", "controls.js", "tell.js", "explorer.js"),
)
BRANCHES = 8  # the most that the page shows, as in gates.js
CHIPS = 32
# Chips of the page are those of `simulate` with seed 0 at a site of this name.
CHIP_SITE = "explorer"
_MARK = '<meta name="generator" content="threshold-gating explorer">'  # as in index.html
_DATA = '<script type="application/json" id="data">{}</script>'

# Where activations are compared: wide enough for the ceiling of ReLU6, and powers of two.
_NEAR, _COUNT = 8.0, 129
_PAIR = ("tau", "supply", "swing", "shape", "temperature", "sigma_theta", "sigma_tau", "noise")


def files(
    start: str = "silu", *, preset: str = "", network: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Every file of the explorer by name.

    Args:
        start: the row of the taxonomy that the page begins with.
        preset: the differential pair of its hardware view, "" for none.
        network: a network whose sites are walked, as `sites` gives it.
    """
    known = data(taxonomy.key_of(start), devices.preset(preset).name if preset else "", network)
    # "<" as an escape: no name of a network ends the element that the data stand in
    inside = json.dumps(known, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    here = resources.files(__name__)
    page = here.joinpath(PAGE).read_text("utf-8").replace(_DATA.format("{}"), _DATA.format(inside))
    return {
        PAGE: page.encode(),
        **{name: here.joinpath(name).read_bytes() for name in PARTS},
    }


def data(start: str, preset: str, network: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the page knows, as JSON values."""
    rows = [
        {
            "key": key,
            **{name: getattr(row, name) for name in ("exact", "sup", "note")},
            "instance": TAXONOMY[key].to_dict(),
        }
        for key, row in ROWS.items()
    ]
    known = {
        "version": __version__,
        "start": start,
        "preset": preset,
        "rows": rows,
        "named": named(),
        "presets": presets(),
        "chips": chips(),
        "network": network,
    }
    return dict(jsonable(known))


def named() -> dict[str, Any]:
    """The functions themselves (not their instances) at the inputs where nearness is measured.

    Rows of one function, and functions that are the same there, are one: the first.
    """
    x = torch.linspace(-_NEAR, _NEAR, _COUNT, dtype=torch.float64)
    found: dict[str, list[float]] = {}
    for key, row in ROWS.items():
        y = row.f(x)
        same = ((torch.tensor(other, dtype=x.dtype) - y).abs().max() for other in found.values())
        if not any(apart <= 1e-12 for apart in same):
            found[key] = y.tolist()
    return {"x": x.tolist(), "values": found}


def presets() -> dict[str, Any]:
    """The differential pairs, with the figures that a curve needs."""
    return {
        name: {"device": pair.device, **{key: getattr(pair, key) for key in _PAIR}}
        for name, pair in devices.presets().items()
    }


def chips() -> dict[str, list[list[float]]]:
    """Standard normal numbers of the thresholds and of the sharpness of each chip.

    A gate with fewer thresholds has the first of them, as `simulate` draws them.
    """
    shape = (BRANCHES - 1, 1)
    return {
        what: normal(0, f"{CHIP_SITE}/{what}", CHIPS, shape)[..., 0].tolist()
        for what in ("theta", "tau")
    }


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Put the files into a folder, which is made where it does not exist; returns the page.

    A page of the same name that is not the explorer's is left alone, with a ValueError.
    """
    page = folder / PAGE
    if page.exists() and _MARK not in page.read_text("utf-8", errors="replace"):
        raise ValueError(f"{page} is another page and stays as it is; give another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return page
