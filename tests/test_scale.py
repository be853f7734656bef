"""Training with gates by the means that people use: mixed precision, checkpointing, compilation,
averages of weights, several processes, and runs that are killed and resumed.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import threshold_gating as tg
from threshold_gating import Activation
from threshold_gating.training.groups import gate_parameters, param_groups

LEARNED = ("tau", "theta")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def loss_of(model, x, y):
    return F.cross_entropy(model(x).float(), y)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_trains_and_the_gates_stay_float32(dtype):
    model = ranks.network()
    optimizer = ranks.optimizer_of(model)
    # Half floats need the scaler, 16-bit brain floats do without.
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    before = {n: p.clone() for n, p in gate_parameters(model).items()}
    seen = []
    for x, y in ranks.data(1) * 12:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(loss.item())
    assert all(p.grad.isfinite().all() for p in model.parameters())
    gates = gate_parameters(model)
    assert (
        {p.dtype for p in gates.values()}
        == {p.grad.dtype for p in gates.values()}
        == {torch.float32}
    )
    assert [n for n, p in gates.items() if torch.equal(p, before[n])] == []
    assert seen[-1] < seen[0] / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_gradients_by_its_rounding_only(dtype):
    model = ranks.network()
    x, y = ranks.data(1)[0]
    parameters = dict(model.named_parameters())
    want = torch.autograd.grad(loss_of(model, x, y), list(parameters.values()))
    with torch.autocast("cpu", dtype):
        loss = loss_of(model, x, y)
    have = torch.autograd.grad(loss, list(parameters.values()))
    # Some ten roundings lie between a loss and its gradients, each of half an eps.
    for name, a, b in zip(parameters, have, want, strict=True):
        assert (a - b).norm() < 8 * torch.finfo(dtype).eps * b.norm(), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    model = ranks.network()
    x, y = ranks.data(1)[0]
    x.requires_grad_()
    want = torch.autograd.grad(loss_of(model, x, y), [x, *model.parameters()])

    def parts(x):
        for part in model:
            x = checkpoint(part, x, use_reentrant=reentrant)
        return x

    F.cross_entropy(parts(x), y).backward()
    have = [x.grad, *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def test_an_average_of_the_weights_averages_the_gates():
    model = ranks.network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    optimizer = ranks.optimizer_of(model)
    want = None
    for x, y in ranks.data(4):
        step(model, optimizer, x, y)
        average.update_parameters(model)
        now = {n: p.detach().clone() for n, p in model.named_parameters()}
        want = now if want is None else {n: want[n].lerp(now[n], 0.25) for n in now}
    have = dict(average.module.named_parameters())
    assert set(gate_parameters(average.module)) == set(gate_parameters(model))
    for name, value in want.items():
        # the same sum in another order
        torch.testing.assert_close(have[name], value, rtol=1e-6, atol=1e-7)
    assert average(ranks.data(1)[0][0]).isfinite().all()


@pytest.mark.parametrize("make", [
    lambda: Activation("silu", train=LEARNED),
    lambda: Activation("silu", share="channel", channels=4, train=LEARNED),
    lambda: Activation("gelu", share="channel", channels=4, train=(*LEARNED, "s", "c")),
    lambda: tg.Conv2d(4, 4, 3, padding=1),
    lambda: tg.Conv2d(4, 4, 1, init="gelu_k3"),
    lambda: nn.Sequential(nn.Flatten(), tg.Linear(100, 4)),
    lambda: nn.Sequential(nn.Flatten(), tg.Linear(100, 4, tier="S")),
], ids=["A", "A channel", "A all", "W conv", "W conv K=3", "W linear", "S linear"])  # fmt: skip
def test_what_a_layer_returns_may_be_overwritten(make):
    layer, x = make(), torch.randn(2, 4, 5, 5, requires_grad=True)
    want = torch.autograd.grad((layer(x) + 1).square().sum(), x)[0]
    y = layer(x)
    y += 1
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], want)


def stack(make, depth):
    """Layers that differ in their values alone."""
    model = nn.Sequential(*(make() for _ in range(depth)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    return model


# A layer that can follow itself, and the shape of its input.
LAYERS = {
    "activation": (
        lambda: Activation("silu", share="channel", channels=6, axis=-1, train=LEARNED), (4, 6)
    ),
    "hard activation": (
        lambda: Activation("relu", share="channel", channels=6, train=("theta", "s")), (4, 6)
    ),
    "K = 3 activation": (lambda: Activation("gelu_k3", train=LEARNED), (4, 6)),
    "linear": (lambda: tg.Linear(6, 6), (4, 6)),
    "conv": (lambda: tg.Conv2d(3, 3, 3, padding=1), (2, 3, 5, 5)),
}  # fmt: skip


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.compile
@pytest.mark.parametrize("name", LAYERS)
def test_a_training_step_is_one_graph_with_the_gradients_of_eager(name, dynamo):
    make, shape = LAYERS[name]
    model, x = stack(make, 2), torch.randn(shape)
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    have = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]
    for a, b in zip(have, want, strict=True):
        # sums of some hundred products in another order
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.compile
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_differ_in_their_values_share_one_graph(name, dynamo):
    make, shape = LAYERS[name]
    model = stack(make, 6)
    for layer in model:
        layer.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(param_groups(model, 0.1))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            optimizer.zero_grad()
            # every layer sees an input that needs a gradient, as all but the first do anyway
            model(torch.randn(shape, requires_grad=True)).square().mean().backward()
            optimizer.step()
    assert dynamo["stats"]["unique_graphs"] == 1


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory):
    """What two processes did under torchrun, and the folder with what they saved."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *(ranks.__file__, str(folder)),
    ]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # the processes themselves end before: whoever is killed here leaves his children behind
    limit = ranks.LIMIT + 60
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr[-4000:]
    out = torch.load(folder / "ranks.pt")
    assert out["ranks"] == 2
    return out, folder


@pytest.fixture(scope="module")
def alone():
    """The losses of one process on the whole batch."""
    model = ranks.network()
    return torch.tensor(ranks.losses(model, ranks.optimizer_of(model), ranks.data()))


# Half batches averaged are the whole one but for the order of float32 sums (1.5e-7 of the loss was
# seen). A gate that is not trained is more: 5e-5 for one layer, 3e-3 for all.
SAME = {"rtol": 5e-6, "atol": 0.0}


def test_a_converted_network_on_two_processes_has_the_losses_of_the_original_on_one(shared_out):
    original = ranks.Plain()
    want = ranks.losses(original, ranks.optimizer_of(original), ranks.data())
    torch.testing.assert_close(
        torch.tensor(shared_out[0]["ddp, converted"]), torch.tensor(want), **SAME
    )


@pytest.mark.parametrize("way", ["ddp, learning", "fsdp, learning"])
def test_calls_whose_gates_learn_have_on_two_processes_the_losses_of_one(way, shared_out):
    model = ranks.learning()
    want = torch.tensor(ranks.losses(model, ranks.optimizer_of(model), ranks.data()))
    torch.testing.assert_close(torch.tensor(shared_out[0][way]), want, **SAME)
    assert all(p.count_nonzero() for p in gate_parameters(model).values())
    kinds = shared_out[0]["fsdp, learning: parameters"]
    assert set(kinds) == {name for name, _ in model.named_parameters()}
    assert {(dtype, kind) for dtype, _, kind in kinds.values()} == {("torch.float32", "DTensor")}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(way, shared_out, alone):
    torch.testing.assert_close(torch.tensor(shared_out[0][way]), alone, **SAME)
    assert alone.unique().numel() == ranks.STEPS


def test_a_gate_that_is_not_trained_would_show_in_the_losses(alone):
    model = ranks.network()
    optimizer = ranks.optimizer_of(model)
    model[1][1].gate.requires_grad_(False)
    stuck = torch.tensor(ranks.losses(model, optimizer, ranks.data()))
    assert not torch.allclose(stuck, alone, **SAME)


def test_sharded_parameters_are_all_shared_out_and_none_is_without_axes(shared_out):
    for name in ("fsdp: parameters", "bf16: parameters", "bf16, wide gates: parameters"):
        kinds = shared_out[0][name]
        assert set(kinds) == {n for n, _ in ranks.network().named_parameters()}
        assert {(dtype, kind) for dtype, _, kind in kinds.values()} == {
            ("torch.float32", "DTensor")
        }
        assert min(dim for _, dim, _ in kinds.values()) == 1


def test_a_sharded_run_is_watched_and_one_process_writes(shared_out):
    out, folder = shared_out
    steps, scalars = out["fsdp: watched"]
    assert steps == 2
    lines = [json.loads(line) for line in (folder / "watch/gates.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "scalars" in line] == [1, 2]
    written = next(line["scalars"] for line in lines if line["step"] == 2)
    for name, value in scalars.items():
        assert written[f"gates/{name}"] == value
    assert "gates/3.0/flat" in written


@pytest.mark.parametrize("name", ["bf16", "bf16, wide gates"])
def test_gates_train_inside_a_unit_of_16_bits(name, shared_out):
    out = shared_out[0]
    losses = torch.tensor(out[name])
    assert losses.isfinite().all()
    assert losses[-1] < 0.1 * losses[0]
    assert set(out[f"{name}: gradients"].values()) == {("torch.float32", True)}
    used = out[f"{name}: used"]
    wide = "torch.float32" if "wide" in name else "torch.bfloat16"
    assert used == {"gate": wide, "x": "torch.bfloat16", "y": "torch.bfloat16"}


def test_a_sharded_run_resumes_where_it_was_saved(shared_out):
    assert shared_out[0]["fsdp resumed"] == shared_out[0]["fsdp"]


def test_what_two_processes_saved_one_process_continues(shared_out, alone):
    _, folder = shared_out
    model = ranks.network()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = ranks.optimizer_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no process group
        states = get_state_dict(model, optimizer)
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder / "shards")
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    rest = torch.tensor(ranks.losses(model, optimizer, ranks.data()[ranks.SAVED :]))
    torch.testing.assert_close(rest, alone[ranks.SAVED :], **SAME)
    assert all(p.count_nonzero() for p in gate_parameters(model).values())


def run(file, steps, die_at=None):
    """Train with dropout and shuffled data; save after every third step, resume what is there."""
    model = nn.Sequential(ranks.network(), nn.Dropout(0.2))
    optimizer = ranks.optimizer_of(model)
    torch.manual_seed(3)
    first = 0
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first = saved["step"]
    for k in range(first, steps):
        x, y = ranks.data(1)[0]
        pick = torch.randperm(len(x))[: len(x) // 2]
        step(model, optimizer, x[pick], y[pick])
        if (k + 1) % 3 == 0:
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(), "step": k + 1,
            }  # fmt: skip
            torch.save(state, file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
        if k + 1 == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return model, first


def test_a_run_that_was_killed_and_resumed_ends_bitwise_the_same(tmp_path):
    want, _ = run(tmp_path / "whole.pt", 10)
    process = multiprocessing.get_context("spawn").Process(
        target=run, args=(tmp_path / "killed.pt", 10, 8), daemon=True
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    have, first = run(tmp_path / "killed.pt", 10)
    assert first == 6
    for name, value in want.state_dict().items():
        assert torch.equal(have.state_dict()[name], value), name


@pytest.mark.parametrize("rho", [1e6, -1e6, torch.inf, -torch.inf])
@pytest.mark.parametrize("make", [
    lambda: Activation("silu", share="channel", channels=4, train=LEARNED),
    lambda: tg.Linear(4, 4),
    lambda: tg.Linear(4, 4, tier="general"),
    lambda: tg.LSTM(4, 4, train=LEARNED),
], ids=["activation", "linear", "general", "lstm"])  # fmt: skip
def test_sharpness_is_positive_wherever_the_optimiser_goes(make, rho):
    model = make()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "rho" in name:
                p.fill_(rho)
    if isinstance(model, tg.LSTM):
        taus = [gate.tau for gate in model.learned_gates().values()]
    else:
        taus = [getattr(model, "gate", model).values()[0]]
    assert all((tau > 0).all() and tau.isfinite().all() for tau in taus)
    y = model(torch.randn(3, 4))
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", ["silu", "sigmoid", "tanh", "gelu", "mish", "relu", "hardtanh"])
def test_a_learned_activation_starts_bitwise_at_the_frozen_one(key, dtype):
    learned = () if tg.TAXONOMY[key].hard else ("tau",)
    act = Activation(key, share="channel", channels=5, train=(*learned, "theta")).to(dtype)
    x = (3 * torch.randn(64, 5, 7)).to(dtype)
    with tg.kernels.use("reference"):
        want = Activation(key).to(dtype)(x)
        assert torch.equal(act(x), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [
    lambda train: tg.Linear(6, 4, train=train),
    lambda train: tg.Linear(6, 4, tier="S", train=train),
    lambda train: tg.Linear(6, 4, tier="general", train=train),
    lambda train: tg.Conv1d(6, 4, 3, train=train),
], ids=["W", "S", "general", "conv"])  # fmt: skip
def test_a_layer_with_learned_gates_starts_bitwise_at_the_one_with_frozen_gates(make, dtype):
    learned, frozen = make(LEARNED).to(dtype), make(()).to(dtype)
    frozen.load_state_dict(learned.state_dict(), strict=False)
    x = torch.randn(8, 6).to(dtype)
    x = x.unsqueeze(-1).repeat(1, 1, 5) if isinstance(learned, tg.Conv1d) else x
    with tg.kernels.use("reference"):
        assert torch.equal(learned(x), frozen(x))
