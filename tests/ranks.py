"""Training on several processes, for test_scale: `torchrun tests/ranks.py FOLDER` or `losses(...)`.

A small network with learned gates in tiers A and W, the same data and the same steps, on one process
or shared out. What each way did is written to FOLDER.

Whatever joins a process group does so here and never in a process that runs tests: when the last
reference to a group goes, torch waits for the group's threads with Python's lock held, and one of
these may be waiting for the lock.
"""

import faulthandler
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import threshold_gating as tg
from threshold_gating.training import GateWatch, WatchConfig, telemetry
from threshold_gating.training.groups import check_decay, param_groups

STEPS = 8
SAVED = 4  # steps before the checkpoint
BATCH = 16
BENT = tg.TG(float("inf"), (-1, 1), (0.5, 1, 0.5), (-0.5, 0, 0.5))  # hard, in three pieces
LIMIT = 240  # seconds, after which a process that hangs says where and ends


def network():
    """conv, learned gates per channel, tiers W and S behind them."""
    torch.manual_seed(0)
    learned = ("tau", "theta")
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            tg.Activation("silu", share="channel", channels=8, train=learned),
            tg.Conv2d(8, 8, 3, padding=1, stride=2),
            tg.Activation("relu", share="channel", channels=8, train=("theta", "s", "c")),
        ),
        nn.Sequential(nn.Flatten(), tg.Linear(128, 16), tg.Activation("gelu", train=learned)),
        tg.Linear(16, 12, tier="S", train=(*learned, "c")),
        nn.Sequential(  # two thresholds for each channel, which keep their order
            tg.Activation(BENT, share="channel", channels=12, train=("theta",)),
            nn.Linear(12, 5),
        ),
    )


class Plain(nn.Module):
    """A network without gates: activations as modules and as calls, one in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.act = nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(inplace=True)
        self.hidden, self.out = nn.Linear(72, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = self.hidden(self.act(self.conv(x)).flatten(1))
        return self.out(F.silu(x) * x.sigmoid() + torch.tanh(x))


def converted(**options):
    return tg.convert(Plain(), inputs=data(1)[0][0], **options)


def learning():
    """The same, with gates that learn: modules, and calls of a module, in parameters of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ReLU has no sharpness to learn, which is said
        return converted(train=("tau", "theta"), share="channel")


def optimizer_of(model):
    return torch.optim.AdamW(param_groups(model, 1e-2, gate_lr_scale=2.0, weight_decay=0.05))


def data(steps=STEPS):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 3, 8, 8, generator=draw), torch.randint(5, (BATCH,), generator=draw))
        for _ in range(steps)
    ]


def losses(model, optimizer, batches, rank=0, ranks=1):
    """The loss of each step on the whole batch, of which this process has its part."""
    seen = []
    for x, y in batches:
        x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        whole = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(whole)
        seen.append(whole.item() / ranks)
    return seen


def sharded(policy, wide=False):
    """The network under FSDP2, a unit for each of its parts; `wide` keeps the gates out of `policy`."""
    model = network()
    for gate in model.modules():
        if wide and isinstance(gate, tg.Activation):
            fully_shard(gate, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
            # The gates of a tier are asked for their tensors or values and never called.
            register_fsdp_forward_method(gate, "tensors")
            register_fsdp_forward_method(gate, "values")
    for part in model:
        fully_shard(part, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def described(model):
    """dtype and number of axes of each parameter, and whether it is shared out."""
    return {n: (str(p.dtype), p.dim(), type(p).__name__) for n, p in model.named_parameters()}


def main(folder):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out = {"ranks": ranks}

    networks = {"ddp": network(), "ddp, converted": converted(), "ddp, learning": learning()}
    for name, model in networks.items():
        parallel = DistributedDataParallel(model)
        out[name] = losses(parallel, optimizer_of(parallel), data(), rank, ranks)

    model = fully_shard(learning())
    out["fsdp, learning"] = losses(model, optimizer_of(model), data(), rank, ranks)
    out["fsdp, learning: parameters"] = described(model)

    model = sharded(MixedPrecisionPolicy())
    optimizer = optimizer_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_decay(optimizer, model)
    first = losses(model, optimizer, data()[:SAVED], rank, ranks)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=folder / "shards")
    out["fsdp"] = first + losses(model, optimizer, data()[SAVED:], rank, ranks)
    out["fsdp: parameters"] = described(model)
    with GateWatch(
        model, optimizer, WatchConfig(every=1, out=folder / "watch", figures=0)
    ) as watch:
        losses(model, optimizer, data()[:2], rank, ranks)
    out["fsdp: watched"] = watch.step, telemetry.gate_scalars(model)

    again = sharded(MixedPrecisionPolicy())  # what was saved, on as many processes
    fresh = optimizer_of(again)
    model_state, optimizer_state = get_state_dict(again, fresh)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "shards")
    set_state_dict(again, fresh, model_state_dict=model_state, optim_state_dict=optimizer_state)
    out["fsdp resumed"] = first + losses(again, fresh, data()[SAVED:], rank, ranks)

    x_and_y = data()[:1] * 2 * STEPS  # one batch over and over, so that the loss must fall
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, model in (("bf16", sharded(half)), ("bf16, wide gates", sharded(half, wide=True))):
        used = {}
        model[0][1].register_forward_hook(
            lambda act, inputs, y, used=used: used.update(
                gate=str(act.rho.dtype), x=str(inputs[0].dtype), y=str(y.dtype)
            )
        )
        out[name] = losses(model, optimizer_of(model), x_and_y, rank, ranks)
        out[f"{name}: used"] = used
        out[f"{name}: parameters"] = described(model)
        out[f"{name}: gradients"] = {
            n: (str(p.grad.dtype), bool(p.grad.full_tensor().isfinite().all()))
            for n, p in model.named_parameters()
        }
    if rank == 0:
        torch.save(out, folder / "ranks.pt")
    leave(folder, rank, ranks)


def leave(folder, rank, ranks):
    """End the process once every one is done, without undoing anything.

    torch's threads, ended by the interpreter or by the group's destructor, once in a while abort a
    process or wait for ever.
    """
    (folder / f"left {rank}").touch()
    while not all((folder / f"left {r}").exists() for r in range(ranks)):
        time.sleep(0.01)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    main(Path(sys.argv[1]))
