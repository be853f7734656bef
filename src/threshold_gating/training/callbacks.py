"""Watch gates while they train: one core, for a loop of one's own, the Trainer and Lightning.

    with GateWatch(model, optimizer, WatchConfig(every=100, out="runs/a")):
        ...  # the loop as it is

    Trainer(model, args, callbacks=[trainer_callback(every=100, out="runs/a")], ...)
    lightning.Trainer(callbacks=[lightning_callback(every=100, out="runs/a")], ...)

Steps are counted by the optimiser itself: a step that a gradient scaler skips is none, and several
batches that are accumulated are one. Every `every` steps one step is observed and written down.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from threshold_gating.conversion.checkpoint.save_load import inner
from threshold_gating.conversion.text import some
from threshold_gating.training import telemetry
from threshold_gating.training.families import family_report
from threshold_gating.training.groups import check_decay, gate_parameters
from threshold_gating.training.health import Health, Rule, Seen, Stuck, described
from threshold_gating.training.observing import Observation


class GateWarning(UserWarning):
    """A gate is stuck, or cannot be watched."""


@dataclass(frozen=True)
class WatchConfig:
    """What is watched, and where it is written.

    Args:
        every: one step in so many is observed, the first of them the `every`-th.
        out: a folder for gates.jsonl, figures/ and families.json; None writes no files.
        writer: where scalars and histograms go instead of gates.jsonl, an object like TensorBoard's
            `SummaryWriter`; "tensorboard" makes one in `out`.
        figures: draw gates that have moved since they were last drawn (with matplotlib), the
            furthest first, at most so many at a time, for each takes a while; 0 for none.
        moved: by how much log tau, theta, s or c must have changed for that.
        rule: when a channel counts as stuck; None does not look.
    """

    every: int = 100
    out: str | Path | None = None
    writer: Any = None
    figures: int = 8
    moved: float = 1e-2
    rule: Rule | None = field(default_factory=Rule)

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(
                f"WatchConfig: every is a number of steps, 1 or more; got {self.every!r}."
            )
        if isinstance(self.writer, str) and (self.writer != "tensorboard" or self.out is None):
            raise ValueError(
                'WatchConfig: writer is an object with add_scalar, or "tensorboard" together with '
                f"out; got writer={self.writer!r}, out={self.out!r}."
            )


class GateWatch:
    """Watches the gates of `model` while `optimizer` trains it, until it is closed.

    `found` has the channels that were found stuck; each is also a `GateWarning`, once until it
    recovers. Gates that `optimizer` decays or does not have are warned of at the start.

    Args:
        model: the network, also wrapped (DDP, FSDP2) or compiled.
        optimizer: one of torch, or several; the steps of the first are counted.
        config: what is watched.
        start: steps that were made before, of a run that resumes.
        writes: whether this process writes and warns: by default that of rank 0 alone. Under FSDP2
            every process needs a watch, because values are gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        config: WatchConfig | None = None,
        *,
        start: int = 0,
        writes: bool | None = None,
    ) -> None:
        # inside of what is compiled or wrapped: sites have the network's own names
        self.model, self.config = inner(model), config or WatchConfig()
        self.step, self.found = start, list[Stuck]()
        self.writes = _is_first() if writes is None else writes
        sites = list(telemetry.learned_sites(self.model))
        if not sites:
            raise ValueError(
                f"GateWatch: {type(self.model).__name__} has no gate that learns; make one with "
                "train=, as in tg.convert(model, train=('tau', 'theta'), inputs=x)."
            )
        optimizers = [_unwrapped(o) for o in _several(optimizer)]
        if self.writes:
            # an optimiser whose groups do not say it has no decay
            said = [{"weight_decay": 0.0, **g} for o in optimizers for g in o.param_groups]
            check_decay(said, self.model)
        self._health = None if self.config.rule is None else Health(self.config.rule)
        self._writer = _writer(self.config) if self.writes else None
        self._drawn = {site.name: _copied(site) for site in sites}
        self._said: set[str] = set()
        self._lost: set[str] = set()  # sites of which it was said that they are NaN
        self._observation: Observation | None = None
        self._hook: Any = optimizers[0].register_step_post_hook(self._stepped)
        self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Stop watching; write which families the gates ended in, unless the run `failed`: then
        other processes may not be there to gather them."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        self._disarm()
        if not failed and (self.writes or self._is_shared_out()):
            self._report_families()
        if (close := getattr(self._writer, "close", None)) is not None:
            close()

    def _report_families(self) -> None:
        report = family_report(self.model)
        if self.writes and self.config.out is not None:
            folder = Path(self.config.out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "families.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        self._text("families", str(report))

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After a step of the optimiser."""
        skipped = getattr(optimizer, "found_inf", None)  # of one that asks the scaler itself
        if isinstance(skipped, Tensor) and bool(skipped):
            return
        self.step += 1
        if self.step % self.config.every == 0:
            observation = self._disarm()
            if self.writes or self._is_shared_out():
                self._report(observation)
        self._arm()

    def _arm(self) -> None:
        due = (self.step + 1) % self.config.every == 0
        if due and self.writes and self.config.rule is not None and self._observation is None:
            self._observation = Observation(self.model, self.config.rule)

    def _disarm(self) -> Observation | None:
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.close()
        return observation

    @torch.no_grad()
    def _report(self, observation: Observation | None) -> None:
        sites = list(telemetry.learned_sites(self.model))
        if not self.writes:
            return  # it was there to gather
        if self._writer is not None:
            telemetry.write_sites(sites, self._writer, self.step)
            if self.config.figures:
                self._draw(sites)
        if observation is not None:
            self._judge(observation)
        if (flush := getattr(self._writer, "flush", None)) is not None:
            flush()

    def _judge(self, observation: Observation) -> None:
        assert self._health is not None
        for name, seen in observation.seen.items():
            self._tell_lost(name, seen)
            found = self._health.judge(name, seen, self.step)
            self.found += found
            if found:
                text = described(found, seen.axis)
                self._text(f"{name}/stuck", text)
                warnings.warn(text, GateWarning, stacklevel=2)
            if self._writer is not None:
                share = float(seen.flat.mean())
                self._writer.add_scalar(f"gates/{name}/flat", share, self.step)
                stuck = self._health.stuck(name)
                self._writer.add_scalar(f"gates/{name}/stuck", float(stuck), self.step)
        for why in sorted(set(observation.unjudged.values())):
            names = [name for name, reason in observation.unjudged.items() if reason == why]
            self._say_once(f"not looked at for stuck channels: {some(names, 8)}: {why}.")
        if not observation.seen and not observation.unjudged:
            self._say_once(
                "no gate was seen in an observed step, so that nothing is known of stuck channels: "
                "the network did not run in training mode with gradients between two steps."
            )

    def _tell_lost(self, name: str, seen: Seen) -> None:
        """Say once of a site that it sees NaN, or makes it."""
        given, made = seen.lost
        if made and name not in self._lost:
            self._lost.add(name)
            why = "so are values of its input" if given else "its input is none, so its gates are"
            text = f"step {self.step}: {name}: {made:,} values of its output are NaN: {why}."
            self._text(f"{name}/nan", text)
            warnings.warn(text, GateWarning, stacklevel=2)

    def _draw(self, sites: list[telemetry.LearnedSite]) -> None:
        drawable = [s for s in sites if s.start is not None]
        far = [(telemetry.distance(self._drawn[s.name], s.values()), s) for s in drawable]
        moved = sorted((f for f in far if f[0] > self.config.moved), key=lambda f: -f[0])
        if moved[self.config.figures :]:
            later = ", ".join(site.name for _, site in moved[self.config.figures :])
            self._text("figures", f"moved and not drawn at this step: {later}")
        for _, site in moved[: self.config.figures]:
            try:
                figure = telemetry.figure(site, self.step)
            except ImportError:
                self._say_once("no figures are drawn: matplotlib is not installed (extra `plot`).")
                return
            self._drawn[site.name] = _copied(site)
            if (add := getattr(self._writer, "add_figure", None)) is not None:
                add(f"gates/{site.name}", figure, self.step)
            if self.config.out is not None:
                safe = site.name.replace("/", "_").replace(":", "_").replace("#", "_")
                folder = Path(self.config.out) / "figures" / safe
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(folder / f"{self.step:08d}.png", dpi=80)

    def _text(self, name: str, text: str) -> None:
        if (add := getattr(self._writer, "add_text", None)) is not None:
            add(f"gates/{name}", text, self.step)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, GateWarning, stacklevel=2)

    def _is_shared_out(self) -> bool:
        return any(hasattr(p, "full_tensor") for p in gate_parameters(self.model).values())


def trainer_callback(**options: Any) -> Any:
    """A `TrainerCallback` of transformers that watches gates; takes the options of `WatchConfig`.

    The Trainer's own optimiser decays gates, of which it warns: give it another, as in
    `optimizers=(torch.optim.AdamW(param_groups(model, lr, weight_decay=...)), None)`.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise ImportError(
            "trainer_callback needs the package transformers: pip install 'threshold-gating[text]'."
        ) from error

    config = WatchConfig(**options)

    class GateCallback(TrainerCallback):
        watch: GateWatch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.watch = GateWatch(
                given["model"],
                given["optimizer"],
                config,
                start=state.global_step,
                writes=state.is_world_process_zero,
            )

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.watch is not None:
                self.watch.close()

    return GateCallback()


def lightning_callback(**options: Any) -> Any:
    """A `Callback` of Lightning that watches gates; takes the options of `WatchConfig`.

    `configure_optimizers` returns an optimiser over `param_groups(self, lr, weight_decay=...)`.
    """
    config = WatchConfig(**options)

    class GateCallback(_lightning().Callback):  # type: ignore[misc]
        watch: GateWatch | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.watch = GateWatch(
                pl_module,
                trainer.optimizers,
                config,
                start=trainer.global_step,
                writes=trainer.is_global_zero,
            )

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.watch is not None:
                self.watch.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if self.watch is not None:
                self.watch.close(failed=True)

    return GateCallback()


def _lightning() -> Any:
    """Lightning, by its name or the older one."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError(
        "lightning_callback needs the package lightning: pip install 'threshold-gating[lightning]'."
    )


def _copied(site: telemetry.LearnedSite) -> dict[str, Tensor]:
    return {name: row.clone() for name, row in site.values().items()}


def _writer(config: WatchConfig) -> Any:
    if config.writer == "tensorboard":
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError(
                'WatchConfig: writer="tensorboard" needs the package tensorboard; install it, or '
                "leave writer out, which writes gates.jsonl."
            ) from None
        return SummaryWriter(str(config.out))
    if config.writer is not None:
        return config.writer
    return None if config.out is None else telemetry.JsonLines(Path(config.out) / "gates.jsonl")


def _several(optimizer: Any) -> list[Any]:
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not found:
        raise ValueError("GateWatch: there is no optimizer to count the steps of; got none.")
    return found


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser of torch inside of accelerate's and Lightning's."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks"):
        inside = getattr(optimizer, "optimizer", None)
        if inside is None:
            raise TypeError(
                "GateWatch: optimizer is one of torch.optim, or wraps one as accelerate's does; "
                f"got {type(optimizer).__name__}."
            )
        optimizer = inside
    found: torch.optim.Optimizer = optimizer
    return found


def _is_first() -> bool:
    group = torch.distributed
    return not (group.is_available() and group.is_initialized()) or group.get_rank() == 0
