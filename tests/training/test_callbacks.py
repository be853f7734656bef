"""Gates watched while they train: in a loop of one's own, under the Trainer, Lightning, accelerate."""

import copy
import json
import math
import pickle
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.training import (
    GateWarning,
    GateWatch,
    WatchConfig,
    lightning_callback,
    observing,
    param_groups,
    trainer_callback,
)
from threshold_gating.training.health import Rule

FEW = Rule(values=256)  # small networks and few steps: planted channels are all flat


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def network(init="relu", train=("theta",)):
    return nn.Sequential(
        nn.Linear(8, 16),
        tg.Activation(init, share="channel", channels=16, train=train),
        nn.Dropout(0.1),
        nn.Linear(16, 4),
    )


def batch(size=128):
    x = torch.randn(size, 8)
    return x, x[:, :4].sin()


def trained(model, steps, optimizer=None, data=batch, accumulate=1):
    optimizer = optimizer or optimizer_of(model)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            x, y = data()
            out = model(x)
            F.mse_loss(out if isinstance(out, torch.Tensor) else out[0], y).backward()
        optimizer.step()
    return model


def optimizer_of(model, lr=1e-2):
    return torch.optim.AdamW(param_groups(model, lr, weight_decay=0.01))


def watched(model, steps, config, **kwargs):
    optimizer = optimizer_of(model)
    with GateWatch(model, optimizer, config) as watch:
        trained(model, steps, optimizer, **kwargs)
    return watch


def rows(folder):
    return [json.loads(line) for line in (folder / "gates.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("init", "train", "shift", "what"),
    [
        ("relu", ("theta",), -100.0, "dead"),
        ("silu", ("tau", "theta"), -30.0, "dead"),
        ("gelu", ("tau",), -30.0, "dead"),
        ("sigmoid", ("tau", "theta"), 30.0, "saturated"),
        ("tanh", ("tau",), -30.0, "saturated"),
        ("hardtanh", ("theta",), 30.0, "saturated"),
    ],
)
def test_a_planted_channel_is_found_within_two_observations(init, train, shift, what):
    """2 * every steps, where an observation has at least 128 values of a channel."""
    model = network(init, train)
    with torch.no_grad():
        model[0].bias[5] += shift
    with pytest.warns(GateWarning, match=rf"step 20: 1: channel 5 \(axis 1\) is {what}"):
        watch = watched(model, 25, WatchConfig(rule=FEW, every=10))
    assert [(s.step, s.site, s.channel, s.what) for s in watch.found] == [(20, "1", 5, what)]
    assert watch.found[0].values == 256


@pytest.mark.parametrize("init", ["relu", "sigmoid", "hardtanh"])
def test_a_healthy_run_of_200_steps_is_silent(init):
    # what is expected of x[:, :4].sin() from 16 channels needs every one of them; warnings are errors
    watch = watched(network(init), 200, WatchConfig(every=10), data=lambda: batch(64))
    assert watch.step == 200
    assert not watch.found


def test_a_channel_that_dies_on_the_way_is_found_and_one_that_recovers_is_told_of_again():
    model = network()
    optimizer = torch.optim.SGD(param_groups(model, 1e-3))
    found = []
    with GateWatch(model, optimizer, WatchConfig(rule=FEW, every=5)) as watch:
        for shift in (0.0, -50.0, 50.0, -50.0):
            with torch.no_grad():
                model[0].bias[3] += shift
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                trained(model, 20, optimizer)
            found.append(len(said))
    assert found == [0, 1, 0, 1]
    assert [s.channel for s in watch.found] == [3, 3]


class Everywhere(nn.Module):
    """A gate of every kind: an activation for a whole layer, tiers, an LSTM, a call of torch."""

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(8, 6), tg.Activation("relu", train=("s",))
        self.wide = tg.Linear(6, 6, init="relu")
        self.synaptic = tg.Linear(6, 6, tier="S", init="hardtanh")
        self.lstm = tg.LSTM(6, 5, train=("tau", "theta"), batch_first=True)
        self.conv = nn.Conv1d(5, 4, 1)
        self.out = nn.Linear(4, 4)

    def forward(self, x):
        x = self.act(self.first(x)) - 1
        x = self.synaptic(self.wide(x) + self.bias_of_synaptic)
        x, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.out(x)[:, -1]

    bias_of_synaptic = torch.tensor([0.0, 0.0, 50.0, 0.0, 0.0, 0.0])


def test_every_kind_of_gate_is_seen_and_named():
    model = Everywhere()
    with torch.no_grad():
        model.first.bias[1] = -100.0  # the activation: channel 1 is dead
        model.lstm.bias_ih_l0[5 + 2] = 80.0  # f of unit 2
        model.conv.bias[3] = -100.0  # the call
    converted = tg.convert(model, inputs=batch()[0])
    with pytest.warns(GateWarning):
        watch = watched(converted, 4, WatchConfig(rule=FEW, every=1))
    found = {(s.site, s.channel, s.what) for s in watch.found}
    wanted = {
        ("act", 1, "dead"),
        ("synaptic", 2, "dead"),
        ("lstm.f_l0", 2, "saturated"),
        (":relu#0", 3, "dead"),
    }
    assert wanted <= found
    assert {site for site, _, _ in found} <= {site for site, _, _ in wanted}


class Calls(nn.Module):
    """Activations as calls, and a module that is used twice, with channels last."""

    def __init__(self):
        super().__init__()
        self.inner, self.act, self.out = nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)

    def forward(self, x):
        x = self.act(self.inner(x).unsqueeze(1).expand(-1, 3, -1))
        x = self.act(x - 0.1)
        return self.out(F.silu(x))[:, 0]


def test_calls_that_learn_are_written_and_judged_like_modules(tmp_path):
    plain = Calls()
    with torch.no_grad():
        plain.inner.bias[2] = -100.0
    x = batch()[0]
    with pytest.warns(UserWarning, match="act, act#1: only theta is learned"):
        model = tg.convert(plain, train=("tau", "theta"), share="channel", inputs=x)
    with pytest.warns(GateWarning):
        watch = watched(model, 4, WatchConfig(rule=FEW, every=2, out=tmp_path, figures=False))
    assert {(s.site, s.channel, s.what) for s in watch.found} >= {
        ("act", 2, "dead"),
        ("act#1", 2, "dead"),
    }
    scalars = rows(tmp_path)[-2]["scalars"]
    for name in ("act/theta/max", "act#1/theta/max", ":silu#0/tau/mean", ":silu#0/flat"):
        assert f"gates/{name}" in scalars
    before = model.tg_silu_0_tau0.clone()
    tg.training.anneal_(model, 2.0)
    assert torch.equal(model.tg_silu_0_tau0, 2 * before)
    sharp = tg.training.gate_scalars(model)[":silu#0/tau/mean"]
    assert sharp == pytest.approx(2 * scalars["gates/:silu#0/tau/mean"])


class Sequences(nn.Module):
    """Attention and a recurrent layer of torch, which learn by conversion."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        h, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        y = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])
        return self.out(F.silu(y[:, 0]))[:, 0]


def test_temperatures_and_recurrent_calls_are_written_and_said_not_to_be_judged(tmp_path):
    x = batch()[0]
    with pytest.warns(UserWarning, match="attention#0: only tau is learned"):
        model = tg.convert(Sequences(), train=("tau", "theta"), inputs=x)
    names = [s.name for s in tg.training.telemetry.learned_sites(model)]
    assert len(names) == len(set(names))
    with pytest.warns(GateWarning) as said:
        watched(model, 4, WatchConfig(rule=FEW, every=2, out=tmp_path, figures=0))
    left = "not looked at for stuck channels: "
    assert {str(w.message) for w in said} == {
        f"{left}lstm:lstm#0: lstm is not one element-wise function.",
        f"{left}:scaled_dot_product_attention#0: scaled_dot_product_attention is not one "
        "element-wise function.",
    }
    written = next(row["scalars"] for row in rows(tmp_path) if row["step"] == 4)
    moved = {name: tau for name, tau in written.items() if name.endswith("/tau/mean")}
    assert any("scaled_dot_product_attention" in name for name in moved)
    assert any(".f_" in name for name in moved)
    assert any("silu" in name for name in moved)
    gates = tg.training.gate_parameters(model)
    assert gates
    assert all(p.grad is not None for p in gates.values())


def test_watching_changes_no_bit_of_a_run(tmp_path):
    plain, seen = network("silu", ("tau", "theta")), network("silu", ("tau", "theta"))
    seen.load_state_dict(plain.state_dict())
    torch.manual_seed(1)
    trained(plain, 12)
    torch.manual_seed(1)
    watched(seen, 12, WatchConfig(rule=FEW, every=3, out=tmp_path))
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), seen.parameters(), strict=True)
    )
    assert not any(m._forward_pre_hooks for m in seen.modules())


def test_an_armed_network_is_copied_and_pickled_without_its_hooks():
    model = tg.convert(Everywhere(), inputs=batch()[0])
    optimizer = optimizer_of(model)
    with GateWatch(model, optimizer, WatchConfig(rule=FEW, every=1)) as watch:
        assert watch._observation is not None
        x = batch()[0]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(x)
            assert not watch._observation.seen
        torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
        assert watch._observation.seen


def test_accumulated_batches_are_one_step_and_skipped_steps_are_none():
    model = network()
    optimizer = torch.optim.SGD(param_groups(model, 1e-3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with GateWatch(model, optimizer, WatchConfig(rule=FEW, every=2)) as watch:
        trained(model, 3, optimizer, accumulate=4)
        assert watch.step == 3
        for weight in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(weight * model(batch()[0]).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert watch.step == 5


def test_lines_histograms_figures_and_families_are_written_and_a_run_goes_on(tmp_path):
    model = nn.Sequential(
        network("silu", ("tau", "theta", "s")), tg.Activation("relu", train=("c",))
    )
    model[1].requires_grad_(False)  # it does not move
    config = WatchConfig(rule=FEW, every=5, out=tmp_path)
    watched(model, 10, config)
    with GateWatch(model, optimizer_of(model), config, start=10) as again:
        trained(model, 5, again_optimizer := optimizer_of(model))
    assert again.step == 10  # not the optimiser that was watched
    with GateWatch(model, again_optimizer, config, start=10) as again:
        trained(model, 5, again_optimizer)
    written = {}
    for row in rows(tmp_path):
        written.setdefault(row["step"], {}).update(row)
    assert [step for step, row in written.items() if "scalars" in row] == [5, 10, 15]
    scalars, drawn = written[15]["scalars"], written[15]["histograms"]["gates/0.1/tau"]
    _, theta, _, _ = model[0][1].values()
    assert scalars["gates/0.1/theta/max"] == pytest.approx(theta[0].max().item())
    assert sum(drawn["counts"]) == 16
    assert drawn["low"] == pytest.approx(scalars["gates/0.1/tau/min"])
    assert {"gates/0.1/flat", "gates/1/flat"} <= set(scalars)
    figures = sorted(
        p.relative_to(tmp_path / "figures").as_posix() for p in tmp_path.rglob("*.png")
    )
    assert figures == ["0.1/00000005.png", "0.1/00000010.png", "0.1/00000015.png"]
    families = json.loads((tmp_path / "families.json").read_text())
    assert families["0.1"]["start"] == "multiplicative"
    assert sum(families["0.1"]["now"].values()) == 16


def test_gates_that_are_decayed_or_forgotten_are_warned_of_at_the_start():
    model = network()
    with pytest.warns(UserWarning, match=r"gate parameters are decayed: 1\.dtheta"):
        GateWatch(model, torch.optim.AdamW(model.parameters())).close()
    with pytest.warns(UserWarning, match=r"gate parameters are in no group: 1\.dtheta"):
        GateWatch(model, torch.optim.SGD(model[0].parameters(), 0.1)).close()


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(ValueError, match="Sequential has no gate that learns"):
        GateWatch(nn.Sequential(nn.ReLU()), None)
    with pytest.raises(TypeError, match=r"optimizer is one of torch\.optim"):
        GateWatch(network(), object())
    with pytest.raises(ValueError, match="there is no optimizer"):
        GateWatch(network(), [])
    with pytest.raises(ValueError, match="every is a number of steps"):
        WatchConfig(every=0)
    with pytest.raises(ValueError, match='"tensorboard" together with out'):
        WatchConfig(writer="tensorboard")
    with pytest.raises(ValueError, match="share above 0 up to 1"):
        Rule(share=1.5)


@pytest.mark.parametrize(
    ("make", "absent", "extra"),
    [
        (trainer_callback, ("transformers",), "text"),
        (lightning_callback, ("lightning", "lightning.pytorch", "pytorch_lightning"), "lightning"),
    ],
)
def test_a_callback_without_its_package_names_the_extra(make, absent, extra, monkeypatch):
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)  # an import is an error then
    with pytest.raises(ImportError, match=rf"pip install 'threshold-gating\[{extra}\]'"):
        make(every=10)


def test_a_network_that_does_not_run_between_steps_is_said():
    model = network()
    optimizer = optimizer_of(model)
    with (
        pytest.warns(GateWarning, match="no gate was seen in an observed step"),
        GateWatch(model, optimizer, WatchConfig(rule=FEW, every=1)),
    ):
        optimizer.step()


def test_a_run_goes_on_where_looking_fails_and_the_site_is_named(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(observing, "look", broken)
    with pytest.warns(
        GateWarning, match="not looked at for stuck channels: 1: .* RuntimeError: no memory"
    ):
        watch = watched(network(), 3, WatchConfig(rule=FEW, every=2))
    assert watch.step == 3


def test_a_run_that_fails_is_left_without_a_report(tmp_path):
    model = network()
    with (
        pytest.raises(KeyError),
        GateWatch(model, optimizer_of(model), WatchConfig(rule=FEW, every=1, out=tmp_path)),
    ):
        raise KeyError("the run's own")
    assert not (tmp_path / "families.json").exists()
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_compiled_networks_are_seen_too():
    torch._dynamo.reset()
    model, ran = network(), []
    with torch.no_grad():
        model[0].bias[5] = -100.0

    def backend(graph, inputs):
        return lambda *args: ran.append(1) or graph.forward(*args)

    optimizer, compiled = optimizer_of(model), torch.compile(model, backend=backend)
    trained(compiled, 2, optimizer)
    assert len(ran) == 2
    with (
        pytest.warns(GateWarning, match=r"step 4: 1: channel 5 \(axis 1\) is dead"),
        GateWatch(compiled, optimizer, WatchConfig(rule=FEW, every=2)),
    ):
        trained(compiled, 5, optimizer)
    assert len(ran) == 5  # steps 2 and 4 were observed, without the graph


def test_tensorboard_is_written_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard", reason="not among the extras")
    watched(network(), 4, WatchConfig(rule=FEW, every=2, out=tmp_path, writer="tensorboard"))
    assert list(tmp_path.glob("events.*"))


def test_accelerate_trains_learned_gates_and_is_watched(tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = network("silu", ("tau", "theta"))
    start = copy.deepcopy(model.state_dict())
    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of another test leaves one
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    try:
        data = torch.utils.data.DataLoader(list(zip(*batch(64), strict=True)), batch_size=16)
        model, optimizer, data = accelerator.prepare(model, optimizer_of(model), data)
        with GateWatch(model, optimizer, WatchConfig(rule=FEW, every=2, out=tmp_path)) as watch:
            for _ in range(3):
                for x, y in data:
                    with accelerator.accumulate(model):
                        loss = F.mse_loss(model(x), y)
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
        assert watch.step == 6  # 12 batches
        own = accelerator.unwrap_model(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert own[1].rho.dtype == torch.float32
    assert not torch.equal(own[1].rho, start["1.rho"])
    assert [row["step"] for row in rows(tmp_path) if "scalars" in row] == [2, 4, 6]


class Regression(nn.Module):
    """As the Trainer wants a model: a loss first."""

    def __init__(self):
        super().__init__()
        self.net = network("silu", ("tau", "theta"))

    def forward(self, x, labels):
        y = self.net(x)
        return {"loss": F.mse_loss(y, labels), "logits": y}


def arguments(folder, **kwargs):
    from transformers import TrainingArguments

    return TrainingArguments(
        folder, per_device_train_batch_size=16, report_to=[], disable_tqdm=True, use_cpu=True,
        logging_strategy="no", dataloader_pin_memory=False, **kwargs,
    )  # fmt: skip


def test_the_trainer_is_watched_warns_of_decay_and_resumes(tmp_path):
    from transformers import Trainer

    data = [{"x": x, "labels": y} for x, y in zip(*batch(128), strict=True)]
    out = tmp_path / "watch"

    def trainer(steps, **kwargs):
        torch.manual_seed(0)
        callback = trainer_callback(rule=FEW, every=2, out=out)
        args = arguments(tmp_path, max_steps=steps, gradient_accumulation_steps=2, **kwargs)
        model = Regression()
        optimizers = (optimizer_of(model), None)
        return Trainer(
            model, args, train_dataset=data, callbacks=[callback], optimizers=optimizers
        ), callback

    first, callback = trainer(4, save_steps=4)
    first.train()
    assert callback.watch.step == 4
    second, callback = trainer(8, save_strategy="no")
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert callback.watch.step == 8
    assert [row["step"] for row in rows(out) if "scalars" in row] == [2, 4, 6, 8]

    own = Trainer(
        Regression(), arguments(tmp_path, max_steps=1, save_strategy="no", weight_decay=0.1),
        train_dataset=data, callbacks=[trainer_callback()],
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"gate parameters are decayed: net\.1\.rho"):
        own.train()


@pytest.mark.slow
def test_lightning_is_watched(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="the extra `lightning`")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network("relu", ("theta",))

        def training_step(self, pair, index):
            x, y = pair
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self):
            return optimizer_of(self)

    model = Module()
    with torch.no_grad():
        model.net[0].bias[5] = -100.0
    callback = lightning_callback(rule=FEW, every=2, out=tmp_path / "watch")
    data = torch.utils.data.DataLoader(list(zip(*batch(2048), strict=True)), batch_size=128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        warnings.simplefilter("always", GateWarning)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, callbacks=[callback],
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        with pytest.warns(GateWarning, match=r"step 4: net\.1: channel 5 \(axis 1\) is dead"):
            trainer.fit(model, data)
    assert callback.watch.step == trainer.global_step == 8
    assert [row["step"] for row in rows(tmp_path / "watch") if "scalars" in row] == [2, 4, 6, 8]


@pytest.mark.parametrize("where", ["gates", "input"])
def test_nan_is_told_of_once_with_the_site_and_the_step(where):
    net = nn.Sequential(nn.Linear(4, 3), tg.Activation("relu", train=("theta",)))
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    x = torch.ones(8, 4)
    if where == "gates":
        net[1].dtheta.data.fill_(torch.nan)
    else:
        x[0, 0] = torch.nan
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch = GateWatch(net, optimizer, WatchConfig(rule=FEW, every=2))
        for _ in range(6):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        watch.close()
    said = [str(w.message) for w in told if "NaN" in str(w.message)]
    why = "its gates are" if where == "gates" else "values of its input"
    assert len(said) == 1
    assert said[0].startswith("step 2: 1: 24 values of its output are NaN: ")
    assert why in said[0]
