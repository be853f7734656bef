"""The same network with gates that learn: where they start, a step of training, copies, graphs.

What is held against it are gates as well: at the start those of the frozen conversion, then, with
every parameter moved by a step, the same network under `reference`. No fit and no oracle is between
the two, so rounding alone may be.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import threshold_gating as tg
from tests.fuzz.network import NOT_FINITE

if TYPE_CHECKING:
    from tests.fuzz.check import Result, Trial

_STEP = 1e-2  # the largest change of a parameter: far enough for a start that is not kept to show


def learn(trial: Trial, net: nn.Module, frozen: nn.Module) -> None:
    """The checks of a network that was converted frozen."""
    from tests.fuzz.check import run

    inputs = trial.network.inputs
    if inputs in NOT_FINITE or trial.decided_by_nan(inputs):
        return
    made, x = trial.made, trial.given
    # where nobody knows the channels of a site, that is said, and the gates are one for a site
    shares = dict.fromkeys((trial.network.share, "layer"))
    learned = next(filter(None, (converted(trial, net, share) for share in shares)), None)
    if learned is None:
        return
    with tg.kernels.use("reference"):
        a, b = (run(made, copy.deepcopy(n), x) for n in (frozen, learned))
    own = dict(net.named_buffers())
    a.buffers = {name: t for name, t in a.buffers.items() if name in own}  # a gate's are its own
    if trial.size == 2 and not all(g.isfinite().all() for g in b.gradients.values()):
        # 16 bits overflowed behind the gates: a flat branch of numbers hides it, a learned one not
        a.gradients = {}
    if not agree(trial, "learned start", frozen, a, b):
        return
    if step(trial, learned):
        with tg.kernels.use("reference"):
            want = run(made, copy.deepcopy(learned), x)
            for name, twin in twins(trial, learned).items():
                trial.bitwise(f"learned {name}", want, run(made, twin, x))
        every_way(trial, "learned", learned)


def every_way(trial: Trial, stage: str, gated: nn.Module) -> None:
    """Gates held to themselves: `auto` and compiled as under `reference`, value and gradient."""
    from tests.fuzz.check import run

    with tg.kernels.use("reference"):
        want = run(trial.made, copy.deepcopy(gated), trial.given)
    with tg.kernels.use("auto"):
        have = run(trial.made, copy.deepcopy(gated), trial.given)
    # torch has no backward of a recurrent layer in half where a CPU has instructions for its forward
    if have.error is not None and trial.raises_itself(have.error):
        return
    if agree(trial, f"{stage} auto", gated, want, have) and "compile" in trial.heavy:
        compiled(trial, stage, gated, want)


def converted(trial: Trial, net: nn.Module, share: str) -> nn.Module | None:
    """The network whose gates learn; None where it is refused, or nothing of it learns."""
    from tests.fuzz.check import REFUSALS

    network, given = trial.network, trial.made.given(trial.given.clone())
    options: dict[str, Any] = {"tol": float("inf")} if trial.accepts_all else {}
    asked: dict[str, Any] = {"train": network.train, "share": share}
    sites = trial.made.wishes()
    if network.weights % 2:  # the same as a record, which goes through JSON
        config = tg.GateConfig(**asked, sites=sites or {})
        asked, sites = {"config": tg.GateConfig.from_json(config.to_json())}, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learned = tg.convert(net, sites, inputs=given, **asked, **options)
    except REFUSALS as error:
        inside = traceback.extract_tb(error.__traceback__)[-1].filename
        if not isinstance(error, tg.conversion.ConversionError) and (
            "threshold_gating" not in inside
        ):
            trial.crash("learned convert", error)
        elif not trial.has_way_out(str(error)):
            trial.fail("learned no way out", str(error))
        return None
    except Exception as error:
        trial.crash("learned convert", error)
        return None
    return learned if tg.conversion.gate_parameters(learned) else None


def agree(trial: Trial, stage: str, net: nn.Module, a: Result, b: Result) -> bool:
    """Whether two runs of the same gates differ by rounding alone."""
    if a.error is not None or b.error is not None:
        if a.error is None and b.error is not None:
            trial.crash(stage, b.error)
        return False
    trial.same_gates = True
    with tg.kernels.use("reference"):  # what the network rounds is not found by what is tried
        failure = trial.compared(stage, net, a, b, trial.given, trial.network.inputs, False)
        decided = failure is not None and trial.decided_by_rounding(net, trial.given)
    trial.same_gates = False
    if failure is not None and not decided:
        trial.fail(failure.stage, failure.message)
    return failure is None


def step(trial: Trial, learned: nn.Module) -> bool:
    """A step of training; whether what was finite still is."""
    from tests.fuzz.check import run

    made, x = trial.made, trial.given
    with tg.kernels.use("auto"):
        before = run(made, copy.deepcopy(learned), x, gradient=False)
        found = run(made, copy.deepcopy(learned), x, training=True)
        if before.error is not None or found.error is not None:
            return False  # so does the frozen one, which is looked at elsewhere
        with torch.no_grad():
            for name, p in learned.named_parameters():
                g = found.gradients.get(name)
                if g is not None and g.isfinite().all() and g.any():
                    p -= (_STEP * g / g.abs().max()).to(p.dtype)
        after = run(made, copy.deepcopy(learned), x)
    if after.error is not None:
        trial.crash("learned step", after.error)
        return False
    kept = all(z.isfinite().all() for z in after.values)
    if not kept and all(y.isfinite().all() for y in before.values) and trial.size > 2:
        trial.fail("learned step", "a step of 0.01 makes the output infinite or NaN")
    lost = [k for k, g in after.gradients.items() if not g.isfinite().all()]
    if kept and any(found.gradients[k].isfinite().all() for k in lost if k in found.gradients):
        trial.fail("learned step", f"after a step of 0.01 gradients are not finite: {lost}")
    return kept


def twins(trial: Trial, learned: nn.Module) -> dict[str, nn.Module]:
    """Copies that have to do what the network does, bit for bit, as it is after the step."""
    from tests.fuzz.check import REFUSALS

    ways: dict[str, Any] = {"deepcopy": copy.deepcopy}
    if "pickle" in trial.heavy:
        ways["pickle"] = lambda m: pickle.loads(pickle.dumps(m))
    if "save" in trial.heavy:
        ways["save and load"] = lambda m: _reloaded(trial, m)
    found = {}
    for name, way in ways.items():
        try:
            if name != "save and load":
                way(trial.made.net())
        except Exception:
            continue  # the original cannot be copied in that way
        try:
            found[name] = way(learned)
        except REFUSALS as error:
            if not trial.has_way_out(str(error)):
                trial.fail(f"learned {name} no way out", str(error))
        except Exception as error:
            trial.crash(f"learned {name}", error)
    return found


def _reloaded(trial: Trial, learned: nn.Module) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        tg.conversion.save(learned, folder)
        loaded: nn.Module = tg.conversion.load(folder, trial.made.net())
        return loaded


def compiled(trial: Trial, stage: str, learned: nn.Module, want: Result) -> None:
    """The compiled graph, value and every gradient, where the original has one."""
    from tests.fuzz.check import run_graph

    plain = run_graph(trial.made, trial.in_parts, trial.made.net().eval(), trial.given)
    if plain.error is not None:
        return
    have = run_graph(trial.made, trial.in_parts, copy.deepcopy(learned).eval(), trial.given)
    if trial.torchs_own("aot_eager", trial.in_parts, trial.made.net()):
        return  # its graph of the original is not the original either
    if have.error is None or not trial.is_torchs(str(have.error)):
        agree(trial, f"{stage} aot_eager", learned, want, have)
    torch._dynamo.reset()
