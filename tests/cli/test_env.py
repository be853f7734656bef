"""`tg env`: every backend is really tried, and what is wrong is said."""

import json
import math
import re

import pytest
import torch

import threshold_gating
from threshold_gating import kernels
from threshold_gating.cli import env
from threshold_gating.kernels.blend import function


def test_env_tries_every_backend(tg):
    code, out, _ = tg("env")
    assert code == 0
    for name in ("auto", "native", "reference"):
        assert re.search(rf"^{name}( \(in use\))? +cpu +works \(max error \d", out, re.MULTILINE)
    if not torch.cuda.is_available():
        assert re.search(
            r"^triton +cpu +not available: the backend 'triton' needs", out, re.MULTILINE
        )
    assert re.search(rf"^{kernels.backend()} \(in use\)", out, re.MULTILINE)


def test_env_as_json_has_versions_devices_and_backends(tg, monkeypatch):
    def none_is_installed(name):
        raise env.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(env.metadata, "version", none_is_installed)
    code, out, _ = tg("env", "--json", "-")
    data = json.loads(out)
    assert code == 0
    assert data["versions"]["torch"] == torch.__version__
    assert data["versions"]["threshold_gating"] == threshold_gating.__version__
    assert data["versions"]["timm"] is None
    assert "cpu" in data["devices"]
    assert list(data["backends"]) == list(kernels.BACKENDS)
    works = {name: on["cpu"]["works"] for name, on in data["backends"].items()}
    assert works == {"auto": True, "native": True, "reference": True, "triton": works["triton"]}
    assert works["triton"] is not False


def test_env_reports_a_backend_that_fails(tg, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(function, "_gates", broken)
    before = kernels.backend()
    code, out, _ = tg("env")
    assert code == 1
    assert re.search(r"^reference +cpu +fails: RuntimeError: no such instruction$", out, re.M)
    assert re.search(r"^native +cpu +works", out, re.MULTILINE)
    assert kernels.backend() == before


@pytest.mark.parametrize("off_by", [1e-3, math.nan])
def test_env_reports_a_backend_that_gives_wrong_values(tg, monkeypatch, off_by):
    right = function._gates
    monkeypatch.setattr(function, "_gates", lambda *args: right(*args) + off_by)
    code, out, _ = tg("env")
    assert code == 1
    assert re.search(r"^reference +cpu +gives wrong values \(max error (1.0e-03|nan)", out, re.M)


def test_env_reports_a_wrong_gradient(tg, monkeypatch):
    right = function._gates
    monkeypatch.setattr(function, "_gates", lambda x, *args: right(x, *args) + (x - x.detach()))
    assert "reference         cpu   gives wrong values (max error 1.0e+00)" in tg("env")[1]


def test_env_says_who_calls_gates(tg, monkeypatch):
    monkeypatch.setattr(env, "calls_of_gates", lambda device: (True, f"C++ of {device}"))
    monkeypatch.setattr(env, "cpu_gates", lambda: (True, "compiled C"))
    _, out, _ = tg("env")
    assert re.search(r"^calls of gates +cpu +C\+\+ of cpu$", out, re.MULTILINE)
    assert re.search(r"^calls of gates +cuda +C\+\+ of cuda$", out, re.MULTILINE)
    monkeypatch.setattr(env, "cpu_gates", lambda: (False, "not compiled: TG_CPU=torch"))
    data = json.loads(tg("env", "--json", "-")[1])
    said = {"works": False, "message": "Python: soft gates are not compiled"}
    assert data["cpu_calls"] == said  # it is C that C++ calls
    assert data["gpu_calls"] == {"works": True, "message": "C++ of cuda"}
