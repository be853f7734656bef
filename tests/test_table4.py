"""Table 4: what is compared, on which weights, and what the page says of rows that are there."""

import gzip
import io
import json
import math
import zipfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import threshold_gating as tg
from experiments import (
    data,
    gelu_gates,
    record,
    table4_conversion,
    table4_imagenet,
    table4_networks,
)
from experiments.evidence.common import classified
from experiments.gelu_gates import WAYS
from experiments.record import Row

pytestmark = pytest.mark.filterwarnings("default")  # timm and torchvision warn about themselves


def figures(delta=0.0, p=1.0, rms=1e-7, **more):
    found = {"before": 90.0, "after": 90.0 + delta, "interval": [delta - 0.1, delta + 0.1], "p": p}
    found |= {"lost": 7, "won": 7 + round(100 * delta), "images": 10_000, "same": 0.99}
    return found | {"logit RMS": rms, "K": 2, "approximate": 7} | more


def row(network, gates, found, weights=None):
    case = {"network": network, "gates": gates}
    case = case if weights is None else {**case, "weights": weights}
    return Row(case, found, 1.0, False, {"device": "CPU (x86_64)", "torch": "2.13"})


ALONE = {"k3-free": [4.15e-4], "k3-recipe": [1e-3, 1.1e-3, 2e-3], "k3-exact": [2.8e-3]}
GELU = [
    row("gelu", way, {"K": 3, "rel RMS": draws[len(draws) // 2], "draws": draws})
    for way, draws in ALONE.items()
]
VIT = [
    row("vit", "k2-paper", figures(-0.5, 1e-4, 1e-1), "new"),
    row("vit", "k2-calibrated", figures(-0.2, 0.03, 5e-2), "new"),
    row("vit", "k3-recipe", figures(0.0, 1.0, 1e-3), "new"),
]
EXACT = [row("resnet20", "default", figures() | {"lost": 0, "won": 0, "same": 1.0})]


def test_accuracy_and_logits_are_compared_image_by_image():
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    before = F.one_hot(torch.tensor([0, 1, 2, 3, 0, 0]), 6).float()
    after = F.one_hot(torch.tensor([1, 2, 2, 3, 4, 0]), 6).float()
    found = table4_conversion.difference(*(classified(x, labels) for x in (before, after)))
    assert (found["lost"], found["won"], found["images"]) == (2, 1, 6)
    assert found["before"] == pytest.approx(100 * 4 / 6)
    assert found["after"] == pytest.approx(100 * 3 / 6)
    assert found["p"] == pytest.approx(1.0)  # two of three lost is what a coin does
    assert found["same"] == 0.5
    expected = np.sqrt(((after - before).numpy() ** 2).mean() / (before.numpy() ** 2).mean())
    assert found["logit RMS"] == pytest.approx(expected)


def test_our_free_tails_reach_the_papers_figure_and_exact_ones_do_not():
    assert gelu_gates.alone("k3-free")["rel RMS"] == pytest.approx(4.15e-4, abs=5e-7)  # "0.04 %"
    assert gelu_gates.alone("k3-exact")["rel RMS"] > 2e-3
    assert gelu_gates.alone("k5")["largest"] < 5.1e-5


def test_the_papers_recipe_stands_at_every_site_and_rows_where_they_are_asked_for():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.ReLU()).eval()
    x = torch.randn(64, 4)
    sites, facts = gelu_gates.chosen("k3-recipe", model, (x,), [x], values=200)
    assert sites["1"].form == "product"
    assert (facts["approximate"], facts["K"]) == (1, 3)
    assert gelu_gates.chosen("k2-paper", model, (x,), [])[0] == {"1": "gelu_paper"}
    assert gelu_gates.chosen("k4", model, (x,), [])[0] == {"1": 4}


def smoke(*words):
    return table4_conversion.main(["--smoke", "--device", "cpu", *words])


def test_networks_trained_for_a_moment_are_converted_whole():
    found = smoke("--only", "network=gru,vit", "gates=default,k2-paper,k5")
    by = {(r.case["network"], r.case["gates"]): r.figures for r in found}
    assert by["gru", "default"]["logit RMS"] < 1e-6
    assert by["gru", "default"]["same"] == 1
    assert by["vit", "k5"]["logit RMS"] < by["vit", "k2-paper"]["logit RMS"] / 10
    assert by["vit", "k5"]["approximate"] == 3
    assert len(by["vit", "k5"]["trained"]["sha256"]) == 64
    assert all(r.smoke for r in found)


@pytest.mark.slow
def test_the_whole_smoke_run_makes_a_page(tmp_path):
    found = smoke("--only", "network=lstm,gru,vit")
    text = table4_conversion.page(found)
    assert all(way.said in text for way in WAYS.values())


def test_weights_are_trained_once_and_must_be_what_was_kept(tmp_path):
    given = table4_networks.read("lstm", None, True)
    options = {"device": "cpu", "smoke": True}
    first = table4_networks.trained("lstm", given, tmp_path, **options)
    state = (tmp_path / "weights.pt").read_bytes()
    again = table4_networks.trained("lstm", given, tmp_path, **options)
    assert again.about == first.about
    assert table4_networks.digest(tmp_path) == first.about["sha256"][:12]
    x = table4_networks.prepared("lstm", given.test[0])
    assert torch.equal(first.model(x), again.model(x))
    with pytest.raises(SystemExit, match="trained on other data"):
        table4_networks.trained("lstm", given._replace(sha256="x"), tmp_path, **options)
    (tmp_path / "weights.pt").write_bytes(state + b" ")
    with pytest.raises(SystemExit, match=r"is not what training\.json describes"):
        table4_networks.trained("lstm", given, tmp_path, **options)


def test_mnist_is_read_from_files_packed_or_not_and_from_sheets(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (60_000, 784), np.uint8)
    labels = (np.arange(60_000) % 10).astype(np.uint8)
    raw, sheets = tmp_path / "a" / "MNIST" / "raw", tmp_path / "b" / "mnist"
    for folder in (raw, sheets):
        folder.mkdir(parents=True)
        for part, count in (("train", 60_000), ("t10k", 500)):
            sizes = [np.array(n, ">i4").tobytes() for n in (count, 28, 28)]
            held = b"\0\0\x08\x03" + b"".join(sizes) + pixels[:count].tobytes()
            if folder == raw or part == "t10k":
                (folder / f"{part}-images-idx3-ubyte").write_bytes(held)
            named = folder / f"{part}-labels-idx1-ubyte.gz"
            named.write_bytes(
                gzip.compress(b"\0\0\x08\x01" + sizes[0] + labels[:count].tobytes(), 1)
            )
    with zipfile.ZipFile(sheets / data._SHEETS, "w") as archive:
        for n in range(21):  # the last sheet is of test images
            file = io.BytesIO()
            image.fromarray(pixels[3000 * (n % 20) :][:3000]).save(file, "PNG", compress_level=0)
            archive.writestr(f"mnist_batch_{n}.png", file.getvalue())
    one, other = data.mnist(tmp_path / "a"), data.mnist(tmp_path / "b")
    assert one.sha256 == other.sha256
    assert torch.equal(one.train[0], other.train[0])
    assert one.train[0].flatten(1).numpy().tobytes() == pixels.tobytes()
    assert one.test[1].tolist() == labels[:500].tolist()
    with pytest.raises(FileNotFoundError, match="holds no MNIST"):
        data.mnist(tmp_path)


def test_recurrent_networks_learn():
    """Rows of one digit are dark, of another bright."""
    images = torch.zeros(64, 28, 28, dtype=torch.uint8)
    images[::2] = 200
    labels = (torch.arange(64) % 2 == 0).long()
    given = data.Labelled((images, labels), (images, labels), "")
    torch.manual_seed(0)
    model = table4_networks.network("gru", smoke=True)
    table4_networks._train_rows(model, given, 30, 0, "cpu")
    assert (model(table4_networks.prepared("gru", images)).argmax(1) == labels).all()


def test_the_page_says_what_was_not_run_and_leaves_rows_of_other_weights_out():
    old = row("vit", "k5", figures(-9.0), "old")
    text = table4_conversion.page([old, *GELU, *EXACT, *VIT])
    assert "-9.00" not in text
    assert "Not run: k3-free, k3-exact, k3, k4, k5, k8." in text
    assert "Not run yet: gru, lstm, mobilenet-v2, resnet32, squeezenet1.1." in text
    assert "reaches 0.0415 % relative RMS" in text
    assert "ends at 0.11 % (0.1 to 0.2 over 3 draws)" in text
    assert "-0.50 (-0.60 to -0.40)" in text
    assert "--imagenet FOLDER" in text


def test_verdicts_follow_from_the_rows():
    found = {v.claim: v for v in table4_conversion.verdicts([*GELU, *EXACT, *VIT])}
    kinds = [v.verdict for v in found.values()]
    assert kinds == [*["reproduced"] * 4, "partly", "no data here"]
    assert {v.verdict for v in table4_conversion.verdicts([])} == {"not run", "no data here"}
    worse = [
        row("resnet20", "default", figures(-0.01)),
        row("vit", "k2-paper", figures(-0.1, 0.4, 1e-1)),
        row("vit", "k2-calibrated", figures(-0.3, 0.4, 2e-1)),
        row("vit", "k3-recipe", figures(-0.4, 1e-3, 1e-3)),
    ]
    kinds = [v.verdict for v in table4_conversion.verdicts(worse)]
    assert kinds == [*["not"] * 4, "not run", "no data here"]
    # right as often as before, but not of the same images
    other = table4_conversion.verdicts([row("resnet20", "default", figures())])[0]
    assert (other.verdict, "100 answers changed" in other.ours) == ("partly", True)
    # closer logits, but there was no loss to win back
    free = [
        row("vit", "k2-paper", figures(-0.1, 0.4, 1e-1)),
        row("vit", "k2-calibrated", figures(0.1, 0.2, 5e-2)),
    ]
    assert table4_conversion.verdicts(free)[2].verdict == "partly"
    near = [*worse[:3], row("vit", "k3-recipe", figures(0.03, 0.7, 1e-3))]
    assert table4_conversion.verdicts(near)[3].verdict == "partly"


def test_exact_networks_have_a_line_for_each_device():
    slow = row("lstm", "default", figures(rms=1e-7, same=1.0), "a")
    fast = row("lstm", "default", figures(rms=1e-4, same=1.0), "b")
    fast = fast._replace(about={"device": "NVIDIA H200", "torch": "2.11"})
    text = table4_conversion.page([slow, fast])
    assert "| lstm | of others | CPU | 10,000 |" in text
    assert "| lstm | of others | NVIDIA H200 | 10,000 |" in text
    assert "Measured: 1 rows: CPU (x86_64), torch 2.13; 1 rows: NVIDIA H200, torch 2.11." in text
    assert "on 1 networks" in table4_conversion.verdicts([slow, fast])[0].ours


def test_the_picture_is_small(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row("vit", way, figures(-0.2 * k, 0.5, 10.0**-k)) for k, way in enumerate(WAYS)]
    table4_conversion.draw(rows, tmp_path)
    assert 5_000 < (tmp_path / "table4_vit.svg").stat().st_size < 150_000


@pytest.fixture
def images(tmp_path):
    """Two classes of three images, as ImageNet's are laid out."""
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for name in ("n01440764", "n02123045"):
        (tmp_path / "val" / name).mkdir(parents=True)
        for n in range(3):
            pixels = draw.integers(0, 256, (180, 200, 3), np.uint8)
            image.fromarray(pixels).save(tmp_path / "val" / name / f"{n}.JPEG")
    return tmp_path / "val"


def test_a_network_of_timm_is_converted_on_a_folder_of_images(images, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    weights = tmp_path / "vit.pt"
    torch.save(timm.create_model("test_vit").state_dict(), weights)
    words = ["--imagenet", str(images), "--timm", "test_vit", "--device", "cpu"]
    words += ["--checkpoint", f"test_vit={weights}", "--out", str(tmp_path / "rows.jsonl")]
    (found,) = table4_conversion.main([*words, "--only", "gates=k2-calibrated"])
    assert found.case == {"network": "timm:test_vit", "gates": "k2-calibrated", "images": "val"}
    assert found.figures["images"] == 3
    assert found.figures["calibrated on"] == 3
    assert 0 < found.figures["logit RMS"] < 0.1
    assert json.loads((tmp_path / "rows.jsonl").read_text())["figures"] == found.figures
    assert "timm:test_vit" in table4_conversion.page([found])


def test_classes_come_from_names_and_never_from_the_order_of_folders(images):
    pytest.importorskip("timm")
    assert {label for _, label in table4_imagenet.labelled_files(images)} == {0, 281}
    (images / "cats").mkdir()
    with pytest.raises(SystemExit, match="named by class, n01440764 or 0 to 999; found cats"):
        table4_imagenet.labelled_files(images)


def test_every_case_of_the_experiment_is_listed_without_training(tmp_path, capsys):
    words = ["--list", "--weights", str(tmp_path), "--out", str(tmp_path / "none.jsonl")]
    with pytest.raises(SystemExit):
        table4_conversion.main(words)
    listed = capsys.readouterr().out
    assert listed.count("network vit") == len(WAYS)
    assert "weights none yet" in listed
    assert not list(tmp_path.iterdir())


def test_gates_are_evaluated_and_nothing_is_left(monkeypatch):
    """A network whose gates are replaced by torch's own function after conversion is refused."""
    given = table4_networks.read("gru", None, True)
    loaded = table4_conversion.labelled(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10), torch.nn.SiLU()).eval(),
        table4_networks.prepared("gru", given.test[0]),
        given.test[1],
    )
    asked = record.options("x", None).parse_args(["--smoke", "--device", "cpu"])
    assert table4_conversion.compared(loaded, "default", None, asked)["logit RMS"] < 1e-6
    monkeypatch.setattr(tg, "convert", lambda model, *args, **kwargs: model)
    with pytest.raises(RuntimeError, match="not all is gates"):
        table4_conversion.compared(loaded, "default", None, asked)


def test_no_difference_is_no_minus_zero():
    assert math.copysign(1, table4_conversion.off({"before": 90.0, "after": 90.0 - 1e-12})) == 1
