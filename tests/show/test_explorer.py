"""The explorer's files, and what its JavaScript computes, by node: the same numbers as torch."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import threshold_gating as tg
from tests.show import explorer_checks as checks
from threshold_gating import TAXONOMY, TG
from threshold_gating.hardware import devices
from threshold_gating.show import explorer
from threshold_gating.show.explorer import sites

SOURCE = Path(explorer.__file__).parent


@pytest.fixture
def run(programs):
    """Call a function of the explorer's JavaScript on JSON values."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")

    def call(code, *arguments):
        given = json.dumps([[code, arguments]])
        command = ["node", programs / "explorer.cjs", SOURCE]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        (answer,) = json.loads(done.stdout)
        return answer

    return call


# What it computes


def test_values_derivatives_and_gates_are_torchs(run):
    checks.check_values(run)


def test_families_are_those_of_the_library_and_python_reads_the_code_back(run):
    checks.check_families(run)


@pytest.mark.parametrize("name", ["tau", "theta", "s", "c", "q", "clamp"])
def test_numbers_that_would_overflow_are_refused_and_smaller_ones_are_finite(run, name):
    given = {"tau": [1], "theta": [0], "s": [0, 1], "c": [0, 0], "q": [0, 0], "clamp": [-1, 1]}
    for size in (1e31, 1e200, 1e308):
        answer = run("Gates.read", given | {name: [*given[name][:-1], size]})
        assert answer["error"] == (
            f"the explorer shows numbers up to 1e+30; got {name} = {size:.0e}."
        )
    code = (
        "(t, x, named) => { t = Gates.read(t); const { y, d1, d2 } = Gates.evaluate(t, x);"
        " return [...y, ...d1, ...d2, ...Object.values(Theory.moments(t, 100)),"
        " Theory.nearest(t, named).rms]; }"
    )
    largest = {key: [*values[:-1], 1e30] for key, values in given.items() if key != "clamp"}
    found = run(code, largest | {"theta": [0]}, [-100, -1e-31, 0, 1e-31, 100], explorer.named())
    assert all(math.isfinite(float(v)) for v in found), found


def test_the_nearest_named_activation_is_found(run):
    checks.check_nearest(run)


def test_the_edge_of_chaos_is_that_of_the_theory(run):
    checks.check_edges(run, [1.5])


def test_a_chip_that_leaks_where_y_is_zero_is_not_said_to_be_right(run):
    t, pair = TG(math.inf, 4.01, (0, 1), (0, 0)), explorer.presets()["sky130-weak"]
    code = "(t, pair, chips, set) => Pairs.shown(Gates.read(t), pair, chips, set, [0, 3.9]).off"
    given = {"chip": 0, "reach": 4, "celsius": 27, "view": 5}
    assert run(code, t.to_dict(), pair, explorer.chips(), given) == "Infinity"
    zero = TG(1, 0, (0, 0), (0, 0))
    assert run(code, zero.to_dict(), pair, explorer.chips(), given) == 0


def test_a_chip_has_the_curve_that_the_simulation_gives_it(run):
    checks.check_chips(run, ["sky130-weak"])


def test_corners_are_where_the_slope_jumps(run):
    code = "(ts) => ts.map((t) => Gates.corners(Gates.read(t)))"
    instances = [TAXONOMY["relu"], TAXONOMY["silu"], checks.MADE["steps"], checks.MADE["clamped"]]
    relu, silu, steps, clamped = run(code, checks.written(instances))
    assert relu == [{"at": 0, "step": 0, "jump": 1}]
    assert silu == []
    assert [(c["at"], c["step"]) for c in steps] == [(-1, 1.5), (1, 0.5)]
    t = checks.MADE["clamped"]
    bounds = [t(torch.tensor([c["at"]], dtype=torch.float64)).item() for c in clamped]
    assert bounds == pytest.approx([-0.1, -0.1, 1.5], abs=1e-9)


# What it refuses

WRONG = [
    ({}, "needs 'tau'"),
    ({"tau": 1, "theta": [0], "s": [0, 1]}, "needs 'c'"),
    ({"tau": 1, "theta": [0], "s": [0, 1], "c": [0, 0], "k": 2}, "no 'k'"),
    ({"tau": 1, "theta": [0], "s": [0, 1, 2], "c": [0, 0]}, "K = 2 branches need 2 values of s"),
    ({"tau": -1, "theta": [0], "s": [0, 1], "c": [0, 0]}, "tau must be a positive number"),
    ({"tau": 0, "theta": [0], "s": [0, 1], "c": [0, 0]}, "tau must be a positive number"),
    ({"tau": "NaN", "theta": [0], "s": [0, 1], "c": [0, 0]}, "tau must be a positive number"),
    ({"tau": [1, 2], "theta": [0], "s": [0, 1], "c": [0, 0]}, "tau is one number or 1"),
    ({"tau": ["inf", 2], "theta": [0, 1], "s": [0, 1, 1], "c": [0, 0, 0]}, "at every threshold"),
    ({"tau": "inf", "theta": [1, 0], "s": [0, 1, 1], "c": [0, 0, 0]}, "in order"),
    ({"tau": 1, "theta": [1, 0], "s": [0, 1, 1], "c": [0, 0, 0], "form": "product"}, "in order"),
    ({"tau": 1, "theta": [0], "s": [0, 1], "c": [0, 0], "form": "sum"}, "form is softmax or"),
    ({"tau": 1, "theta": [0], "s": [0, 1], "c": [0, 0], "owner": ["lo"]}, "hard gates"),
    ({"tau": "inf", "theta": [0], "s": [0, 1], "c": [0, 0], "owner": ["low"]}, "owner is lo or hi"),
    (
        {"tau": "inf", "theta": [0, 0], "s": [0, 1, 1], "c": [0, 0, 0], "owner": ["lo", "hi"]},
        "to two regions",
    ),
    ({"tau": 1, "theta": [0], "s": [0, 1], "c": [0, 0], "clamp": [1, 0]}, "low < high"),
    ({"tau": 1, "theta": [0], "s": [0, 1], "c": [0, 0], "q": [1]}, "2 values of q"),
    ({"tau": 1, "theta": [None], "s": [0, 1], "c": [0, 0]}, "theta must be finite"),
]


def test_what_the_record_refuses_the_page_refuses_too(run):
    read = "(all) => all.map((given) => { try { Gates.read(given); return ''; } catch (e) { return e.message; } })"
    said = run(read, [given for given, _ in WRONG])
    for (given, words), message in zip(WRONG, said, strict=True):
        assert words in message
        with pytest.raises((ValueError, TypeError)):
            TG.from_dict(given)


def test_more_branches_than_the_page_shows_are_refused(run):
    many = {"tau": 1, "theta": list(range(8)), "s": [0] * 9, "c": [0] * 9}
    answer = run("(t) => Gates.read(t)", many)
    assert answer == {"error": "the explorer shows K = 1 to 8 branches; got K = 9."}
    assert run("() => Gates.MOST") == explorer.BRANCHES


# The address


def test_an_address_holds_everything(run):
    code = (
        "(ts, data) => ts.map((t) => { const state = {...State.around(Gates.read(t)), pair: 'gf180-weak',"
        " chip: 7, reach: 2.5, celsius: 60, view: 9, variance: 0.3, site: 'layer1.0:relu#0[3] &%'};"
        " const again = State.read('#' + State.write(state), data);"
        " return JSON.stringify(again) === JSON.stringify(state); })"
    )
    data = explorer.data("silu", "", None)
    assert all(run(code, checks.written(checks.INSTANCES.values()), data))


START = "tau=1&theta=0&s=0,1&c=0,0"
DAMAGED = [
    ("x", "'x' means nothing here"),
    ("tau=1", "needs 'theta'"),
    (START.replace("tau=1", "tau=-1"), "tau must be a positive number"),
    (START.replace("tau=1", "tau=nan"), "tau must be a number, or inf; got 'nan'"),
    (START.replace("tau=1", "tau="), "tau is one number or 1"),
    (START.replace("c=0,0", "c=0"), "K = 2 branches need 2 values of c; got 1"),
    (START + "&c=0,0", "'c' is given twice"),
    (START.replace("theta=0", "theta=0x1"), "theta must be a number; got '0x1'"),
    (START + "&pair=sky13", "there is no preset 'sky13'; there are sky130-weak"),
    (START + "&pair=__proto__", "there is no preset '__proto__'; there are sky130-weak"),
    (START + "&chip=99", "chip is a whole number from 0 to 31; got 99"),
    (START + "&chip=-1", "chip is from 0 on"),
    (START + "&pair=sky130-weak&celsius=200", "was measured from -40 to 125 C"),
    (START + "&view=0", "view is from 0.5 to 100; got 0"),
    (START + "&variance=1e9", "variance is from 0.01 to 100"),
    (START + "&site=%E0%A4%A", "site cannot be read"),
    ("tau=1&theta=0,1,2,3,4,5,6,7&s=0,0,0,0,0,0,0,0,0&c=0,0,0,0,0,0,0,0,0", "got K = 9"),
    ("<script>alert(1)</script>", "means nothing here"),
]


@pytest.mark.parametrize(("fragment", "words"), DAMAGED)
def test_a_damaged_address_is_refused_with_the_reason(run, fragment, words):
    answer = run("State.read", fragment, explorer.data("silu", "", None))
    assert words in answer["error"]


# Files of networks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.relu = nn.Linear(4, 70), nn.GELU(), nn.ReLU()

    def forward(self, x):
        x = self.relu(torch.tanh(self.relu(self.act(self.a(x)))))
        return torch.softmax(x, -1)


@pytest.fixture
def learned(tmp_path):
    """A network whose gates learned, and the folder that it was saved in."""
    network = tg.convert(
        Net(), inputs=torch.randn(3, 4), train=("theta", "s", "c"), share="channel", sites={":softmax#0": None}
    )  # fmt: skip
    with torch.no_grad():
        for p in tg.conversion.gate_parameters(network).values():
            p.add_(torch.rand_like(p) / 9)
    return network, tg.conversion.save(network, tmp_path / "saved")


def test_sites_of_a_network_have_what_was_learned_and_so_has_its_folder(learned):
    network, folder = learned
    found = sites.of_model("net", network)["sites"]
    assert [site["name"] for site in found] == ["act", "relu", "relu#1", ":tanh#0", ":softmax#0"]
    assert found[-1] == {
        **{"name": ":softmax#0", "kind": "not a gate", "total": 0, "instances": []},
        "says": "no gate stands here",
    }
    gates = dict(tg.conversion.learned_gates(network))
    for site in found[:-1]:
        want = gates[site["name"]].instances()
        assert site["total"] == 70
        assert [TG.from_dict(t) for t in site["instances"]] == want[: sites.GROUPS]
        assert "the first 64 of 70 gates, one per channel" in site["says"]
    assert sites.of_saved(folder)["sites"] == found


def test_the_config_alone_says_that_it_has_only_the_start(learned):
    _, folder = learned
    act, *_ = sites.of_saved(folder / "tg_config.json")["sites"]
    assert [TG.from_dict(t) for t in act["instances"]] == [TAXONOMY["gelu"]]
    assert "this is where it started" in act["says"]


def test_the_page_opens_a_config_as_the_library_does(run, learned):
    _, folder = learned
    text = (folder / "tg_config.json").read_text()
    got, want = run("State.open", text, "x.json"), sites.of_saved(folder / "tg_config.json")
    assert got["name"] == want["name"]
    keys = ("name", "kind", "total")
    assert [[s[k] for k in keys] for s in got["sites"]] == [
        [s[k] for k in keys] for s in want["sites"]
    ]
    for mine, theirs in zip(got["sites"], want["sites"], strict=True):
        assert [*map(TG.from_dict, mine["instances"])] == [*map(TG.from_dict, theirs["instances"])]
        assert "this is where it started" in mine["says"] or not mine["instances"]


def test_recurrent_gates_and_sites_without_a_curve_are_named(run, tmp_path):
    network = tg.convert(nn.Sequential(nn.LSTM(3, 2)), inputs=torch.randn(4, 1, 3))
    with pytest.raises(ValueError, match="no site with a curve"):
        sites.of_model("net", network)
    own = nn.Sequential(tg.LSTM(3, 2))
    found = sites.of_model("own", own)["sites"]
    assert len(found) == 5
    assert all("what its units learned is not shown" in site["says"] for site in found)
    text = (tg.conversion.save(own, tmp_path / "own") / "tg_config.json").read_text()
    got = run("State.open", text, "x.json")["sites"]
    assert [(s["name"], s["says"]) for s in got] == [(s["name"], s["says"]) for s in found]


BROKEN = [
    ("", "it is not JSON"),
    ("{", "it is not JSON"),
    ("[]", "it is no config of gates"),
    ("null", "it is no config of gates"),
    ('{"modules": []}', "it is no config of gates"),
    ('{"modules": [], "owners": [], "recurrent": []}', "no site with a curve"),
    ('{"modules": [{"name": "a"}], "owners": [], "recurrent": []}', "it is damaged"),
    (
        '{"modules": [{"name": "a", "calls": [{"kind": "relu", "exact": true, "instance": {"tau": -1, '
        '"theta": [0], "s": [0, 1], "c": [0, 0]}}]}], "owners": [], "recurrent": []}',
        "it is damaged: site a: tau must be a positive number",
    ),
    ('{"theta": [0]}', "an instance needs 'tau'"),
]


@pytest.mark.parametrize(("text", "words"), BROKEN)
def test_a_file_that_is_no_config_is_refused_with_the_reason(run, text, words):
    assert words in run("State.open", text, "x.json")["error"]


def test_one_instance_is_a_file_too(run):
    text = json.dumps(checks.MADE["product"].to_dict())
    (site,) = run("State.open", text, "x.json")["sites"]
    assert [TG.from_dict(t) for t in site["instances"]] == [checks.MADE["product"]]


# The files themselves


def test_the_page_refers_to_its_own_files_only_and_holds_its_data():
    contents = explorer.files("gelu", preset="sky130-weak")
    page = contents[explorer.PAGE].decode()
    refers = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert set(refers) == {*explorer.PARTS, "data:,"}
    assert [name for name in refers if name.endswith(".js")] == [*explorer.PARTS[1:]]
    known = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert (known["start"], known["preset"]) == ("gelu", "sky130-weak")
    assert list(known["presets"]) == list(devices.presets())
    assert [TG.from_dict(row["instance"]) for row in known["rows"]] == list(TAXONOMY.values())
    for name, content in contents.items():
        outside = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?:|//cdn|@import|url\(|fetch\(|XMLHttp|WebSocket|eval\(|innerHTML", outside
        ), name


def test_a_name_of_a_network_cannot_leave_the_data():
    evil = "</script><script>alert(1)</script>"
    site = {
        "name": evil,
        "kind": "relu",
        "says": "",
        "total": 1,
        "instances": [TAXONOMY["relu"].to_dict()],
    }
    page = explorer.files(network={"name": evil, "sites": [site]})[explorer.PAGE].decode()
    assert evil not in page
    assert page.count("<script") == len(explorer.PARTS)


def test_named_functions_are_the_functions_and_not_their_instances():
    named = explorer.named()
    x = torch.tensor(named["x"], dtype=torch.float64)
    assert torch.equal(
        torch.tensor(named["values"]["gelu"], dtype=torch.float64), nn.functional.gelu(x)
    )
    assert {"relu", "relu6", "hardtanh", "elu"} <= named["values"].keys()  # all told apart
    assert not {"gelu_k3", "hardtanh_clamp", "celu"} & named["values"].keys()
    assert not any(math.isnan(v) for values in named["values"].values() for v in values)


def test_files_are_written_again_but_not_over_another_page(tmp_path):
    contents = explorer.files()
    page = explorer.write(tmp_path / "a" / "b", contents)
    assert explorer.write(page.parent, contents) == page
    assert {p.name: p.read_bytes() for p in page.parent.iterdir()} == contents
    page.write_text("<h1>mine</h1>")
    with pytest.raises(ValueError, match="is another page and stays as it is"):
        explorer.write(page.parent, contents)
    assert page.read_text() == "<h1>mine</h1>"


def test_the_documentation_gets_the_same_files():
    """By the hook that mkdocs.yml names, as a build calls it."""
    pytest.importorskip("mkdocs")
    from mkdocs.config import load_config
    from mkdocs.structure.files import Files

    config = load_config(str(Path(__file__).parents[2] / "mkdocs.yml"))
    found = config.plugins.on_files(Files([]), config=config)
    given = {file.src_uri: file.content_bytes for file in found}
    wanted = {f"explorer/{name}": content for name, content in explorer.files().items()}
    assert {name: given[name] for name in wanted} == wanted


def test_the_parts_are_short_enough_to_read():
    for name in (explorer.PAGE, *explorer.PARTS):
        assert len((SOURCE / name).read_text("utf-8").splitlines()) <= 450, name
