"""The experiment on learned gates of a trained network, on noise, and its reading of CIFAR-10."""

import json
import pickle

import numpy as np
import pytest
import torch

from experiments import finetune_cifar
from experiments.data import cifar10


@pytest.mark.slow
def test_every_arm_runs_and_the_table_has_a_line_for_each(capsys):
    finetune_cifar.main(["--smoke"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:11].strip() for line in lines[1:]] == list(finetune_cifar.ARMS)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("arm", ["prelu", "gates"])
def test_the_arms_start_as_the_network_with_relu(arm):
    start, x = finetune_cifar.ResNet(1).eval(), torch.randn(4, 3, 32, 32)
    # sums of a convolution may be taken in another order, values of the activations may not differ
    torch.testing.assert_close(finetune_cifar.ARMS[arm](start)(x), start(x), rtol=1e-6, atol=1e-6)


def test_images_are_shifted_and_mirrored_alike_for_one_seed():
    x = torch.arange(2 * 3 * 32 * 32.0).reshape(2, 3, 32, 32)
    one, other = (finetune_cifar.augmented(x, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)
    inside = set(x.flatten().tolist()) | {0.0}
    assert set(one.flatten().tolist()) <= inside
    assert not torch.equal(one, x)


def test_cifar_is_read_from_both_layouts_alike(tmp_path):
    image = pytest.importorskip("PIL.Image")
    images = np.random.default_rng(0).integers(0, 256, (6, 4, 3, 1024), np.uint8)
    labels = np.arange(24) % 10
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    packed = tmp_path / "cifar-10-batches-py"
    packed.mkdir()
    for k, name in enumerate(names):
        own = {b"data": images[k].reshape(4, -1), b"labels": labels[4 * k : 4 * k + 4].tolist()}
        (packed / name).write_bytes(pickle.dumps(own))
        image.fromarray(images[k].transpose(0, 2, 1)).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps(labels[:20].tolist()))
    (tmp_path / "test_lables.json").write_text(json.dumps(labels[20:].tolist()))
    first = cifar10(tmp_path)
    for file in packed.iterdir():
        file.unlink()
    assert cifar10(tmp_path).sha256 == first.sha256


def test_a_folder_without_images_is_an_error_that_says_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="download=True"):
        cifar10(tmp_path)
