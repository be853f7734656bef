"""Parameters that make every site matter: stock initialisation hides most of them.

A layer scale of 1e-6, a last gain of zero or a bias of zero lets a site have no effect on the
output, and a test of it could not fail.
"""

import torch
from torch import nn


def redraw(model, generator):
    """Draw every parameter anew: weights at their scale, constants and gains in +-[0.5, 1.5].

    Weights of a layer are drawn so that it does not shrink its input: with timm's 0.02 in narrow
    layers the first blocks hardly reach the output.
    """
    drawn = set()
    with torch.no_grad():
        for module in model.modules():
            is_norm = "norm" in type(module).__name__.lower()
            is_layer = isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
            for name, p in module.named_parameters(recurse=False):
                if id(p) not in drawn and p.is_floating_point() and p.numel():
                    drawn.add(id(p))
                    least = p[0].numel() ** -0.5 if is_layer and name == "weight" else 0.0
                    p.copy_(_values(p, is_norm and "bias" not in name, least, generator))


def _values(p, is_gain, least, generator):
    spread = 0.0 if p.numel() == 1 else max(p.double().std().item(), least)
    size = p.double().abs().mean().item()
    normal = torch.randn(p.shape, generator=generator)
    gain = torch.rand(p.shape, generator=generator) + 0.5
    sign = torch.where(torch.rand(p.shape, generator=generator) < 0.5, -1.0, 1.0)
    if not is_gain and spread > 1e-6 * size:
        return p.mean() + spread * normal
    if is_gain or (size and size <= 1.5):  # a gain of a norm, layer scale, a residual gain
        return gain * sign
    if size:  # a constant of another size, such as the logarithm of a temperature
        return p * gain
    if p.dim() < 2:  # a bias of zero
        return 0.1 * normal
    return normal * p[0].numel() ** -0.5  # weights of zero


def set_statistics(model, batch):
    """Set the statistics of every BatchNorm by one pass over `batch` in training mode."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [m for m in norms if m.running_var is not None]
    model.eval()
    kept = [m.momentum for m in norms]
    for m in norms:
        m.train()
        m.reset_running_stats()
        m.momentum = None  # the mean over all passes since the reset: this one
    with torch.no_grad():
        if norms:
            model(**batch) if isinstance(batch, dict) else model(batch)
    for m, momentum in zip(norms, kept, strict=True):
        m.momentum = momentum
    model.eval()
