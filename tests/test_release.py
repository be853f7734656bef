"""What is released: one version everywhere, a small wheel that is built alike, links that work there."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import threshold_gating as tg

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def built(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_is_below_1_mb_and_built_to_the_same_bytes(wheel, tmp_path):
    assert wheel.stat().st_size < 1_000_000
    assert built(tmp_path).read_bytes() == wheel.read_bytes()


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    listed = subprocess.run(
        ["git", "ls-files", "src/threshold_gating"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert names == {name.removeprefix("src/") for name in listed}


@pytest.mark.slow
def test_a_package_index_shows_a_readme_whose_links_lead_somewhere(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    text = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", text.partition("\n\n")[2])
    assert links
    assert all(link.startswith(("https://", "#")) for link in links)
    home = PROJECT["project"]["urls"]["Homepage"]
    for link in links:
        if link.startswith(home):
            assert (ROOT / link.removeprefix(f"{home}/blob/main/").partition("#")[0]).exists()


def test_the_version_is_one():
    version = tg.__version__
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version = {{{version}}}" in (ROOT / "docs/cite.md").read_text()
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)


def test_every_extra_has_a_line_on_the_page_of_installing():
    page = (ROOT / "docs/install.md").read_text()
    for_users = set(EXTRAS) - {"dev", "browser", "notebooks"}
    assert [name for name in sorted(for_users) if f"`{name}`" not in page] == []


def test_the_workflow_runs_the_script_that_everybody_runs():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "bash .ci/run" in text
    assert re.findall(r"uses: \S+@(\S+)", text)
    assert all(re.fullmatch(r"v\d+", tag) for tag in re.findall(r"uses: \S+@(\S+)", text))
