"""The panels show the numbers of the instance, and the picture is a picture."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from threshold_gating import TAXONOMY, gates, taxonomy
from threshold_gating.insight import (
    colours,
    draw_branches,
    draw_error,
    draw_gates,
    plot_instances,
)

figure = pytest.importorskip("matplotlib.figure")

X = torch.linspace(-4, 4, 101, dtype=torch.float64)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def ax():
    return figure.Figure().subplots()


def heights(ax):
    """The y values of every line drawn over all of X, in the order of drawing."""
    lines = [line.get_ydata() for line in ax.get_lines()]
    return [torch.as_tensor(y) for y in lines if len(y) == len(X)]


@pytest.mark.parametrize("name", ["identity", "relu", "silu", "hardtanh", "gelu", "elu_k3_product"])
def test_the_gates_drawn_are_those_of_the_instance(ax, name):
    t = TAXONOMY[name]
    draw_gates(ax, t, X)
    wanted = gates(X, t.tau, t.theta, form=t.form, owner=t.owner)
    torch.testing.assert_close(torch.stack(heights(ax)), wanted, rtol=0, atol=0)
    marked = [line.get_xdata()[0] for line in ax.get_lines() if len(line.get_xdata()) == 2]
    assert tuple(marked) == t.theta


@pytest.mark.parametrize("name", ["relu", "mish", "hardswish", "hardtanh_clamp"])
def test_branches_blend_and_function_are_drawn_in_this_order(ax, name):
    t, f = TAXONOMY[name], taxonomy.ROWS[name].f
    draw_branches(ax, t, X, f)
    *branches, blend, function = heights(ax)
    curves = t.q or (0,) * t.K
    wanted = [q * X**2 + s * X + c for q, s, c in zip(curves, t.s, t.c, strict=True)]
    torch.testing.assert_close(torch.stack(branches), torch.stack(wanted), rtol=0, atol=0)
    torch.testing.assert_close(blend, t(X), rtol=0, atol=0)
    torch.testing.assert_close(function, f(X), rtol=0, atol=0)


def test_without_a_function_only_branches_and_blend_are_drawn(ax):
    draw_branches(ax, TAXONOMY["silu"], X)
    assert len(heights(ax)) == 3


def test_the_error_drawn_is_the_distance_to_the_function(ax):
    t, f = TAXONOMY["gelu"], taxonomy.ROWS["gelu"].f
    draw_error(ax, t, X, f)
    (drawn,) = heights(ax)
    torch.testing.assert_close(drawn, (t(X) - f(X)).abs(), rtol=0, atol=0)
    assert not ax.texts


def test_no_difference_is_said_in_words(ax):
    draw_error(ax, TAXONOMY["relu"], X, torch.relu)
    assert [text.get_text() for text in ax.texts] == ["no difference"]


def test_a_wrong_instance_is_not_called_the_same(ax):
    draw_error(ax, TAXONOMY["leaky_relu"], X, torch.relu)
    assert not ax.texts
    assert heights(ax)[0].max() == 0.04


@pytest.mark.parametrize("K", range(1, 8))
def test_neighbouring_branches_differ_in_colour(K):
    each = colours(K)
    assert len(each) == K
    assert all(a != b for a, b in pairwise(each))


@pytest.mark.parametrize("names", [["identity"], ["relu6", "gelu_paper", "softplus"]])
def test_the_picture_is_a_png_of_a_readable_size(tmp_path, names):
    path = plot_instances(names, str(tmp_path / "picture.png"))
    data = path.read_bytes()
    assert data.startswith(PNG)
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    assert width >= 250 * len(names)
    assert height >= 800


def test_an_unknown_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'silu'"):
        plot_instances(["silou"], tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())


def test_importing_it_leaves_matplotlib_alone():
    code = "import sys, threshold_gating.insight; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
