"""Samples of what a network feeds its approximate sites, of fixed size however long it runs."""

from __future__ import annotations

import inspect
import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating import sites
from threshold_gating.conversion.plan import (
    Choices,
    ConversionError,
    Function,
    Tracer,
    module_sites,
    run,
)
from threshold_gating.conversion.watch import Running, fresh

_CHUNK = 2**20  # values looked at together


class Reservoir:
    """A uniform sample of at most `size` of the values added: those with the smallest random keys.

    Keys are drawn in the order of the values, so the sample is the same however they are split.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seen = size, 0
        self._draw = torch.Generator().manual_seed(seed)
        self._limit = 2**31 - 1  # a larger key is not among the smallest
        self._keys, self._values = torch.zeros(0, dtype=torch.int32), torch.zeros(0)

    def add(self, x: Tensor) -> None:
        """Take part of `x` into the sample."""
        flat = x.detach().flatten()
        for first in range(0, len(flat), _CHUNK):
            part = flat[first : first + _CHUNK]
            self.seen += len(part)
            keys = torch.randint(
                2**31 - 1, (len(part),), dtype=torch.int32, generator=self._draw, device="cpu"
            )
            keep = keys < self._limit
            self._keys = torch.cat([self._keys, keys[keep]])
            chosen = part[keep.to(part.device)].to("cpu", torch.float32)
            self._values = torch.cat([self._values, chosen])
            if len(self._keys) > self.size + self.size // 4:
                self._limit = int(self._keys.kthvalue(self.size).values)
                keep = self._keys <= self._limit  # in the order they came, which settles ties
                self._keys, self._values = self._keys[keep], self._values[keep]

    def sample(self) -> Tensor:
        """The values kept, in random order."""
        return self._values[self._keys.sort(stable=True).indices[: self.size]]


@dataclass(frozen=True)
class Sampled:
    """An approximate site: its function, its default instance, and a sample of its inputs."""

    kind: str
    f: Function
    default: sites.Recognised
    inputs: Reservoir


def _without_labels(model: nn.Module, batch: Any) -> Any:
    """A batch of a data loader without what the network does not take, such as labels."""
    if not isinstance(batch, list | tuple):
        return batch
    taken = inspect.signature(model.forward).parameters.values()
    by_position = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(p.default is p.empty for p in by_position)
    if any(p.kind is p.VAR_POSITIONAL for p in taken) or len(batch) <= needed:
        return tuple(batch)
    if needed == len(by_position):
        return tuple(batch[:needed])
    if isinstance(batch, tuple) and len(batch) <= len(by_position):
        return batch
    names = ", ".join(p.name for p in by_position)
    raise ConversionError(
        f"calibrate: a batch has {len(batch)} parts and {type(model).__name__} takes ({names}), "
        f"some of which may be left out; give it as a dict, for example "
        f"{{{by_position[0].name!r}: batch[0]}}."
    )


class Watch:
    """Runs a network and keeps `size` of the inputs of each approximate site."""

    def __init__(self, model: nn.Module, size: int, seed: int) -> None:
        self.model, self.size, self.seed = model, size, seed
        self.found: dict[str, Sampled] = {}
        self.exact: dict[str, str] = {}  # kinds of the others
        self.notes: list[str] = []  # on modules that stay as they are
        found = module_sites(model, Choices(None), self.notes)
        self.modules = {module: made[0] for module, made in found.items() if made}
        self.running = Running(model)

    def run(self, inputs: Any) -> None:
        """One batch."""
        self.running = Running(self.model)  # calls are counted anew
        with self.running, ExitStack() as hooks, Tracer(self.running, self.modules, self._call):
            for module in self.modules:  # these run last, so they see what `forward` gets
                hook = module.register_forward_pre_hook(self._module, with_kwargs=True)
                hooks.callback(hook.remove)
            run(self.model, fresh(_without_labels(self.model, inputs)))

    def _module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        site, name = self.modules[module], self.running.stack[-1].site
        assert site is not None and site.t is not None
        known = sites.Recognised(site.t, site.exact, site.sup)
        self._sample(name, site.kind, module.forward, known, (*args, *kwargs.values())[0])

    def _call(self, name: str, kind: str, args: Any, kwargs: Any) -> None:
        if kind not in sites.APPROXIMATE:
            self.exact.setdefault(name, kind)
            return
        call = sites.KINDS[kind].read(*args, **kwargs)
        site = self.found.get(name)
        known = site.default if site is not None else sites.of_call(kind, call.parameters)
        self._sample(name, kind, sites.function(kind, call.parameters), known, call.x)

    def _sample(
        self, name: str, kind: str, f: Function, known: sites.Recognised, x: Tensor
    ) -> None:
        if known.exact:
            self.exact.setdefault(name, kind)
            return
        if not x.isfinite().all():
            bad = int((~x.isfinite()).sum())
            raise ConversionError(
                f"calibrate: {bad} of {x.numel()} inputs of {name} ({kind}) are NaN or infinite; "
                "leave out the batch that makes them.",
                name,
            )
        if name not in self.found:
            seed = self.seed * 2**32 + zlib.crc32(name.encode())
            self.found[name] = Sampled(kind, f, known, Reservoir(self.size, seed))
        self.found[name].inputs.add(x)
