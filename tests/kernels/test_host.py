"""What makes calls in C++ is built when somebody asks, and said to be missing until then."""

import pytest
import torch

from threshold_gating import Activation, kernels
from threshold_gating.kernels import compiler, host, runtime


@pytest.fixture(autouse=True)
def fresh():
    every = host._loaded, host._driving
    for each in every:
        each.cache_clear()
    yield
    for each in every:
        each.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, as far as anyone asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "is_installed", lambda: True)
    monkeypatch.delenv("TG_HOST", raising=False)


def test_without_a_gpu_there_is_nothing_to_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TG_HOST", raising=False)
    assert host.status("cuda") == (False, "Python: there is no GPU, or no Triton")
    assert host.module("cuda") is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_compiled_unasked(gpu, monkeypatch, device):
    monkeypatch.setattr(compiler, "_kept", lambda stem: None)
    monkeypatch.setattr(compiler, "_compiled", lambda *given: 1 / 0)
    assert host.module(device) is None
    assert host.status(device)[1].startswith("Python: not built; threshold_gating.kernels.build()")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_environment_turns_it_off(gpu, monkeypatch, device):
    monkeypatch.setenv("TG_HOST", "python")
    assert host.status(device) == (False, "Python: TG_HOST=python")


def test_a_word_of_the_environment_that_says_nothing_is_refused(gpu, monkeypatch):
    monkeypatch.setenv("TG_HOST", "pyhton")
    with pytest.raises(kernels.BackendError, match="TG_HOST is one of auto, python; got 'pyhton'"):
        host.status("cpu")


@pytest.mark.parametrize("choice", host.CHOICES)
def test_a_call_on_a_cpu_does_not_look_for_a_gpu(monkeypatch, choice):
    monkeypatch.setenv("TG_HOST", choice)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: 1 / 0)
    act, x = Activation("silu", train=("tau", "theta")), torch.randn(3).requires_grad_()
    act(x).sum().backward()
    assert x.grad is not None


def test_what_does_not_load_is_said(gpu, monkeypatch, tmp_path):
    (tmp_path / "host.so").write_text("no module")
    monkeypatch.setattr(host, "extension", lambda sources, build: tmp_path / "host.so")
    works, words = host.status("cuda")
    assert not works
    assert words.startswith("Python: it cannot be used (")


def test_a_compiler_that_fails_says_so(monkeypatch):
    def fails(*given):
        raise compiler.CompilerError("c++ fails: no Python.h")

    monkeypatch.setattr(compiler, "_kept", lambda stem: None)
    monkeypatch.setattr(compiler, "_compiled", fails)
    with pytest.raises(compiler.CompilerError, match=r"no Python\.h"):
        kernels.build()


def test_what_was_built_and_does_not_load_says_which_file_it_is(monkeypatch, tmp_path):
    (tmp_path / "host.so").write_text("no module")
    monkeypatch.setattr(host, "extension", lambda sources, build: tmp_path / "host.so")
    with pytest.raises(compiler.CompilerError, match=r"host\.so does not load, delete it \("):
        kernels.build()


def test_every_file_decides_what_is_loaded(tmp_path):
    first, second = tmp_path / "a.cpp", tmp_path / "b.h"
    first.write_text("1")
    second.write_text("2")
    before = compiler._stem([first, second], ["torch 1"])
    assert compiler._stem([first, second], ["torch 2"]) != before
    second.write_text("3")
    assert compiler._stem([first, second], ["torch 1"]) != before
