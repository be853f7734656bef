"""The experiments about insight: pruning prunes, ranks are ranks, and pages say what rows say."""

import argparse
import math

import pytest
import torch
from torch import nn

import threshold_gating as tg
from experiments import insight_cost, insight_pruning, record
from experiments.insight_pruning import Pruned, _ranks, correlation, page, spearman

DOCS = record.ROOT / "docs"


@pytest.mark.parametrize("module", [True, False])
def test_a_pruned_channel_is_one_that_the_next_weights_do_not_read(module):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(4, 6), nn.Linear(6, 3), nn.SiLU()

        def forward(self, x):
            y = self.a(x)
            return self.b(self.act(y) if module else nn.functional.silu(y))

    model = tg.convert(Net(), inputs=torch.randn(2, 4))
    x = torch.randn(9, 4)
    with torch.no_grad():
        pruned = Pruned(model, "act" if module else ":silu#0", 1)
        with pruned:
            before = model(x)
            pruned.on, pruned.channel = True, 2
            once, twice = model(x), model(x)
        assert torch.equal(before, model(x))
        assert torch.equal(once, twice)
        model.b.weight[:, 2] = 0
        torch.testing.assert_close(once, model(x))


def test_ranks_and_correlations_are_scipys():
    stats = pytest.importorskip("scipy.stats")
    x, y = torch.randint(9, (50,)).double(), torch.randn(50).double()
    y = y + 0.3 * x
    assert _ranks(x).tolist() == stats.rankdata(x).tolist()
    found = spearman([(x, y)])
    assert found.rho == pytest.approx(stats.spearmanr(x, y).statistic)
    assert found.low < found.rho < found.high


def test_an_interval_excludes_0_for_what_is_related_and_not_for_what_is_not():
    x = torch.randn(300).double()
    related = spearman([(x, x + torch.randn(300).double())])
    unrelated = spearman([(x, torch.randn(300).double())])
    assert related.low > 0.4
    assert unrelated.low < 0 < unrelated.high
    assert math.isnan(spearman([(torch.ones(9), x[:9])]).rho)
    assert str(spearman([])) == ""


def rows():
    def row(site, shift):
        values = [float(k + shift) for k in range(5)]
        figures = dict.fromkeys((*insight_pruning.READ, insight_pruning.BASELINE), values)
        costs = dict.fromkeys(("zero KL", "zero loss", "mean KL", "mean loss"), values[::-1])
        about = {"name": str(site), "loss": 0.5, "samples": 9, "state": ["dead"] + ["alive"] * 4}
        case = {"network": "resnet20", "seed": 0, "site": site}
        return record.Row(case, {**about, **figures, **costs}, 1.0, False, {})

    return [row(0, 0), row(1, 10)]


def test_within_a_site_is_not_over_all_channels():
    assert correlation(rows(), "flat", "zero KL", within=True).rho == pytest.approx(-1)
    # sites differ more than the channels of one
    assert correlation(rows(), "flat", "zero KL", within=False).rho > 0.3
    assert correlation(rows(), "depth", "zero KL", within=False).rho > 0.8
    assert math.isnan(correlation(rows(), "depth", "zero KL", within=True).rho)


def test_the_page_has_a_line_for_each_figure_and_what_the_dead_cost():
    text = page(rows())
    assert "**resnet20**: 10 channels of 2 sites; loss before pruning 0.500." in text
    assert text.count("| -1.00 ") >= 6
    assert "2 channels are dead" in text
    *_, line = insight_pruning.summary(rows()).splitlines()
    assert line.startswith(
        "| resnet20 | share of the highest branch | -1.00 (-1.00 to -1.00) | -1.00"
    )


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [insight_pruning, insight_cost])
def test_the_experiment_runs_on_made_up_data(experiment, tmp_path):
    found = experiment.main(["--smoke", "--out", str(tmp_path / "rows.jsonl"), "--device", "cpu"])
    assert len(found) == 3
    assert all(row.smoke for row in found)


@pytest.mark.parametrize(
    ("name", "table"),
    [("insight_pruning", insight_pruning.summary), ("insight_cost", insight_cost.page)],
)
def test_the_page_about_insight_has_the_figures_of_the_rows(name, table):
    kept = record.rows(record.file_of(name))
    assert kept
    assert not any(row.smoke for row in kept)
    assert table(kept) in (DOCS / "insight.md").read_text("utf-8")


def test_a_case_of_the_digits_reads_and_prunes(tmp_path):
    asked = argparse.Namespace(smoke=True)
    figures = insight_pruning.run({"network": "digits", "seed": 0, "site": 1}, asked)
    assert figures["name"] == "3"
    assert len(figures["zero KL"]) == 2
    assert all(cost > 0 for cost in figures["zero KL"])
