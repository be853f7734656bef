"""Pictures have what was read, no two labels over each other, and say what they cannot draw."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import threshold_gating as tg
from threshold_gating.insight import History, chaos_map, drawing, film, heads, maps, read, ridges
from threshold_gating.insight.attention import Heads
from threshold_gating.theory import LayerReport, layer_report
from threshold_gating.training.telemetry import histogram

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"


def overlaps(*lists):
    """How many pairs of texts of a list lie over each other, in a figure that was laid out."""
    extent = pytest.importorskip("matplotlib.text").Text.get_window_extent  # without an arrow
    boxes = [[extent(t) for t in texts if t.get_text()] for texts in lists]
    return sum(a.overlaps(b) for each in boxes for a, b in itertools.combinations(each, 2))


def deep(layers=30, act=nn.SiLU):
    each = [m for _ in range(layers) for m in (nn.Linear(8, 8), act())]
    return nn.Sequential(*each, nn.Linear(8, 2))


@pytest.fixture(scope="module")
def reading():
    torch.manual_seed(0)
    x = torch.randn(40, 8)
    model = tg.convert(deep(), train=("tau", "theta"), share="channel", inputs=x)
    with torch.no_grad():
        for p in tg.training.gate_parameters(model).values():
            p.add_(0.3 * torch.randn_like(p))
    return read(model, x)


def test_thirty_layers_have_a_ridge_each_and_no_label_over_another(reading, tmp_path):
    figure = ridges(reading, tmp_path / "ridges.png")
    assert (tmp_path / "ridges.png").read_bytes().startswith(PNG)
    assert [ax.get_xlabel().partition(",")[0] for ax in figure.axes] == [
        "what the site is given",
        "share of flat values",
        "theta",
        "log2 tau",
    ]
    labels = figure.axes[0].get_yticklabels()
    assert [t.get_text() for t in labels] == [s.name for s in reading.sites]
    assert overlaps(labels, *(ax.get_xticklabels() for ax in figure.axes)) == 0


def test_a_ridge_has_its_peak_where_the_values_are():
    x = torch.linspace(-4, 4, 160, dtype=torch.float64)
    y = drawing._density(torch.randn(4000).double() * 0.2 + 1.5, x)
    assert float(x[y.argmax()]) == pytest.approx(1.5, abs=0.15)
    assert float(y.max()) == 1.0
    assert float(y[x < 0].max()) < 0.01


def test_inputs_have_the_colour_of_the_branch_that_is_open():
    x = torch.randn(50, 8)
    found = read(tg.convert(nn.Sequential(nn.Linear(8, 8), nn.Hardtanh()), inputs=x), x)
    (ax,) = ridges(found, what=["input"]).axes
    colours = [tuple(c.get_facecolor()[0][:3]) for c in ax.collections]
    assert len(set(colours)) == 3


def test_dead_channels_stand_beside_their_ridge():
    x = torch.randn(3000, 8)
    model = tg.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), inputs=x)
    with torch.no_grad():
        model[0].bias[:3] = -100
    figure = ridges(read(model, x))
    assert "3 dead" in [t.get_text() for ax in figure.axes for t in ax.texts]


def test_ridges_without_values_and_of_unknown_kinds_are_refused(reading):
    with pytest.raises(ValueError, match="what is some of input, open, flat, theta, tau; got 'x'"):
        ridges(reading, what=["x"])
    alone = read(nn.Sequential(tg.Activation("relu")))
    with pytest.raises(ValueError, match="has no values of input to draw; read the network with"):
        ridges(alone, what=["input"])
    assert ridges(alone).axes  # its thresholds, which are known


def recorded(sites=30, steps=range(0, 100, 5)):
    generator = torch.Generator().manual_seed(0)

    def at(k, step):
        return histogram(torch.randn(8, generator=generator) * step / 100 + k / 10)

    theta = {f"layer.{k}/theta": {s: at(k, s) for s in steps} for k in range(sites)}
    return History("runs/a", tuple(steps), {}, theta, ())


def test_a_film_has_the_first_and_the_last_frame_and_few_between(tmp_path):
    figure = film(recorded(), tmp_path / "film.png", frames=4)
    assert (tmp_path / "film.png").read_bytes().startswith(PNG)
    titles = [ax.get_title() for ax in figure.axes]
    assert (len(titles), titles[0], titles[-1]) == (4, "step 0", "step 95")
    labels = figure.axes[0].get_yticklabels()
    assert labels[0].get_text() == "layer.0"
    assert overlaps(labels, *(ax.get_xticklabels() for ax in figure.axes)) == 0


def test_a_film_draws_the_logarithm_of_tau_and_what_is_not_finite_not_at_all():
    run = recorded(1, (0, 1))
    run.histograms["act/tau"] = {
        0: histogram(torch.ones(3)),
        1: histogram(torch.tensor([math.nan])),
    }
    figure = film(run, what="tau")
    assert figure.axes[0].get_xlabel() == "log2 tau"
    assert len(figure.axes[0].collections) == 1
    assert not figure.axes[1].collections


def test_a_film_of_what_was_not_recorded_is_refused():
    with pytest.raises(ValueError, match="runs/a has no 'tau'; recorded are theta"):
        film(recorded(1, (0, 1)), what="tau")
    with pytest.raises(ValueError, match="frames are 2 or more; got 1"):
        film(recorded(1, (0, 1)), frames=1)


def many_heads(k, count=16):
    theta = torch.randn(3, count).sort(0).values.double()
    figures = torch.rand(3, count).double()
    name = f"model.layers.{k}.self_attn:scaled_dot_product_attention#0"
    return Heads(name, k % 2 == 0, 9, torch.rand(count).double() + 0.5, theta, *figures)


def test_heads_are_squares_in_rows_of_attentions(reading, tmp_path):
    found = tuple(many_heads(k, 16 if k else 4) for k in range(30))
    figure = heads(replace(reading, heads=found), tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes().startswith(PNG)
    panels = [ax for ax in figure.axes if ax.images]
    assert len(panels) == 4  # the last: temperatures, which some have learned
    drawn = torch.as_tensor(panels[0].images[0].get_array().filled(math.nan))
    assert drawn.shape == (30, 16)
    torch.testing.assert_close(drawn[1], found[1].theta[1])
    assert drawn[0, 4:].isnan().all()
    labels = panels[0].get_yticklabels()
    assert labels[3].get_text() == "model.layers.3.self_attn#0"
    assert overlaps(labels) == 0


def test_heads_of_a_network_without_attention_are_refused(reading):
    with pytest.raises(ValueError, match="it has no attention"):
        heads(reading)
    with pytest.raises(ValueError, match="nothing ran; give read inputs"):
        heads(read(nn.Sequential(tg.Activation("relu"))))


def test_layers_stand_on_the_map_where_the_theory_puts_them(tmp_path):
    report = layer_report(deep(30, nn.Tanh), torch.randn(32, 8))
    figure = chaos_map(report, tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes().startswith(PNG)
    ax = figure.axes[0]
    (points,) = [c for c in ax.collections if len(c.get_offsets()) == 30]
    want = torch.tensor([[row.sigma_w, row.variance] for row in report], dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(points.get_offsets().filled()), want)
    numbers = [t for t in ax.texts if t.get_text().isdigit()]
    assert len(numbers) == 30
    assert overlaps(numbers) == 0
    assert "tanh (30 of 30 layers" in figure.get_suptitle()


def test_the_edge_of_the_map_is_where_chi_is_one():
    report = layer_report(deep(2, nn.ReLU), torch.randn(32, 8))
    figure = chaos_map(report)
    contour = next(c for c in figure.axes[0].collections if type(c).__name__ == "QuadContourSet")
    edge = torch.as_tensor(contour.get_paths()[0].vertices)[:, 0]
    # E[relu'^2] = 1/2 at any variance; the grid of sigma_w has steps of a few percent
    torch.testing.assert_close(edge, torch.full_like(edge, math.sqrt(2)), rtol=1e-2, atol=0)


def test_a_map_without_layers_or_without_a_name_is_refused():
    norm = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="of 1 sites none is read by weights directly"):
        chaos_map(layer_report(norm.eval(), torch.randn(9, 8)))
    (row,) = layer_report(deep(1), torch.randn(9, 8))
    other = LayerReport([replace(row, kind="activation")], {})
    with pytest.raises(ValueError, match="no layer has a named activation"):
        chaos_map(other)
    assert "as asked; 0 of 1" in chaos_map(other, activation="SiLU").get_suptitle()


def test_labels_are_pushed_apart():
    at = maps._apart(torch.zeros(30, 2, dtype=torch.float64))
    apart = torch.pdist(at)
    assert float(apart.min()) > 12
