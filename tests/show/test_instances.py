"""The panels show the numbers of the instance, and the picture is a picture."""

import subprocess
import sys
from functools import cache
from itertools import pairwise

import pytest
import torch

from threshold_gating import TAXONOMY, TG, gates, taxonomy
from threshold_gating.fitting import Fit
from threshold_gating.fitting.shape import curve
from threshold_gating.show import instances
from threshold_gating.show.instances import (
    colours,
    draw_branches,
    draw_derivatives,
    draw_error,
    draw_function,
    draw_gates,
    draw_residuals,
    is_exact,
    plot_explanation,
    plot_instances,
)
from threshold_gating.theory import explain

figure = pytest.importorskip("matplotlib.figure")

F = torch.nn.functional
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
    code = "import sys, threshold_gating.show.instances; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# What `tg explain` draws


@pytest.fixture(scope="module")
def of():
    """(function, explanation) by name, each explained once."""
    return cache(lambda name: (functions()[name], explain(functions()[name], name=name)))


def functions():
    def threshold(x):
        return F.threshold(x, 0.1, 20)

    return {
        **{f.__name__: f for f in (F.gelu, F.relu, F.mish, F.elu, F.hardswish, torch.sin)},
        **{"softplus": lambda x: F.softplus(x, threshold=50), "threshold": threshold},
    }


def fit_of(t, f):
    return Fit(t, *taxonomy.measure(t, f), "the line", "sup")


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def marked(ax, word):
    """Where the marks with a label that begins with `word` stand."""
    (line,) = (each for each in ax.get_lines() if str(each.get_label()).startswith(word))
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_the_function_is_drawn_with_its_asymptotes_and_inflections(ax, of):
    f, e = of("gelu")
    draw_function(ax, f, X, e)
    low, high, drawn = heights(ax)
    torch.testing.assert_close(low, 0 * X, rtol=0, atol=0)
    torch.testing.assert_close(high, X, rtol=0, atol=0)
    torch.testing.assert_close(drawn, F.gelu(X), rtol=0, atol=0)
    inflections = [x for x, _ in marked(ax, "inflection")]
    assert inflections == pytest.approx([-(2**0.5), 2**0.5])
    assert "inflection at −1.41, 1.41" in labels(ax)
    assert "asymptote at −∞: 0" in labels(ax)
    assert "asymptote at +∞: x" in labels(ax)


def test_corners_and_steps_are_marked(ax, of):
    f, e = of("hardswish")
    draw_function(ax, f, X, e)
    assert marked(ax, "corner") == [(-3, 0), (3, 3)]
    ax.clear()
    f, e = of("threshold")
    draw_function(ax, f, X, e)
    assert [x for x, _ in marked(ax, "step")] == pytest.approx([0.1])
    assert heights(ax)[-1].isnan().sum() == 1  # no line across the step


def test_the_floor_of_two_branches_is_shown_where_there_is_one(ax, of):
    f, e = of("softplus")
    draw_function(ax, f, X, e)
    (arrow,) = ax.texts  # an annotation without words
    assert [*arrow.xy, *arrow.xyann] == pytest.approx([0, 0.693147, 0, 0], abs=1e-6)
    assert "K = 2 misses 0.693 here" in labels(ax)
    ax.clear()
    f, e = of("gelu")
    draw_function(ax, f, X, e)
    assert not ax.texts


def test_a_function_without_tails_is_drawn_alone(ax, of):
    f, e = of("sin")
    draw_function(ax, f, X, e)
    assert labels(ax) == ["f", "inflection at −3.14, 0, 3.14"]


def test_the_derivatives_drawn_are_those_of_the_function(ax):
    draw_derivatives(ax, torch.tanh, X)
    first, second, third = heights(ax)
    y = torch.tanh(X)
    torch.testing.assert_close(first, 1 - y**2)
    torch.testing.assert_close(second, -2 * y * (1 - y**2))
    torch.testing.assert_close(third, (6 * y**2 - 2) * (1 - y**2))
    assert labels(ax) == ["f'", "f''", "f'''"]
    assert not ax.texts


def test_a_corner_is_a_gap_in_the_slope_and_an_arrow_as_high_as_the_jump(ax):
    draw_derivatives(ax, torch.relu, X)
    for y, above in zip(heights(ax), (1, 0, 0), strict=True):
        assert y[X < -0.05].tolist() == [0] * 50
        assert y[50].isnan()
        assert y[X > 0.05].tolist() == [above] * 50
    (arrow,) = ax.texts
    assert [*arrow.xy, *arrow.xyann] == pytest.approx([0, 1, 0, 0], abs=1e-9)


def test_a_jump_of_the_curvature_is_a_gap_from_there_on(ax):
    draw_derivatives(ax, F.elu, X)
    first, second, third = heights(ax)
    assert [bool(y[50].isnan()) for y in (first, second, third)] == [False, True, True]
    torch.testing.assert_close(third[:50], torch.exp(X[:50]))


def test_differences_are_not_drawn_across_a_corner(ax):
    """HardSigmoid has one derivative by autograd; f'' by differences is wrong beside a corner."""
    draw_derivatives(ax, F.hardsigmoid, X)
    _, second, _ = heights(ax)
    assert second.isnan().sum() >= 2
    assert second[~second.isnan()].abs().max() < 1e-9


def test_residuals_are_those_of_each_fit_with_its_largest(ax):
    f = F.gelu
    fits = [fit_of(TAXONOMY[key], f) for key in ("gelu_k5", "gelu_k2", "gelu_k3")]
    draw_residuals(ax, fits, X, f)
    worst, middle, best = heights(ax)
    for y, fit in zip((worst, middle, best), (fits[1], fits[2], fits[0]), strict=True):
        torch.testing.assert_close(y, (fit.t(X) - f(X)).abs(), rtol=0, atol=0)
    assert labels(ax) == [f"K = {k.K}: sup {k.sup:.1e}" for k in (fits[1], fits[2], fits[0])]
    low, high = ax.get_ylim()
    assert low < fits[0].sup < fits[1].sup < high
    shades = {line.get_color() for line in ax.get_lines()}
    assert len(shades) == 3


def test_an_exact_fit_is_called_so_and_own_sharpness_is_named(ax):
    own = TG((1.0, 1.1), (0, 0.7), (0, 1, 1), (0, 0, 0))
    draw_residuals(ax, [fit_of(TAXONOMY["mish"], F.mish), fit_of(own, F.mish)], X, F.mish)
    sup = fit_of(own, F.mish).sup
    assert labels(ax) == [f"K = 3, own τ: sup {sup:.1e}", "K = 3: exact", "within rounding"]


@pytest.mark.parametrize(
    ("sup", "f", "exact"),
    [
        (1e-12, F.silu, True),
        (1e-9, F.silu, False),
        (1e-9, lambda x: 1e5 * F.silu(x), True),  # rounding at 1e4, where it is 1e9
        (1e-12, lambda x: 1e-8 * F.silu(x), False),
        (1e-14, torch.tanh, True),
        (1e-11, torch.tanh, False),
    ],
)
def test_exact_is_meant_relative_to_the_function(sup, f, exact):
    assert is_exact(sup, f) == exact


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ((0, 0), "0"),
        ((1, 0), "x"),
        ((-1, 0), "−x"),
        ((0, -1), "−1"),
        ((0.5, 1), "0.5 x + 1"),
        ((-0.0336, -1.54), "−0.0336 x − 1.54"),
        ((0.5, 0, 1 / 6), "0.1667 x² + 0.5 x"),
        ((1, -1, -1), "−x² + x − 1"),
        ((1e-15, 1.001), "1.001"),
    ],
)
def test_a_branch_is_written_as_one_writes_it(line, text):
    assert instances._affine(*line) == text


def size(data):
    return tuple(int.from_bytes(data[at : at + 4]) for at in (16, 20))


@pytest.mark.parametrize("name", ["gelu", "threshold"])
def test_an_explanation_is_a_picture(tmp_path, of, name):
    f, e = of(name)
    keys = [k for k in TAXONOMY if k == name or k.startswith(f"{name}_k")]
    fits = [fit_of(TAXONOMY[key], f) for key in keys]
    data = plot_explanation(f, fits, e, tmp_path / "picture.png").read_bytes()
    assert data.startswith(PNG)
    assert size(data) == (1760, 1078)


def test_without_fits_the_function_is_drawn_alone(tmp_path, of):
    f, e = of("sin")
    data = plot_explanation(f, [], e, tmp_path / "p.png").read_bytes()
    assert size(data) == (770, 1078)


def test_an_explanation_as_svg_names_the_function_and_its_best_fit(tmp_path, monkeypatch):
    """As text, not outlines; the name has a dollar sign, which is no formula."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    e = explain(F.mish, name="my$file$.py:mish")
    fits = [fit_of(TAXONOMY[key], F.mish) for key in ("mish_k2", "mish")]
    text = plot_explanation(F.mish, fits, e, tmp_path / "picture.svg").read_text()
    assert "my$file$.py:mish  (multiplicative; exact with K = 3)" in text
    assert "the branches of its best instance, K = 3" in text


def test_a_module_with_parameters_is_drawn(tmp_path):
    module = torch.nn.PReLU().double()
    t = taxonomy.leaky_relu(0.25)
    path = plot_explanation(
        module, [fit_of(t, lambda x: module(x).detach())], explain(module), tmp_path / "p.png"
    )
    assert path.exists()


@pytest.mark.parametrize(("name", "reach"), [("gelu", 4), ("mish", 6.6), ("threshold", 4)])
def test_the_window_reaches_as_far_as_the_function_bends(of, name, reach):
    f, e = of(name)
    x = instances._window(curve(f), e, None)
    assert x[-1].item() == pytest.approx(reach, abs=0.1)
    assert x[0] == -x[-1]
    assert (x == 0).any()
