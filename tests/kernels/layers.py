"""Layers away from their start, and all that they give, for the tests of kernels."""

import copy

import torch

import threshold_gating as tg


def moved(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    return layer


def results(layer, x, dy, backend):
    """The output and every gradient."""
    own, z = copy.deepcopy(layer), x.detach().clone().requires_grad_()
    with tg.kernels.use(backend):
        y = own(z)
        y.backward(dy)
    return {"y": y.detach(), "x": z.grad, **{n: p.grad for n, p in own.named_parameters()}}
