"""The analog page shows the rows that were measured; packed data is what was packed."""

import json

import pytest
import torch

from experiments import analog_data, analog_tables
from experiments.analog_networks import CHIPS, PRESETS


def test_the_tables_of_the_page_are_those_of_the_rows():
    """If not: `python -m experiments.analog_tables` writes them."""
    text = analog_tables.PAGE.read_text("utf-8")
    assert analog_tables.page(text, analog_tables.networks()) == text
    assert set(analog_tables.TABLES) == set(analog_tables.MARK.findall(text))


def test_every_row_that_draws_devices_has_five_chips_and_a_cell_is_their_mean_and_band():
    for found in analog_tables.networks():
        for section in ("millivolts", "temperature", "tuning", "sensitivity"):
            rows = found.held["rows"].get(section, {})
            assert all(len(values) >= CHIPS for values in rows.values()), (found.name, section)
        assert set(found.held["sites"]) == set(PRESETS)
        assert len(found.values("errors", "ideal")) == 1
    held = {"metric": "top-1 %", "rows": {"errors": {"theta 0.1": [90.0, 91.0, 92.5]}}}
    found = analog_tables.Found("resnet20", held)
    assert found.cell("errors", "theta 0.1") == "91.2 (90.0 to 92.5)"
    assert found.cell("errors", "theta 0.2") == "-"


def test_rows_that_failed_are_named_and_left_out(tmp_path, capsys):
    good = {"network": "resnet20", "section": "errors", "metric": "top-1 %", "what": "ideal"}
    rows = [{**good, "values": [91.0]}, {**good, "what": "theta 0.1", "error": "ValueError: no"}]
    (tmp_path / "resnet20.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = analog_tables.gathered(tmp_path)
    assert found["resnet20"]["rows"] == {"errors": {"ideal": [91.0]}}
    assert "left out: resnet20, theta 0.1: ValueError: no" in capsys.readouterr().out


@pytest.mark.parametrize("size", [(2, 5, 7, 3), (3, 1, 1, 3)])
def test_images_come_back_as_they_were(size):
    """Of noise, whose differences run over, and of a ramp."""
    noise = torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for images in (noise, torch.arange(noise.numel()).view(size).to(torch.uint8)):
        stored = analog_data.to_differences(images)
        assert torch.equal(analog_data.from_differences(stored), images)


def test_blocks_of_four_and_eight_bits_are_numbers_again():
    half = torch.tensor([0.5, -3.0], dtype=torch.float16).view(torch.uint8)
    codes = torch.arange(32) % 16
    packed = (codes[:16] | codes[16:] << 4).to(torch.uint8)
    (row,) = analog_data.unquantised(torch.cat([half, packed]).repeat(18)[None])
    assert torch.equal(row.view(18, 32)[3], 0.5 * codes - 3)
    eight = torch.arange(-16, 16).to(torch.int8)
    (row,) = analog_data.unquantised(
        torch.cat([half[:2], eight.view(torch.uint8)]).repeat(18)[None]
    )
    assert torch.equal(row.view(18, 32)[3], 0.5 * eight.float())
