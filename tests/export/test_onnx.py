"""ONNX files of converted networks, run by onnxruntime."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import threshold_gating as tg
from threshold_gating.export import onnx as exporting
from threshold_gating.export import within
from threshold_gating.export.graph import ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


class Many(nn.Module):
    """Gates of every kind: modules, calls, in place, per channel, between inputs, softmax."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.prelu = nn.Linear(8, 8), nn.GELU(), nn.PReLU(8)
        self.relu, self.heads = (
            nn.ReLU(inplace=True),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )

    def forward(self, x):
        y = self.prelu(self.act(self.up(x)).transpose(1, 2)).transpose(1, 2)
        y = F.hardswish(y) + F.hardshrink(y, 0.1) + F.threshold(y, 0.2, 0.3) + F.elu(y)
        y = (
            y
            + F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], is_causal=True)[
                :, 0
            ]
        )
        y = y + self.heads(y, y, y)[0] + torch.softmax(y, -1)
        return self.relu(y) + torch.maximum(y, 0.5 * x)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    gated = tg.convert(Many().eval(), inputs=x)
    path = tmp_path_factory.mktemp("many") / "many.onnx"
    return gated, x, exporting.export(gated, x, path)


def test_every_gate_is_a_function_of_the_file_and_the_outputs_agree(many):
    made = many[2]
    assert made.parity < 1e-6  # float32, a dozen layers
    assert made.left == {}
    file = onnx.load(made.path)
    own = [n.op_type for n in file.graph.node if n.domain == exporting.DOMAIN]
    assert len(own) == len(made.sites) == 11
    assert {f.name for f in file.functions} == set(own)
    assert "many.onnx: " in str(made)
    assert "11 gates of 11 sites" in str(made)
    assert json.loads(json.dumps(made.to_dict()))["parity"] == made.parity


def test_batches_of_other_sizes_run(many):
    gated, _, made = many
    x = torch.randn(5, 5, 8)
    runs = exporting.session(made.path)
    (found,) = runs.run(None, exporting.feed(runs, x))
    with tg.kernels.use("reference"), torch.no_grad():
        assert torch.allclose(torch.as_tensor(found), gated(x), atol=2e-6)  # values of size 10


def test_a_token_sees_nothing_of_later_ones(many):
    """Causal masks survive: what is masked has a gate of exactly 0."""

    class Causal(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 1, 6, 4)
    gated = tg.convert(Causal(), inputs=x)
    path = many[2].path.parent / "causal.onnx"
    runs = exporting.session(exporting.export(gated, x, path).path)
    changed = x.clone()
    changed[:, :, -1] += 1
    first, second = (runs.run(None, exporting.feed(runs, z))[0] for z in (x, changed))
    assert (first[:, :, :-1] == second[:, :, :-1]).all()
    assert (first[:, :, -1] != second[:, :, -1]).any()


def test_the_file_says_its_instances(many):
    _, _, made = many
    found = exporting.read(made.path)
    assert found == made.sites
    assert {s.name: s.instances for s in found}["act"] == (tg.TAXONOMY["gelu"],)
    assert len({s.name: s.instances for s in found}["prelu:prelu#0"]) in (1, 8)


def test_loading_it_says_what_reads_it(many):
    with pytest.raises(tg.conversion.CheckpointError, match="tg export --read"):
        tg.load(many[2].path)


def test_what_says_nothing_of_gates_is_refused(tmp_path):
    (tmp_path / "no.onnx").write_bytes(b"no")
    with pytest.raises(ExportError, match=r"no\.onnx is no ONNX file|says nothing of gates"):
        exporting.read(tmp_path / "no.onnx")
    with pytest.raises(ExportError, match="there is no such file"):
        exporting.read(tmp_path / "none.onnx")


def test_learned_gates_of_channels_are_exported_as_they_are_now(tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.Hardtanh())
    x = torch.randn(2, 1, 8, 8)
    gated = tg.convert(net.eval(), inputs=x, train=("theta", "s", "c"), share="channel")
    with torch.no_grad():
        for p in tg.conversion.gate_parameters(gated).values():
            p.add_(torch.randn_like(p) * 0.1)
    made = exporting.export(gated, x, tmp_path / "net.onnx")
    assert made.parity < 1e-6  # float32
    assert [len(site.instances) for site in made.sites] == [4, 4]
    assert made.sites[0].instances[2].theta == gated[1].instance(2).theta


@pytest.mark.parametrize("kind", ["gru", pytest.param("lstm", marks=pytest.mark.slow)])
def test_recurrent_layers_are_unrolled_or_torchs_own(tmp_path, kind):
    class Rec(nn.Module):
        def __init__(self):
            super().__init__()
            self.rec = {"gru": nn.GRU, "lstm": nn.LSTM}[kind](4, 3, batch_first=True)

        def forward(self, x):
            return self.rec(x)[0]

    x = torch.randn(2, 2, 4)
    gated = tg.convert(Rec().eval(), inputs=x)
    kept = exporting.export(gated, x, tmp_path / "kept.onnx")
    native = exporting.export(gated, x, tmp_path / "native.onnx", form="native")
    assert kept.parity < 1e-6 > native.parity  # float32
    assert {s.name for s in kept.sites} == {f"rec:{kind}#0"}
    assert kept.left == {}
    assert native.sites == ()
    assert set(native.left) == {f"{kind} in rec"}
    assert "fixed in the file" in str(kept)  # its loop has as many steps as the inputs


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float16, 2e-3), pytest.param(torch.float64, 1e-14, marks=pytest.mark.slow)],
)
def test_other_types(tmp_path, dtype, bound):
    """float16 rounds each layer once, to 2^-11; the products of two layers may round elsewhere."""
    net = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.GELU()).eval().to(dtype)
    x = torch.randn(2, 8, dtype=dtype)
    made = exporting.export(tg.convert(net, inputs=x), x, tmp_path / "net.onnx")
    assert made.parity < bound


def test_what_onnxruntime_cannot_run_is_refused(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).eval().bfloat16()
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    with pytest.raises(ExportError, match="onnxruntime does not run this network"):
        exporting.export(tg.convert(net, inputs=x), x, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_that_computes_something_else_is_not_written(tmp_path, monkeypatch):
    net = tg.convert(nn.Sequential(nn.Linear(8, 8), nn.SiLU()).eval(), inputs=torch.randn(2, 8))
    before = exporting._constant

    def off(onnx, w, dtype):
        return before(onnx, w + 0.01, dtype)

    def softer(gate, bits=32):
        body = written(gate, bits)
        body.steps[0] = body.steps[0]._replace(kind="Tanh")
        return body

    written = exporting.written
    monkeypatch.setattr(exporting, "_constant", off)
    monkeypatch.setattr(exporting, "written", softer)
    with pytest.raises(ExportError, match=r"differs from the network by .* nothing is written"):
        exporting.export(net, torch.randn(2, 8), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


class Block(nn.Module):
    """A block of ViT-tiny, with its 197 tokens."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(192), nn.LayerNorm(192)])
        self.qkv, self.proj = nn.Linear(192, 3 * 192), nn.Linear(192, 192)
        self.mlp = nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 3, 64)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.mlp(self.norms[1](x))


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    return Block().eval(), torch.randn(1, 197, 192)


# Processor time of file and original, in turn, the least of 100 runs: what else the machine does
# hardly counts. The figures are those on two cores at a load of 4.


def test_every_gate_of_a_block_of_vit_takes_at_most_half_as_long_again(block, tmp_path):
    net, x = block
    made = exporting.export(tg.convert(net, inputs=x), x, tmp_path / "net.onnx")
    assert len(made.sites) == 2
    found = exporting.compared(net, made.path, x, repeats=100)
    assert found.exported / found.original < 1.6  # measured 1.22 to 1.40; the goal is 1.5
    assert "times as long" in str(found)


@pytest.mark.slow
def test_a_block_of_vit_with_gelu_left_to_torch_takes_as_long_as_the_original(block, tmp_path):
    net, x = block
    near = within.gated(net, x, 1e-4)  # GELU's gates are off by 5e-5
    assert set(near.native) == {"mlp.1"}
    made = exporting.export(near.model, x, tmp_path / "net.onnx", form="native")
    found = exporting.compared(net, made.path, x, repeats=100)
    assert found.exported / found.original < 1.15  # measured 0.98 to 1.04; the goal is 1.05


def test_networks_quantised_by_torchao_are_exported_by_torch_alone(tmp_path):
    class Int8Tensor(nn.Parameter):
        pass

    Int8Tensor.__module__ = "torchao.quantization"
    net = nn.Sequential(nn.Linear(4, 4), tg.Activation("silu"))
    net[0].__dict__["_parameters"]["weight"] = Int8Tensor(torch.randn(4, 4))
    with pytest.raises(ExportError, match="Int8Tensor of torchao, which ONNX has no word for"):
        exporting.export(net, torch.randn(2, 4), tmp_path / "net.onnx")
    with pytest.raises(tg.conversion.ConversionError, match="convert first, and call quantize_"):
        tg.convert(net, inputs=torch.randn(2, 4))


def test_without_onnx_it_is_said_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ExportError, match=r"onnx is not installed: pip install .*\[onnx\]"):
        exporting.read(tmp_path / "any.onnx")


class Named(nn.Module):
    def forward(self, x, Mask, state):  # noqa: N803 - names of files are in lower case
        return torch.relu(x) + 2 * Mask + 3 * state["b"] + 4 * state["a"]


def test_inputs_are_fed_by_their_names_whatever_their_order(tmp_path):
    x, mask, a, b = torch.randn(4, 3, 5)
    given = {"x": x, "Mask": mask, "state": {"b": b, "a": a}}
    turned = {"state": {"a": a, "b": b}, "Mask": mask, "x": x}
    gated = tg.convert(Named(), inputs=given)
    for inputs, again in ((given, turned), ((x, mask, given["state"]), (x, mask, turned["state"]))):
        exporting.export(gated, inputs, tmp_path / "net.onnx", dynamic=False)
        runs = exporting.session(tmp_path / "net.onnx")
        found = torch.as_tensor(runs.run(None, exporting.feed(runs, again))[0])
        assert torch.allclose(found, gated(**given), atol=1e-5)  # sums of size 10
    with pytest.raises(ExportError, match="does not name each of them once"):
        exporting.feed(runs, {"x": x, "Mask": mask})


@pytest.mark.parametrize("share", ["layer", "channel"])
def test_an_empty_batch_gives_an_empty_output(tmp_path, share):
    channels = 8 if share == "channel" else None
    gate = tg.Activation("elu", share=share, channels=channels, train=("tau", "theta", "s"))
    x = torch.randn(4, 8)
    made = exporting.export(gate, x, tmp_path / "net.onnx")
    assert "Softmax" in {n.op_type for f in onnx.load(made.path).functions for n in f.node}
    runs = exporting.session(made.path)
    assert runs.run(None, exporting.feed(runs, x[:0]))[0].shape == (0, 8)


def test_exports_in_threads_wait_for_each_other(tmp_path):
    x = torch.randn(2, 4)
    gated = tg.convert(nn.Sequential(nn.Linear(4, 4), nn.SiLU()).eval(), inputs=x)
    with ThreadPoolExecutor(3) as pool:
        paths = [tmp_path / f"{k}.onnx" for k in range(3)]
        made = list(pool.map(lambda path: exporting.export(gated, x, path), paths))
    assert all(m.parity <= m.bound and m.path.is_file() for m in made)
