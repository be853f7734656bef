"""Samples of what a network feeds its approximate sites, of fixed size however long it runs."""

from __future__ import annotations

import inspect
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from threshold_gating.conversion import sites
from threshold_gating.conversion.choices import Function
from threshold_gating.conversion.plan import module_sites, run, whole
from threshold_gating.conversion.site import ConversionError
from threshold_gating.conversion.watch import Visit, Watch, fresh

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
            chosen = part[keep.to(part.device)].cpu()
            if chosen.dtype != torch.float64:  # whose range float32 has not
                chosen = chosen.float()
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


class Sampler:
    """Runs a network and keeps `size` of the inputs of each approximate site."""

    def __init__(self, model: nn.Module, size: int, seed: int) -> None:
        self.model, self.size, self.seed = model, size, seed
        self.found: dict[str, Sampled] = {}
        self.exact: dict[str, str] = {}  # kinds of the others
        self.notes: list[str] = []  # on modules that stay as they are
        found = module_sites(model, notes=self.notes)
        self.modules = {module: made for module, made in found.items() if made}

    def run(self, inputs: Any) -> None:
        """One batch."""
        with Watch(self.model, self._see, whole(self.modules)):
            run(self.model, fresh(_without_labels(self.model, inputs)))

    def _see(self, visit: Visit) -> None:
        known = self._known(visit)
        if known is None or known.exact:
            self.exact.setdefault(visit.name, visit.kind)
        else:
            self._sample(visit, known)

    def _known(self, visit: Visit) -> sites.Recognised | None:
        """The default instance of a site, None for a call that is exact."""
        if visit.is_call and visit.kind not in sites.APPROXIMATE:
            return None
        if visit.name in self.found:
            return self.found[visit.name].default
        if visit.is_call:
            return sites.of_call(visit.kind, visit.call.parameters)
        (site,) = self.modules[visit.run.module]
        assert site is not None and site.t is not None
        return sites.Recognised(site.t, site.exact, site.sup)

    def _sample(self, visit: Visit, known: sites.Recognised) -> None:
        name, x = visit.name, visit.x
        if not x.isfinite().all():
            bad = int((~x.isfinite()).sum())
            raise ConversionError(
                f"calibrate: {bad} of {x.numel()} inputs of {name} ({visit.kind}) are NaN or "
                "infinite; leave out the batch that makes them.",
                name,
            )
        if name not in self.found:
            seed = self.seed * 2**32 + zlib.crc32(name.encode())
            inputs = Reservoir(self.size, seed)
            self.found[name] = Sampled(visit.kind, visit.function, known, inputs)
        self.found[name].inputs.add(x)
