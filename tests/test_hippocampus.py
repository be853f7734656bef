"""Segmentation of volumes: how they are read, put on a grid, learned and told of."""

import gzip
import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import threshold_gating as tg
from experiments import hippocampus, volumes
from experiments.data import Volumes, nifti
from experiments.data import hippocampus as read
from experiments.hippocampus import ARMS, C_2, NAME, SEEDS, SMOKE, Plan, Size, network
from experiments.record import Row


def header(array, code, order="<", scale=(0.0, 0.0)):
    """A NIfTI-1 file, field by field as its standard has them."""
    raw = bytearray(352)
    struct.pack_into(f"{order}i", raw, 0, 348)
    sizes = (array.ndim, *array.shape, *[1] * (7 - array.ndim))
    struct.pack_into(f"{order}8h", raw, 40, *sizes)
    struct.pack_into(f"{order}2h", raw, 70, code, 8 * array.itemsize)
    struct.pack_into(f"{order}3f", raw, 108, 352.0, *scale)
    raw[344:348] = b"n+1\0"
    return bytes(raw) + array.astype(array.dtype.newbyteorder(order)).tobytes(order="F")


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "code"), [("u1", 2), ("i2", 4), ("f4", 16), ("f8", 64)])
def test_nifti_is_read_in_both_orders_of_bytes(order, kind, code):
    array = np.arange(24).reshape(2, 3, 4).astype(kind)
    assert np.array_equal(nifti(header(array, code, order)), array)
    assert np.array_equal(nifti(gzip.compress(header(array, code, order))), array)


def test_nifti_has_a_scale_where_its_slope_is_not_0():
    array = np.arange(6, dtype="i2").reshape(1, 2, 3)
    assert np.array_equal(nifti(header(array, 4, scale=(0.5, 3.0))), array * 0.5 + 3)
    assert np.array_equal(nifti(header(array, 4, scale=(0.0, 3.0))), array)


def test_nifti_says_what_it_does_not_read():
    array = np.zeros((1, 1, 1), "u1")
    with pytest.raises(ValueError, match=r"numbers of kind 128; \[2, 4"):
        nifti(header(array, 128), "colours")
    for wrong in (b"", b"\0" * 400, header(array, 2)[:344] + b"ni1\0" + b"\0" * 5):
        with pytest.raises(ValueError, match=r"x\.nii is no NIfTI-1 file"):
            nifti(wrong, "x.nii")


def test_volumes_are_read_from_the_archive_and_from_the_folder_alike(tmp_path):
    label = np.zeros((3, 2, 2), "u1")
    label[0] = 2
    files = {"images": header(np.ones((3, 2, 2), "f4"), 16), "labels": header(label, 2)}
    with zipfile.ZipFile(tmp_path / "hippocampus-130.zip", "w") as packed:
        for part, raw in files.items():
            packed.writestr(f"{part}/hippocampus_001.nii.gz", gzip.compress(raw))
    folder = tmp_path / "unpacked"
    for part, raw in files.items():
        place = folder / "Task04_Hippocampus" / f"{part}Tr"
        place.mkdir(parents=True)
        (place / "hippocampus_001.nii.gz").write_bytes(gzip.compress(raw))
    one, other = read(tmp_path), read(folder)
    assert one.sha256 == other.sha256
    assert one.names == other.names == ["hippocampus_001.nii.gz"]
    assert np.array_equal(one.labels[0], label)
    with pytest.raises(FileNotFoundError, match=r"medicaldecathlon\.com"):
        read(tmp_path / "nowhere")


def test_labels_that_do_not_fit_are_refused(tmp_path):
    for label in (np.zeros((3, 2, 1), "u1"), np.full((3, 2, 2), 3, "u1")):
        with zipfile.ZipFile(tmp_path / "hippocampus-130.zip", "w") as packed:
            packed.writestr("images/a.nii", header(np.ones((3, 2, 2), "f4"), 16))
            packed.writestr("labels/a.nii", header(label, 2))
        with pytest.raises(ValueError, match=r"a\.nii: labels 0 to 2"):
            read(tmp_path)


def test_a_volume_is_centred_and_nothing_of_it_lost_where_it_fits():
    volume = np.arange(1, 25).reshape(2, 3, 4)
    large = volumes.centred(volume, (4, 3, 2))
    assert large.shape == (4, 3, 2)
    assert np.array_equal(large[1:3], volume[:, :, 1:3])
    assert not large[0].any()
    assert not large[3].any()


def test_crops_begin_at_their_corners():
    x = torch.arange(2 * 4 * 4 * 4).reshape(2, 4, 4, 4)
    found = volumes.cropped(x, torch.tensor([[0, 1, 2], [1, 0, 0]]), (3, 2, 2))
    assert torch.equal(found[0], x[0, :3, 1:3, 2:])
    assert torch.equal(found[1], x[1, 1:, :2, :2])


def test_the_test_volumes_are_never_trained_on():
    made = Volumes([np.full((2, 2, 2), n, "f4") for n in range(10)],
                   [np.full((2, 2, 2), n % 3, "u1") for n in range(10)], [], "")  # fmt: skip
    split = volumes.split(made, (2, 2, 2), 0)
    assert [len(part[0]) for part in split[:2]] == [8, 2]
    assert split.test[1][:, 0, 0, 0].tolist() == [4 % 3, 9 % 3]


def test_tier_w_starts_at_the_function_of_its_record_and_every_branch_learns():
    size = SMOKE
    ours, plain = network("W", 3, size), network("silu", 3, size)
    for module in plain.modules():
        if isinstance(module, volumes.Unit):
            module.act = Shifted()
    x = torch.randn(2, 1, *size.grid, generator=torch.Generator().manual_seed(0))
    with tg.kernels.use("reference"):
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-5)
        ours(x).square().sum().backward()
    layers = [m for m in ours.modules() if isinstance(m, tg.Conv3d)]
    assert len(layers) == 13
    for layer in layers:
        assert set(layer.gate.learned) == {"tau", "theta", "c"}
        assert layer.weight.grad.abs().flatten(2).amax((0, 2)).gt(0).all()
    groups = tg.training.param_groups(ours, 1e-3, gate_lr_scale=4, weight_decay=0.1)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups][-1] == ("gates", 4e-3, 0.0)


class Shifted(nn.Module):
    """SiLU with the constant of the paper's recipe below its threshold."""

    def forward(self, x):
        gate = x.sigmoid()
        return x * gate + C_2 * (1 - gate)


def test_the_wider_baseline_has_the_parameters_of_tier_w_within_a_hundredth():
    counts = [sum(p.numel() for p in network(arm, 0, Size()).parameters()) for arm in ("W", "wide")]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def test_dice_is_what_its_definition_says():
    wanted = torch.zeros(2, 1, 1, 4, dtype=torch.long)
    wanted[0, 0, 0] = torch.tensor([1, 1, 2, 0])  # found: 1 0 2 2; the second volume is empty
    seen = torch.tensor([[1, 0, 2, 2], [0, 0, 0, 0]])

    class Answers(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot(seen, 3).movedim(-1, 1).view(2, 3, 1, 1, 4).float()

    size = Size(grid=(1, 1, 4), margin=0)
    found = hippocampus.judged(Answers(), (torch.zeros(2, 1, 1, 4), wanted), size)
    assert found == pytest.approx([100 * (2 / 3 + 1) / 2, 100 * (2 / 3 + 1) / 2])


def test_the_loss_falls_with_the_right_answer():
    labels = torch.randint(0, 3, (2, 4, 4, 4), generator=torch.Generator().manual_seed(0))
    right = 20.0 * nn.functional.one_hot(labels, 3).movedim(-1, 1)
    assert hippocampus.loss_of(right, labels) < 1e-3
    assert hippocampus.loss_of(-right, labels) > 1


def test_steps_read_what_the_seed_says_and_the_rate_rises_and_falls():
    one, same, other = (Plan.of(7, 120, Size(), seed, "cpu") for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.rows, other.rows)
    assert set(one.rows.flatten()[:7].tolist()) == set(range(7))
    assert one.rate[:3].tolist() == [0.5, 1.0, 1.0]
    assert one.rate[-1] < 1e-3


def test_a_stopped_run_goes_on_to_the_same_curve(tmp_path, monkeypatch):
    data = volumes.split(hippocampus.made_up(), SMOKE.grid, SMOKE.margin)
    case = {"arm": "W", "seed": 1, "steps": 4, "rate": 1e-3}
    size = SMOKE._replace(evaluations=2)

    def trained():
        kept = tmp_path / "state.pt"
        return hippocampus.train(network("W", 1, size), data, case, size, "cpu", kept)

    expected, real, calls = trained(), hippocampus.judged, []

    def stopping(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(hippocampus, "judged", stopping)
    with pytest.raises(KeyboardInterrupt):
        trained()
    again = trained()
    assert again["went on from"] == 2
    assert (again["curve"], again["raw"]) == (expected["curve"], expected["raw"])


@pytest.mark.slow
def test_the_smoke_run_ends_with_a_page(capsys):
    hippocampus.main(["--smoke", "--device", "cpu"])
    text = capsys.readouterr().out
    assert "All cases ran" in text
    assert "| SiLU, wider |" in text


def made_up(steps):
    """Rows of runs that reach their level of 80 at `steps[arm]`, in 30 values of 50 steps."""
    rows = []
    for seed in SEEDS:
        for arm in ARMS:
            curve = {str(n): 80.0 if n >= steps[arm] else 40.0 for n in range(50, 1501, 50)}
            figures = {"dice": 80.0 + seed, "anterior": 81.0, "posterior": 79.0, "curve": curve}
            figures |= {"raw": curve, "step ms": 10.0 if arm == "silu" else 20.0}
            figures |= {"parameters": 1000, "side by side": 3}
            case = {"arm": arm, "seed": seed, "rate": 1e-3, "steps": 1500, "part": "main"}
            about = {"device": "a GPU", "date": "2026-11-18"}
            kept = json.dumps(figures, sort_keys=True)  # as rows are: the order of words
            rows.append(Row(case, json.loads(kept), 1.0, False, about))
    return rows


@pytest.mark.parametrize(
    ("ours", "verdict", "factor"),
    [(500, "reproduced", "1.83"), (750, "partly", "1.29"), (900, "not", "1.10"), (1000, "not", "1.00"), (9999, "not", "never")],
)  # fmt: skip
def test_a_verdict_is_the_ratio_of_steps(ours, verdict, factor, tmp_path):
    rows = made_up({"silu": 1000, "W": ours, "wide": 500})
    found = hippocampus.verdicts(rows)[0]
    assert found.verdict == verdict
    assert found.ours.startswith(factor)
    text = hippocampus.page(rows)
    assert "All cases ran" in text
    assert "up to 3 runs of it and whatever else ran on the device" in text
    assert f"| {factor}" in text
    # the weights themselves at the end of the run, not at the last of the words
    level = "80.00 +- 0.00" if ours <= 1500 else "40.00 +- 0.00"
    assert next(line for line in text.splitlines() if line.startswith("| tier W |")).count(level)


def test_the_page_says_what_was_cut_and_the_picture_is_small(tmp_path):
    rows = [row for row in made_up(dict.fromkeys(ARMS, 500)) if row.case["arm"] != "wide"][:3]
    text = hippocampus.page(rows)
    assert "Not run: SiLU (1 of 3 seeds), tier W (2 of 3 seeds), SiLU, wider (3 of 3 seeds)" in text
    hippocampus.draw(rows, tmp_path)
    assert 0 < (tmp_path / f"{NAME}.svg").stat().st_size < 150_000
    assert hippocampus.verdicts([])[0].verdict == "not run"
