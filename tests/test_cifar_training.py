"""The loop that trains every contender on CIFAR-10, on noise."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from experiments import cifar_training
from experiments.cifar_networks import ARMS, Network
from experiments.cifar_training import Recipe, augmented, schedule, train
from experiments.data import Labelled

RECIPE = Recipe(steps=6, batch=8, evaluations=3)


def noise(count: int = 24) -> Labelled:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator).byte()
    labels = torch.arange(count) % 10
    return Labelled((images, labels), (images[:10], labels[:10]), "")


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.SiLU(), nn.Linear(16, 10))


def test_it_learns_by_heart():
    colours = torch.arange(10).mul(25).byte().view(10, 1, 1, 1).expand(10, 3, 32, 32).clone()
    data = Labelled((colours, torch.arange(10) // 5), (colours, torch.arange(10) // 5), "")
    curve = train(network(), data, Recipe(60, batch=10, rate=0.01), seed=0, device="cpu")
    assert curve.accuracy[-1] == 100
    assert curve.steps[-1] == 60
    assert not curve.recorded


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    whole, parts, kept = network(), network(), tmp_path / "state.pt"
    expected = train(whole, noise(), RECIPE, seed=3, device="cpu")

    real, calls = cifar_training.judged, []

    def stopping(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(cifar_training, "judged", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(parts, noise(), RECIPE, seed=3, device="cpu", kept=kept)
    monkeypatch.undo()
    curve = train(network(), noise(), RECIPE, seed=3, device="cpu", kept=kept)
    assert curve.started_at == 4
    assert (curve.accuracy, curve.loss) == (expected.accuracy, expected.loss)
    assert not kept.exists()


def test_two_seeds_see_other_batches():
    first, second = (
        train(network(), noise(), RECIPE, seed=seed, device="cpu").loss for seed in (0, 1)
    )
    assert first != second


def test_the_rate_rises_for_a_tenth_and_falls_to_nothing():
    rates = [schedule(t, 100) for t in range(100)]
    assert rates[9] == 1 == max(rates)
    assert rates[99] == pytest.approx(1 / 90)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_images_are_shifted_and_mirrored_as_drawn():
    x = torch.arange(2 * 3 * 32 * 32.0).reshape(2, 3, 32, 32) + 1
    same = augmented(x, torch.tensor([[4, 4, 0], [4, 4, 0]]))
    assert torch.equal(same, x)
    moved = augmented(x, torch.tensor([[0, 4, 0], [4, 4, 1]]))
    assert torch.equal(moved[0, :, 4:], x[0, :, :28])
    assert not moved[0, :, :4].any()
    assert torch.equal(moved[1], x[1].flip(-1))


def test_a_loss_that_is_no_number_says_what_to_try():
    with pytest.raises(RuntimeError, match="try a lower rate"):
        train(network(), noise(), RECIPE._replace(rate=1e30), seed=0, device="cpu")


PROGRAM = """
from tests.test_cifar_training import RECIPE, network, noise, train
curve = train(network(), noise(), RECIPE, seed=3, device="cpu")
print("loss", curve.loss)
"""


@pytest.mark.slow
def test_two_processes_of_torchrun_train_as_one_does(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [*command, "--standalone", str(program)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if "loss" in line]
    expected = train(network(), noise(), RECIPE, seed=3, device="cpu").loss
    assert losses == pytest.approx([expected] * 2, rel=1e-4)  # sums in another order, six steps


def test_accuracy_is_taken_with_gates_and_not_with_torchs_silu():
    """The shortcuts of tier W have a frozen SiLU, which is torch's own op in training."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            called.add(str(op))
            return op(*args, **(kwargs or {}))

    model, test = Network(ARMS["tier W"], 8, 4), noise(10).test
    for run, native in (
        (lambda: model(cifar_training.prepared(test[0])), True),
        (lambda: cifar_training.judged(model, test), False),
    ):
        called: set[str] = set()
        with torch.no_grad(), Seen():
            run()
        assert ("aten.silu.default" in called) is native
        assert "aten.sigmoid.default" in called or not native
