"""Gates fitted to what a network feeds its sites, chosen by values that were not fitted."""

import math
import re
import zlib
from collections import Counter

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from threshold_gating import TAXONOMY, TG, convert, match, verify
from threshold_gating.conversion import ConversionError
from threshold_gating.conversion.calibration import calibrate
from threshold_gating.conversion.sampling import Reservoir


class Net(nn.Module):
    """Four approximate sites, two of them calls of one module, and four exact ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.act, self.relu, self.elu = nn.GELU(), nn.ReLU(), nn.ELU(inplace=True)

    def forward(self, x, shift=0.0):
        x = self.act(self.b(self.act(self.a(x))))
        x = F.gelu(x, approximate="tanh") + self.relu(x) + F.silu(x)
        return self.c(self.elu(x + shift)).softmax(-1)


def net():
    torch.manual_seed(1)
    return Net().eval()


def batches(n=4, size=64):
    draw = torch.Generator().manual_seed(2)
    return [torch.randn(size, 8, generator=draw) for _ in range(n)]


def quick(model=None, inputs=None, **options):
    return calibrate(model or net(), inputs or batches(), **{"K": 2, "values": 5000, **options})


def inputs_of(model, name, given):
    """All inputs of a module, by a hook."""
    seen = []
    hook = getattr(model, name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for x in given:
            model(x)
    hook.remove()
    return seen


def test_every_approximate_site_is_calibrated_and_no_exact_one():
    calibration = quick()
    assert list(calibration) == ["act", "act#1", ":gelu#0", "elu"]
    assert len(calibration) == 4
    assert all(isinstance(t, TG) and t.K == 2 for t in calibration.values())
    fits = calibration.fits
    assert [fit.kind for fit in fits.values()] == ["gelu", "gelu", "gelu", "elu"]
    assert {(fit.values, fit.heldout, fit.seen) for fit in fits.values()} == {(5000, 500, 8192)}


def test_calibrated_gates_are_better_than_the_default_on_new_data():
    model, fresh = net(), inputs_of(net(), "act", batches(12)[4:])
    t = quick(model)["act"]
    x = torch.cat(fresh[::2]).double()  # of the first of its two calls
    rms = [float((u(x) - F.gelu(x)).square().mean().sqrt()) for u in (t, TAXONOMY["gelu_k2"])]
    assert rms[0] < 0.95 * rms[1]


def test_a_calibrated_site_is_never_worse_than_the_default_or_the_closed_form():
    for options in ({}, {"objective": "sup"}, {"tails": "free"}, {"values": 20}, {"K": 3}):
        for fit in quick(**options).fits.values():
            chosen = fit.error if fit.chosen == "calibrated" else fit.default_error
            assert fit.least == chosen <= fit.default_error
            assert fit.t == (fit.fit.t if fit.chosen == "calibrated" else fit.default)


def test_the_errors_are_those_of_the_heldout_values_alone():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU())
    fit = quick(model, values=1000).fits["1"]
    draw = Reservoir(1000, zlib.crc32(b"1"))
    with torch.no_grad():
        for x in batches():
            draw.add(model[0](x))
    x = draw.sample()[:100].double()
    for t, error in ((fit.fit.t, fit.error), (fit.default, fit.default_error)):
        assert float((t(x) - F.gelu(x)).square().mean().sqrt()) == pytest.approx(error, rel=1e-6)
    assert fit.fit.over.startswith("sup and RMS over 900 samples in ")


def test_where_the_inputs_are_close_to_zero_two_branches_are_as_good_as_the_closed_form():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU())
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
        model[0].bias.zero_()
    fit = quick(model).fits["1"]
    assert fit.default == match(F.gelu)
    assert fit.t.tau == pytest.approx(1.5958, abs=1e-3)


def test_a_network_is_converted_with_its_calibration():
    model, x = net(), torch.randn(16, 8)
    calibration = quick(model)
    gated = convert(model, calibration, inputs=x, tol=math.inf)  # two branches are too few
    assert verify(model, gated, x, tol=math.inf).ok
    off = (gated(x) - model(x)).square().mean()
    default = convert(model, {"re:act.*|elu|:gelu#0": 2}, inputs=x, tol=math.inf)
    assert off < (default(x) - model(x)).square().mean()


def test_a_vision_transformer_is_calibrated_and_proven():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32).eval()
    images = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    calibration = quick(model, images, K=3)
    assert list(calibration) == [f"blocks.{i}.mlp.act" for i in range(len(model.blocks))]
    assert {fit.chosen for fit in calibration.fits.values()} == {"calibrated"}
    assert verify(model, convert(model, calibration, inputs=images[0]), images[0]).ok


def test_a_site_keeps_its_number_of_branches_and_their_kind_unless_asked_otherwise():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU("tanh"))
    fit = quick(model, K=None).fits["1"]
    assert fit.default == TAXONOMY["gelu_tanh"]
    assert len(fit.t.tau) == 4  # one for each threshold
    assert fit.chosen == "calibrated"


def test_the_smallest_number_of_branches_that_reaches_an_error_is_taken():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU())
    got = {e: quick(model, K=None, max_error=e)["1"].K for e in (1e-1, 1e-3, 2e-4)}
    assert got == {1e-1: 2, 1e-3: 3, 2e-4: 4}


def test_an_error_out_of_reach_is_refused_with_the_best(monkeypatch):
    monkeypatch.setattr("threshold_gating.conversion.calibration._LARGEST_K", 2)
    text = r"calibrate: no K up to 2 brings the rms error of act \(gelu\) on held-out values to 1e-09; the best is 0\.00\d+ at K = 2\. Raise max_error\."
    with pytest.raises(ConversionError, match=text) as caught:
        quick(K=None, max_error=1e-9)
    assert caught.value.site == "act"


def test_a_calibration_is_the_same_every_time_and_however_the_inputs_are_split():
    whole = torch.cat(batches())
    first = quick()
    for inputs in (batches(), [whole], whole.split(7)):
        again = quick(inputs=list(inputs))["act"]
        assert again.tau == pytest.approx(first["act"].tau, rel=1e-5)
    assert quick() == first
    assert quick(seed=1) != first


def test_the_paper_recipe_fits_nine_parameters_on_the_values_of_640_inputs():
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU())
    fit = calibrate(model, batches(12), recipe="paper", values=900).fits["1"]
    assert (fit.fit.K, fit.fit.t.form) == (3, "product")
    assert fit.seen == 640 * 4
    assert (fit.values, fit.heldout) == (1000, 100)
    assert fit.default == TAXONOMY["gelu_k3"]
    assert fit.chosen == "calibrated"
    assert "free tails" in fit.fit.warning


def test_inputs_are_tuples_and_dicts_as_for_convert():
    x = batches(1)[0]
    given, named, without = (quick(inputs=[i]) for i in ((x, -2.0), {"x": x, "shift": -2.0}, x))
    assert given == named
    assert given["act"] == without["act"]
    assert given.fits["elu"].fit.over != without.fits["elu"].fit.over


def test_a_network_stays_as_it_was():
    model = net().train()
    given = batches(2)
    before = [x.clone() for x in given]
    quick(model, given)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_module_called_by_keyword_or_behind_a_hook_is_read_where_it_computes():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.GELU()

        def forward(self, x):
            return self.act(input=x)

    moved = Named()
    moved.act.register_forward_pre_hook(
        lambda _, a, k: (a, {"input": k["input"] - 3}), with_kwargs=True
    )
    spans = [quick(model).fits["act"].fit.over for model in (Named(), moved)]
    here, there = (float(span.partition(", ")[2].rstrip("]")) for span in spans)
    assert there == pytest.approx(here - 3, abs=2e-3)


def test_the_memory_of_a_sample_does_not_grow_with_what_is_seen():
    sample = Reservoir(1000, 0)
    for _ in range(300):
        sample.add(torch.randn(700))
        assert len(sample._values) == len(sample._keys) <= 1250 + 700
    assert len(sample._values) <= 1250
    assert sample.seen == 210_000
    assert len(sample.sample()) == 1000


def test_a_sample_is_uniform_and_does_not_depend_on_the_split():
    x = torch.arange(5000.0)
    counts = Counter()
    for seed in range(200):
        one, other = Reservoir(100, seed), Reservoir(100, seed)
        one.add(x.view(50, 100))
        for part in x.split(37):
            other.add(part)
        assert torch.equal(one.sample(), other.sample())
        assert len(set(one.sample().tolist())) == 100
        counts.update((one.sample() // 500).int().tolist())
    assert all(abs(n - 2000) < 5 * 45 for n in counts.values())  # five standard deviations
    assert len(counts) == 10


def test_a_sample_of_few_values_is_all_of_them():
    sample = Reservoir(100, 0)
    sample.add(torch.zeros(0))
    sample.add(torch.arange(10.0).bfloat16())
    assert sorted(sample.sample().tolist()) == list(range(10))


def test_a_nan_or_infinity_is_refused_with_the_name_of_its_site():
    for value in (float("nan"), float("-inf")):
        bad = batches(2)
        bad[1][3, 2] = value
        text = r"calibrate: 32 of 2048 inputs of act \(gelu\) are NaN or infinite; leave out the batch that makes them\."
        with pytest.raises(ConversionError, match=text) as caught:
            quick(inputs=bad)
        assert caught.value.site == "act"


def test_a_network_without_an_approximate_site_is_refused_with_its_exact_ones():
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Softmax(-1))
    text = r"calibrate: no approximate site ran in Sequential; these are exact already, so convert it as it is: 1 \(relu\), 2:softmax#0 \(softmax\)\."
    with pytest.raises(ConversionError, match=text):
        quick(model)
    many = nn.Sequential(*(nn.ReLU() for _ in range(9)))
    with pytest.raises(ConversionError, match=r"4 \(relu\), 5 \(relu\) and 3 more\.$"):
        quick(many)
    with pytest.raises(ConversionError, match=r"ran in Linear, nor any other nonlinearity\.$"):
        quick(nn.Linear(8, 4))


def test_a_network_that_does_not_run_is_refused():
    with pytest.raises(
        ConversionError, match=r"Net does not run on the inputs given \(RuntimeError: "
    ):
        quick(inputs=[torch.zeros(2, 9)])


def test_too_few_values_are_refused():
    with pytest.raises(
        ConversionError,
        match=r"calibrate: 0 got 1 values, and at least 2 are needed; give more inputs\.",
    ):
        quick(nn.Sequential(nn.GELU()), [torch.zeros(1)])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inputs": iter(())}, "calibrate: batches is empty; give at least one input."),
        (
            {"inputs": torch.ones(2, 8)},
            "calibrate: batches must be an iterable of inputs; got one Tensor. Put it into a list.",
        ),
        (
            {"inputs": {"x": 1}},
            "calibrate: batches must be an iterable of inputs; got one dict. Put it into a list.",
        ),
        ({"K": 1}, "calibrate: K must be an integer >= 2, or None for each site's own; got 1."),
        (
            {"K": True},
            "calibrate: K must be an integer >= 2, or None for each site's own; got True.",
        ),
        ({"max_error": 0.1}, "calibrate: give K or max_error, which chooses K, not both."),
        ({"K": None, "max_error": 0.0}, "calibrate: max_error must be positive, or None; got 0.0."),
        ({"objective": "mae"}, "calibrate: objective must be 'rms' or 'sup'; got 'mae'."),
        ({"tails": "fat"}, "calibrate: tails must be 'exact' or 'free'; got 'fat'."),
        ({"values": 1}, "calibrate: values must be at least 2; got 1."),
        (
            {"holdout": 0.0},
            "calibrate: holdout must be between 0 and 1, neither included; got 0.0.",
        ),
        ({"recipe": "mine"}, "calibrate: recipe must be None or 'paper'; got 'mine'."),
        (
            {"recipe": "paper"},
            "calibrate: recipe='paper' is K = 3 by RMS; leave K and the others out.",
        ),
    ],
)
def test_bad_options_are_refused_before_the_network_runs(options, text):
    inputs = options.pop("inputs", batches(1))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        calibrate(net(), inputs, **{"K": 2, **options})


def test_a_function_without_asymptotes_is_named():
    class Cube(nn.Module):
        def forward(self, x):
            return x**3

    model = nn.Sequential(nn.Linear(8, 4), Cube())
    with pytest.raises(
        ConversionError,
        match=r"1 \(Cube\) stays as it is: no gate computes it \(fit: f has no asymptote at -inf",
    ):
        quick(model)


def test_batches_of_a_data_loader_lose_their_labels_and_ambiguous_ones_are_refused():
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU())
    x = torch.randn(32, 8)
    data = torch.utils.data.TensorDataset(x, torch.zeros(32))
    loader = torch.utils.data.DataLoader(data, 8)
    found = calibrate(model, loader, K=2)
    assert found.fits == calibrate(model, x.split(8), K=2).fits

    class Masked(nn.Sequential):
        def forward(self, x, mask=None):
            return super().forward(x if mask is None else x * mask)

    with pytest.raises(ConversionError, match=r"has 2 parts and Masked takes \(x, mask\), some of"):
        calibrate(Masked(*model), loader, K=2)
    calibrate(Masked(*model), [(x, torch.ones(8))], K=2)  # arguments, as `convert` takes them


def test_progress_is_told_with_its_share_and_else_nobody_is(monkeypatch, capsys):
    told = []
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.SiLU(), nn.GELU())
    calibrate(model, batches(2), K=2, progress=lambda *given: told.append(given))
    assert told == [
        ("calibrate: running batch 1", 0),
        ("calibrate: running batch 2", 0),
        ("calibrate: fitting site 1 of 2, 1", 0),
        ("calibrate: fitting site 2 of 2, 3", 0.5),
        ("calibrate: 2 sites fitted", 1),
    ]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    quick(model)
    assert capsys.readouterr() == ("", "")


def test_the_table_fits_a_hundred_columns():
    model = nn.Sequential()
    model.add_module("a" * 120, nn.GELU())
    lines = str(quick(model)).splitlines()
    assert max(map(len, lines)) <= 100
    assert re.fullmatch(r"1 of 1 sites calibrated, by the rms error on held-out values", lines[-1])
    short = str(quick(nn.Sequential(nn.GELU()), tails="free")).splitlines()
    assert short[0].split() == ["site", "kind", "K", "values", "default", "calibrated", "chosen"]
    assert re.fullmatch(r"0 +gelu +2 +2048 +\S+e-03 +\S+e-03 +calibrated", short[2])
    assert short[-1] == "1 with a warning: see .fits[site].fit.warning"
