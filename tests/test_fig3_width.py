"""The width of a ResMLP: its gated forms, what they cost, and the page made of its rows."""

import pytest
import torch
from torch import nn

import threshold_gating as tg
from experiments import fig3_width
from experiments.fig3_width import NAME, Size, cases, network, sweeps
from experiments.record import Row
from experiments.resmlp import ResMLP, counted, gated
from experiments.sweep import best_rates

RATES = {"relu": 1e-3, "W": 2e-3, "S": 2e-3, "silu": 1e-3}


@pytest.fixture
def x():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def layers(model):
    return [m for m in model.modules() if isinstance(m, tg.Linear)]


@pytest.mark.parametrize("tier", ["W", "S"])
def test_a_gated_network_starts_as_one_with_silu_and_both_branches_learn(x, tier):
    plain = ResMLP(8, 2, 1.5)
    ours, silu = gated(plain, tier), ResMLP(8, 2, 1.5, nn.SiLU)
    silu.load_state_dict(plain.state_dict())
    with tg.kernels.use("reference"):
        torch.testing.assert_close(ours(x), silu(x), rtol=1e-5, atol=1e-6)
        ours(x).square().sum().backward()
    assert isinstance(plain.blocks[0].act, nn.ReLU)  # left as it was
    for layer in layers(ours):
        assert layer.tier == tier
        assert not layer.weight[:, 0].any()
        assert layer.weight.grad.abs().amax((0, 2)).gt(0).all()  # neither branch is dead


def test_half_transfer_is_that_of_the_library(x):
    plain = ResMLP(8, 1, 1)
    ours, theirs = gated(plain, "W"), tg.training.half_transfer(plain, inputs=x)
    with tg.kernels.use("reference"):
        torch.testing.assert_close(ours(x), theirs(x))


def test_costs_are_those_of_the_formulas():
    dim, depth, h = 16, 3, 2
    block = 64 * 64 + 64 + 6 * dim  # the layer across patches, two affine ones, two scales
    rest = depth * block + (48 * dim + dim) + 2 * dim + (10 * dim + 10)
    crossed = depth * 64 * 64 * dim + 64 * 48 * dim + 10 * dim
    for arm, weights, more, gates in (
        ("relu", 2, 0, 0),
        ("W", 3, 2 * h * dim, 64 * h * dim),
        ("S", 3, 2 * h * dim * dim, 64 * h * dim * dim),
    ):
        found = counted(network(arm, h, 0, Size(dim=dim, depth=depth)))
        own = depth * (weights * h * dim * dim + h * dim + dim + more)
        assert found["parameters"] == own + rest
        assert found["macs"] == crossed + depth * 64 * weights * h * dim * dim
        assert found["gates"] == depth * gates
        assert found["hidden"] == 2 * 64 * h * dim


def test_relu_has_the_parameters_of_the_gated_arms_within_a_hundredth():
    def parameters(arm, h):
        return counted(network(arm, h, 0, Size()))["parameters"]

    for arm, h, width in (("W", 1, 1.5), ("S", 1, 2.5), ("W", 2, 3)):
        assert parameters(arm, h) == pytest.approx(parameters("relu", width), rel=0.01)


def test_every_arm_of_a_seed_starts_from_the_same_weights():
    size = Size(dim=8, depth=1)
    for arm in ("W", "S"):
        ours, plain = network(arm, 2, 5, size), network("relu", 2, 5, size)
        assert torch.equal(ours.blocks[0].up.weight, plain.blocks[0].up.weight)
        assert torch.equal(ours.blocks[0].down.weight[:, 1], plain.blocks[0].down.weight)


def test_a_transfer_that_was_stopped_goes_on_behind_its_first_half(tmp_path, monkeypatch):
    monkeypatch.setattr(fig3_width.record, "CHECKPOINTS", tmp_path)
    case = {"arm": "transfer", "h": 1, "seed": 0, "steps": 4, "rate": 1e-3, "rate_after": 2e-3}
    case["part"] = "main"
    asked = fig3_width.record.options(NAME, None).parse_args(["--smoke", "--device", "cpu"])
    expected = fig3_width.run(case, asked)
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]
    real, calls = fig3_width.train, []

    def stopping(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(fig3_width, "train", stopping)
    with pytest.raises(KeyboardInterrupt):
        fig3_width.run(case, asked)
    again = fig3_width.run(case, asked)
    assert len(calls) == 4  # the first half is not trained again
    for name in ("accuracy", "loss", "before", "moved"):
        assert again[name] == expected[name]
    assert again["again"]["loss"] == expected["again"]["loss"]


@pytest.mark.slow
def test_the_smoke_run_ends_with_a_page_that_has_every_arm(capsys):
    fig3_width.main(["--smoke", "--device", "cpu"])
    text = capsys.readouterr().out
    assert "All cases ran" in text
    for title in fig3_width.TITLES.values():
        assert f"| {title} | 1 |" in text


def made_up(level, arms=tuple(fig3_width.WIDTHS)):
    """Rows whose accuracy is what `level(arm, h)` says, and 0.1 more for each seed."""
    rows = []
    for case in [*sweeps(arms, Size()), *cases(RATES, Size())]:
        if case["arm"] not in arms:
            continue
        value = level(case["arm"], case["h"]) + 0.1 * case["seed"]
        figures = {"accuracy": value, "loss": 1.0, "curve": {str(n): value for n in (1, 2, 3)}}
        if case["part"] == "sweep":
            figures["accuracy"] = 50 - abs(case["rate"] - RATES[case["arm"]])
        else:
            figures |= {"parameters": int(1e5 * case["h"]), "macs": 10**7, "gates": 0}
            figures |= {"hidden": 100, "peak training": 10**8, "peak inference": None}
        if case["arm"] == "transfer":
            figures |= {"before": 70.0, "moved": 60.0}
            figures["again"] = {"accuracy": value - 1, "loss": 1.0, "curve": {}}
        about = {"device": "a GPU", "date": "2026-11-18"}
        rows.append(Row(case, figures, 1.0, False, about))
    return rows


def like(**gains):
    return lambda arm, h: 70 + 2 * h + gains.get(arm, 0)


@pytest.mark.parametrize(
    ("gain", "verdict", "worth"),
    [
        (2.5, "reproduced", "at h = 2.25"),
        (1.5, "partly", "at h = 1.75"),
        (0.5, "not", "at h = 1.25"),
        (-1, "not", "below h = 1"),
    ],
)
def test_a_verdict_is_how_wide_relu_has_to_be(gain, verdict, worth):
    rows = made_up(like(W=gain, S=0, transfer=9))
    scratch, transfer, synapses = fig3_width.verdicts(rows)
    assert scratch.verdict == verdict
    assert f"as ReLU {worth}:" in scratch.ours
    assert transfer.verdict == "reproduced"
    assert "above h = 4" in transfer.ours
    # S at 1 against ReLU at 2.5 is -3, W at 1 against ReLU at 1.5 its gain less 1
    assert synapses.verdict == ("reproduced" if gain > 1 else "partly")
    assert ("tier W itself gains nothing" in synapses.ours) == (gain < 1)


def test_the_page_has_the_chosen_rates_the_differences_and_what_was_cut(tmp_path):
    rows = made_up(like(W=1.5, S=1, transfer=2, silu=0.5))
    assert best_rates(rows, "accuracy") == RATES
    text = fig3_width.page(rows)
    assert "All cases ran" in text
    assert "0.002 for tier W" in text
    assert "| tier W, h = 1 | ReLU, h = 1.5 | +0.50 [+0.50, +0.50] | equal parameters |" in text
    assert "| half transfer, h = 2 | ReLU, twice half, h = 2 | +1.00 [+1.00, +1.00] |" in text
    assert "from 70.0 to 60.0 % (mean of 12 runs)" in text
    fewer = [row for row in rows if row.case["arm"] != "S" and row.case["seed"] == 0]
    text = fig3_width.page(fewer)
    assert "tier S at h = 1 (3 of 3 seeds)" in text
    assert "ReLU at h = 4 (2 of 3 seeds)" in text
    assert "(1 seed)" in text
    fig3_width.draw(fewer, tmp_path)
    assert 0 < (tmp_path / f"{NAME}.svg").stat().st_size < 150_000


def test_runs_of_another_length_or_rate_are_left_out_and_counted():
    rows = made_up(like(W=1.5))
    case = next(row.case for row in rows if row.case["part"] == "main")
    strange = [
        rows[-1]._replace(case={**case, **change}, figures={"accuracy": 5.0})
        for change in ({"steps": 9}, {"rate": 0.5})
    ]
    assert "Left out: 2 runs of another length or rate." in fig3_width.page([*rows, *strange])
    assert fig3_width.gathered([*rows, *strange]) == fig3_width.gathered(rows)
    assert "Left out" not in fig3_width.page(rows)


def test_what_a_width_is_worth_is_read_from_runs_of_the_same_seeds():
    rows = made_up(like(W=1.5))
    one = [r for r in rows if r.case["arm"] != "relu" or r.case["h"] != 2 or r.case["seed"] == 2]
    line = {h: fig3_width.accuracy(fig3_width.gathered(one), "relu", h) for h in (1.5, 2)}
    assert [len(own) for own in line.values()] == [3, 1]
    # h = 2 has one seed of three, and is left out of the line between 1.5 and 2.5
    assert fig3_width.worth(fig3_width.gathered(one), "W", 1) == "at h = 1.75"
    assert "1 seed" in fig3_width.page(one)


def test_curves_are_read_in_the_order_of_steps_and_the_sweeps_edge_is_said():
    rows = made_up(like())
    for row in rows:
        steps = {"10": 60.0, "100": 70.0, "1000": 71.0, "20": 65.0, "5": 50.0}
        if row.case["arm"] == "W":
            steps |= {"20": 71.0}
        if "curve" in row.figures:
            row.figures["curve"] = steps
    assert "h = 1: 50.00, 50.00, 50.00" in fig3_width.page(rows)  # 1000 over 20
    said = fig3_width.sweep.said({"relu": 8e-3, "W": 4e-3}, fig3_width.RATES, fig3_width.TITLES)
    assert "0.008, the highest that was tried, is the best for ReLU: the sweep ends at" in said
    assert "edge" not in fig3_width.sweep.said({"W": 2e-3}, fig3_width.RATES, fig3_width.TITLES)


def test_without_rows_nothing_is_claimed():
    assert {verdict.verdict for verdict in fig3_width.verdicts([])} == {"not run"}
    alone = [row for row in made_up(like()) if row.case["arm"] == "transfer"]
    assert "half transfer" in fig3_width.page(alone)


def test_a_rate_that_fails_in_the_sweep_is_not_chosen():
    rows = made_up(like())
    first = rows[0]._replace(figures={"failed": "the loss is nan"})
    assert best_rates([first, *rows[1:]], "accuracy").keys() == RATES.keys()
