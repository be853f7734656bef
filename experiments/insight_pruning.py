"""Does a reading of gates mean anything? What `tg.insight` reads against what pruning costs.

Each channel of each site is pruned alone: its output is set to 0, or to its mean over the samples
that were read. Its sensitivity is how far that moves the network's output, the mean KL divergence
of the predicted classes, and by how much the loss changes. The reading (share of the open branch,
share of flat values, threshold in units of the input's spread, ...) is taken on other samples than
the sensitivity, and both are correlated channel by channel (Spearman), pooled and within the sites.
Every gate is evaluated (native ops off).

    resnet20      CIFAR-10, trained by its author, ReLU: 19 sites, 16 channels of each, read on
                  1,000 test images and pruned on 500 others
    stories260k   a Llama of 260 thousand parameters, SiLU: 5 sites of 172 channels, 832 tokens each
    digits        64-32-32-32-10 trained here from SiLU, gates learned per channel, five seeds; read
                  on the training images and pruned on the 450 test images

    python -m experiments.insight_pruning --data DIR     # 20 minutes on one core
    python -m experiments.insight_pruning --smoke

Last result: 39 rows, CPU (x86_64, 2 cores, 1 threads), seeds 0, 1, 2, 3, 4, 2,219 s of runs (some
side by side), 2026-11-18; docs/results.md.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import threshold_gating as tg
from experiments import record
from experiments.record import Case, Row, Verdict
from threshold_gating.conversion.audit import is_gate
from threshold_gating.conversion.watch import Run, Told, Visit, Watch
from threshold_gating.insight.records import SiteReading

NAME = "insight_pruning"
SITES = {"resnet20": 19, "stories260k": 5, "digits": 3}
SEEDS = {"resnet20": 1, "stories260k": 1, "digits": 5}
CHANNELS = {"resnet20": 16, "stories260k": 172, "digits": 32}  # of a site that are pruned, at most
READ = ("open", "saturation", "flat", "threshold", "spread", "moved")  # what the reading says
BASELINE = "output"  # what one could know without gates: the spread of the channel's output


class Network(NamedTuple):
    """A converted network, samples to read it on, and samples to measure its loss on."""

    model: nn.Module
    read: Tensor
    inputs: Tensor
    targets: Tensor

    def predicted(self) -> Tensor:
        """Log-probabilities of the classes, [samples, classes]."""
        parts = [self.model(x).flatten(0, -2) for x in self.inputs.split(250)]
        return torch.cat(parts).double().log_softmax(-1)

    def loss(self, predicted: Tensor) -> float:
        return float(F.nll_loss(predicted, self.targets.flatten()))


def resnet20(case: Case, asked: argparse.Namespace) -> Network:
    from experiments.cifar_resnet import ResNet, pretrained
    from experiments.evidence import vision
    from experiments.evidence.common import normalised

    if asked.smoke:
        images, labels = torch.randn(12, 3, 32, 32), torch.arange(12) % 10
        model: nn.Module = ResNet(1).eval()
    else:
        pixels, labels = vision.cifar(1500)
        images = normalised(pixels)
        model = pretrained(3, vision.DATA / vision.RESNET20)
    gated = tg.convert(model, inputs=images[:4])
    # every third one, since they are sorted by class
    measured = torch.arange(len(images)) % 3 == 2
    return Network(gated, images[~measured], images[measured], labels[measured])


def stories260k(case: Case, asked: argparse.Namespace) -> Network:
    from experiments.evidence import text

    if asked.smoke:
        torch.manual_seed(0)
        model: nn.Module = text.Llama(text.Size(32, 2, 16, 12, 8, 1e-5)).eval()
        pieces = torch.randint(32, (4, 9))
    else:
        model = text.stories260k(True).model
        pieces = torch.cat([story.unfold(0, 65, 64) for story in text.stories()])
    gated = tg.convert(model, inputs=pieces[:1, :-1])
    half = pieces[1::2]
    return Network(gated, pieces[0::2, :-1], half[:, :-1], half[:, 1:])


def digits(case: Case, asked: argparse.Namespace) -> Network:
    from experiments.digits_training import digits as images_and_labels

    x, y, test_x, test_y = images_and_labels()
    torch.manual_seed(case["seed"])
    widths = (64, 32, 32, 32)
    layers: list[nn.Module] = []
    for first, last in pairwise(widths):
        layers += [nn.Linear(first, last), nn.SiLU()]
    plain = nn.Sequential(*layers, nn.Linear(32, 10))
    model = tg.convert(plain, train=("tau", "theta", "s", "c"), share="channel", inputs=x[:8])
    optimizer = torch.optim.Adam(tg.training.param_groups(model, lr=3e-3))
    for _ in range(1 if asked.smoke else 30):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return Network(model.eval(), x, test_x, test_y)


MAKE: dict[str, Callable[[Case, argparse.Namespace], Network]] = {
    "resnet20": resnet20,
    "stories260k": stories260k,
    "digits": digits,
}


def _gate(run: Run) -> str | None:
    return "gate" if is_gate(run.module) else None


class Pruned(Watch):
    """While it is on, one channel of the output of a site is `value` for all samples."""

    def __init__(self, model: nn.Module, site: str, axis: int) -> None:
        self.site, self.axis, self.channel, self.value = site, axis, 0, 0.0
        self.output: Tensor | None = None  # of the site in the last run, before it was pruned
        self.on = False
        super().__init__(model, self._visit, _gate, answered=True)

    def _visit(self, visit: Visit) -> Told | None:
        name = visit.name if visit.is_call else visit.run.where  # the same in every run
        return self._prune if name == self.site else None

    def _prune(self, y: Tensor) -> None:
        self.output = y.detach()
        if self.on:
            y.select(self.axis, self.channel).fill_(self.value)


def run(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """The sensitivities and the reading of every channel of one site."""
    network = MAKE[case["network"]](case, asked)
    with torch.no_grad(), tg.kernels.use("reference"):
        reading = tg.insight.read(network.model, network.read)
        site = reading.sites[min(case["site"], len(reading.sites) - 1)]
        assert site.values is not None
        assert site.values.axis is not None
        count = len(site.values.mean)
        channels = _spaced(count, 2 if asked.smoke else CHANNELS[case["network"]])
        base = network.predicted()
        pruned = Pruned(network.model, site.name, site.values.axis)
        with pruned:
            network.model(network.read)
            assert pruned.output is not None
            each = pruned.output.movedim(site.values.axis, 0).flatten(1).double()
            means, spread = each.mean(1), each.std(1)
            if not torch.equal(network.predicted(), base):
                raise RuntimeError("watching alone changes the output")
            pruned.on = True
            zero = torch.tensor([_cost(network, pruned, base, k, 0.0) for k in channels])
            mean = torch.tensor([_cost(network, pruned, base, k, means[k]) for k in channels])
    if not zero[:, 0].any():
        raise RuntimeError("pruning changes nothing, so it is not what was pruned")
    figures = {what: _of(site, what)[channels] for what in READ} | {BASELINE: spread[channels]}
    for how, costs in (("zero", zero), ("mean", mean)):
        figures |= {f"{how} KL": costs[:, 0], f"{how} loss": costs[:, 1]}
    kept = {what: [float(f"{v:.5g}") for v in w.tolist()] for what, w in figures.items()}
    about = {"name": site.name, "loss": network.loss(base), "samples": len(base)}
    return {**about, "state": [site.values.state[k] for k in channels], **kept}


def _spaced(count: int, most: int) -> list[int]:
    step = max(1, count // most)
    return list(range(0, count, step))[:most]


def _cost(
    network: Network, pruned: Pruned, base: Tensor, channel: int, value: float | Tensor
) -> tuple[float, float]:
    """The mean KL divergence of the output, and the change of the loss."""
    pruned.channel, pruned.value = channel, float(value)
    now = network.predicted()
    apart = float((base.exp() * (base - now)).sum(-1).mean())
    return apart, network.loss(now) - network.loss(base)


def _of(site: SiteReading, what: str) -> Tensor:
    """A figure of the reading, [channels]."""
    v = site.values
    assert v is not None
    if what == "open":
        return v.open[-1]
    if what == "threshold":  # how many standard deviations of the input it lies above the mean
        return (site.theta[0] - v.mean) / v.std.clamp_min(1e-9)
    if what == "spread":
        return v.std
    if what == "moved":  # from the function that it started from, at what it is given
        x = v.sample
        start = site.start(x)
        apart = (site.at(x) - start).square().mean(1).sqrt() / start.square().mean().sqrt()
        return apart.expand(len(v.mean))
    figure: Tensor = getattr(v, what)
    return figure


def cases() -> Iterator[Case]:
    for network, sites in SITES.items():
        for seed in range(SEEDS[network]):
            for site in range(sites):
                yield {"network": network, "seed": seed, "site": site}


# What the rows say


class Correlation(NamedTuple):
    """Spearman's rank correlation and its 95 % interval."""

    rho: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.rho):
            return ""
        return f"{self.rho:+.2f} ({self.low:+.2f} to {self.high:+.2f})"

    @property
    def is_known(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def _ranks(x: Tensor) -> Tensor:
    """Ranks, the mean of them where values are equal."""
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]


def _rho(a: Tensor, b: Tensor) -> Tensor:
    """Correlation along the last axis; NaN where one of the two is constant."""
    a, b = (w - w.mean(-1, keepdim=True) for w in (a, b))
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def spearman(groups: list[tuple[Tensor, Tensor]], draws: int = 1000) -> Correlation:
    """The mean of the groups' rank correlations.

    The interval is over channels that are drawn again within each group, with their ranks.
    """
    ranked = [(_ranks(a), _ranks(b)) for a, b in groups if len(a) > 2 and len(a.unique()) > 1]
    if not ranked:
        return Correlation(math.nan, math.nan, math.nan)
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for a, b in ranked:
        at = torch.randint(len(a), (draws, len(a)), generator=generator)
        drawn.append(_rho(a[at], b[at]))
    ends = torch.stack(drawn).nanmean(0).nanquantile(torch.tensor([0.025, 0.975]).double())
    mean = torch.stack([_rho(a, b) for a, b in ranked]).nanmean()
    return Correlation(float(mean), *ends.tolist())


def correlation(rows: list[Row], what: str, cost: str, *, within: bool) -> Correlation:
    """Of a figure with what pruning does: over all channels of a seed, or within each site."""
    pairs = [(_figures(row, what), _figures(row, cost)) for row in rows]
    if not within:
        seeds = sorted({row.case["seed"] for row in rows})
        at = [[k for k, row in enumerate(rows) if row.case["seed"] == seed] for seed in seeds]
        pairs = [_joined([pairs[k] for k in some]) for some in at]
    return spearman(pairs)


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def _figures(row: Row, what: str) -> Tensor:
    """A figure of each channel; the depth of a site is the same for all of its own."""
    if what == "depth":
        return torch.full((len(row.figures["state"]),), row.case["site"]).double()
    return torch.tensor([float(v) for v in row.figures[what]], dtype=torch.float64)


_WORDS = {
    "open": "share of the highest branch",
    "saturation": "saturation (one gate has 0.99)",
    "flat": "share of flat values",
    "threshold": "threshold above the mean input, in its std",
    "spread": "std of the input",
    "moved": "distance from the start",
    "output": "std of the output (no gates needed)",
    "depth": "depth of the site",
}


def page(rows: list[Row]) -> str:
    """The tables, in Markdown."""
    parts = []
    for network, own in _by_network(rows):
        count = sum(len(row.figures["state"]) for row in own)
        seeds = len({row.case["seed"] for row in own})
        loss = sum(row.figures["loss"] for row in own) / len(own)
        lines = [
            f"**{network}**: {count} channels of {len(own) // seeds} sites"
            f"{f', {seeds} seeds' if seeds > 1 else ''}; loss before pruning {loss:.3f}.",
            "",
            "| Spearman correlation with what pruning does | KL, set to 0 | within a site "
            "| loss, set to 0, within a site | KL, set to its mean, within a site |",
            "| --- | --- | --- | --- | --- |",
        ]
        for what in (*READ, BASELINE, "depth"):
            costs = (("zero KL", False), ("zero KL", True), ("zero loss", True), ("mean KL", True))
            cells = [str(correlation(own, what, cost, within=w)) for cost, w in costs]
            if any(cells):
                lines.append(f"| {_WORDS[what]} | {' | '.join(cells)} |")
        parts.append("\n".join([*lines, "", _dead(own)]))
    return "\n\n".join(parts)


def _by_network(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for network in SITES:
        if own := [row for row in rows if row.case["network"] == network]:
            yield network, own


def summary(rows: list[Row]) -> str:
    """One line for each network: what of the reading says most, beside what needs no reading."""
    lines = [
        "| network | of the reading, the figure that says most | rank correlation with the KL of "
        "pruning, within a site | the same of the output's std, which needs no gates | depth |",
        "| --- | --- | --- | --- | --- |",
    ]
    for network, own in _by_network(rows):
        found = {what: correlation(own, what, "zero KL", within=True) for what in READ}
        best = max(found, key=lambda what: abs(found[what].rho) if found[what].is_known else 0)
        baseline = correlation(own, BASELINE, "zero KL", within=True)
        depth = correlation(own, "depth", "zero KL", within=False)
        cells = _WORDS[best], found[best], baseline, depth
        lines.append(f"| {network} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _dead(rows: list[Row]) -> str:
    """What pruning costs where the reading says that a channel is dead, and where not."""
    costs: dict[str, list[float]] = {}
    for row in rows:
        for state, cost in zip(row.figures["state"], row.figures["zero KL"], strict=True):
            costs.setdefault("dead" if state == "dead" else "other", []).append(float(cost))
    dead, others = (torch.tensor(costs.get(k, []), dtype=torch.float64) for k in ("dead", "other"))
    if not len(dead):
        return "No channel is dead."
    return (
        f"{len(dead)} channels are dead: setting one to 0 moves the output by a KL divergence of "
        f"{dead.max():.1e} at most; for the others the median is {others.median():.1e}."
    )


def verdicts(rows: list[Row]) -> list[Verdict]:
    """None: the paper does not claim it."""
    return []


def main(argv: list[str] | None = None) -> list[Row]:
    asked = record.options(NAME, __doc__).parse_args(argv)
    if asked.data is not None:
        os.environ["TG_DATA"] = str(asked.data)
    torch.set_num_threads(1)
    chosen = [c for c in cases() if not asked.smoke or (c["site"] == 0 and c["seed"] == 0)]
    rows = record.complete(NAME, chosen, run, asked)
    print(page(rows))
    return rows


if __name__ == "__main__":
    main()
