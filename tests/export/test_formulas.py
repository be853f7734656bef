"""Gates in operators of ONNX: each row of the taxonomy against the reference in float64."""

import math

import pytest
import torch

import threshold_gating as tg
from threshold_gating.export.formulas import written
from threshold_gating.export.graph import ExportError, Gate
from threshold_gating.export.onnx import DOMAIN, OPSET, _Functions, session
from threshold_gating.kernels.structure import exact

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FAR = [0.0, 0.5, 1.0, 3.0, 6.0, 20.0, 100.0, 1e4, 1e6, 1e30]


def gate_of(t, **more):
    taus = t.tau if isinstance(t.tau, tuple) else (t.tau,)
    rows = [
        [torch.tensor(w, dtype=torch.float64) for w in row] for row in (taus, t.theta, t.s, t.c)
    ]
    return Gate("here", exact(t), tuple(map(tuple, rows)), **more)


def evaluated(gates, x):
    """What onnxruntime makes of gates at x, and the operators of each."""
    bits = 8 * x.element_size()
    functions, nodes, constants, outputs, steps = _Functions(onnx), [], [], [], []
    dtype = onnx.helper.np_dtype_to_tensor_dtype(x.numpy().dtype)
    for k, gate in enumerate(gates):
        body = written(gate, bits)
        steps.append([step.kind for step in body.steps])
        given = []
        for j, w in enumerate(body.numbers):
            number = (w if bits == 64 else w.float()).numpy()
            constants.append(onnx.numpy_helper.from_array(number, f"g{k}p{j}"))
            given.append(f"g{k}p{j}")
        nodes.append(
            onnx.helper.make_node(
                functions.name(gate, body), ["x", *given], [f"y{k}"], domain=DOMAIN
            )
        )
        outputs.append(onnx.helper.make_tensor_value_info(f"y{k}", dtype, x.shape))
    x_info = onnx.helper.make_tensor_value_info("x", dtype, x.shape)
    graph = onnx.helper.make_graph(nodes, "gates", [x_info], outputs, constants)
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    functions.put_into(model)
    onnx.checker.check_model(model)
    found = session(model).run(None, {"x": x.numpy()})
    return [torch.as_tensor(y) for y in found], steps


@pytest.fixture(scope="module")
def rows():
    """Every row of the taxonomy, near and far from its thresholds, by onnxruntime."""
    torch.manual_seed(0)
    far = torch.tensor(FAR)
    x = torch.cat([torch.randn(3000) * 3, far, -far])
    found, steps = evaluated([gate_of(t) for t in tg.TAXONOMY.values()], x)
    return x, dict(zip(tg.TAXONOMY, found, strict=True)), dict(zip(tg.TAXONOMY, steps, strict=True))


@pytest.mark.parametrize("key", tg.TAXONOMY)
def test_a_row_is_the_reference_to_float32_near_and_far(rows, key):
    x, found, _ = rows
    want = tg.TAXONOMY[key](x.double()).clamp(-3.4e38, 3.4e38)  # where float32 ends
    have = found[key].double().clamp(-3.4e38, 3.4e38)
    # at most 8 roundings of a number as large as x or y, whichever is larger
    size = torch.maximum(x.double().abs(), want.abs()) + 1
    assert ((have - want).abs() / size).max() < 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("key", "operators"),
    [
        ("relu", ["Relu"]),
        ("leaky_relu", ["Mul", "Max"]),
        ("hardtanh", ["Clip"]),
        ("relu6", ["Clip"]),
        ("hardsigmoid", ["Sub", "Mul", "Clip"]),
        ("hardswish", ["Mul", "Add", "Clip", "Mul"]),
        ("sigmoid", ["Sigmoid"]),
        ("tanh", ["Tanh"]),
        ("silu", ["Sigmoid", "Mul"]),
        ("quick_gelu", ["Mul", "Sigmoid", "Mul"]),
        ("threshold", ["LessOrEqual", "Where"]),
    ],
)
def test_a_row_has_few_operators(rows, key, operators):
    assert rows[2][key] == operators


def test_gelu_has_one_transcendental_operator_and_eleven_in_all(rows):
    kinds = rows[2]["gelu"]
    assert len(kinds) == 11
    assert [k for k in kinds if k in ("Exp", "Tanh", "Sigmoid", "Softmax", "Erf")] == ["Tanh"]


@pytest.mark.parametrize(
    "key", ["relu", "leaky_relu", "hardtanh", "hardshrink", "threshold", "abs"]
)
def test_hard_gates_are_equal_bit_by_bit_at_their_thresholds_too(rows, key):
    t = tg.TAXONOMY[key]
    at = torch.tensor([*t.theta, *(-w for w in t.theta), 0.0, -0.0])
    x = torch.cat([rows[0][:3000], at, at.nextafter(torch.tensor(1e9)), at.nextafter(-at - 1e9)])
    (found,), _ = evaluated([gate_of(t)], x)
    assert torch.equal(found, t(x))


@pytest.mark.parametrize("owner", [("lo", "lo"), ("hi", "hi"), ("lo", "hi"), ("hi", "lo")])
def test_a_jump_is_on_the_side_of_its_owner(owner):
    t = tg.TG(math.inf, (-1.0, 1.0), (0.5, 2.0, 1.0), (0.0, 3.0, -7.0), owner=owner)
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, math.nan, math.inf, -math.inf])
    (found,), _ = evaluated([gate_of(t)], x)
    assert torch.equal(found.nan_to_num(5.0), t(x).nan_to_num(5.0))


def test_nan_stays_nan_in_every_row():
    x = torch.tensor([math.nan, 1.0])
    found, _ = evaluated([gate_of(t) for t in tg.TAXONOMY.values()], x)
    assert all(y[0].isnan() and not y[1].isnan() for y in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types_are_as_good_as_their_rounding(dtype):
    keys = ["silu", "gelu", "mish", "hardswish", "gelu_tanh", "elu"]
    x = (torch.randn(500, dtype=torch.float64) * 3).to(dtype)
    found, _ = evaluated([gate_of(tg.TAXONOMY[k]) for k in keys], x)
    for key, y in zip(keys, found, strict=True):
        want = tg.TAXONOMY[key](x.double())
        # float16 is computed in float32 and rounded once; float64 in a dozen steps
        steps = 1 if dtype == torch.float16 else 40
        assert ((y.double() - want).abs() / (want.abs() + 1)).max() < steps * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "t",
    [
        tg.TG(3.0, (-20.0, -7.0, 7.0, 20.0), (0, -0.5, 0.5, 2.0, 1.0), (0, 1, 0, 1, 0)),
        tg.TG((0.5, 3.0), (1.0, -1.0), (0.0, 1.0, 2.0), (0.0, 0.5, -1.0)),
        tg.TG(2.0, 0.5, (1.0, 0.0), (0.0, 0.0)),
        tg.TG(1.0, 0.5, (-1.5, 2.0), (0.3, -1.0)),
        tg.TG(1.0, (-1.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)),
        tg.TG(1.0, (-1.0, 0.0, 1.0), (1.0, 0.3, 0.2, 0.0), (0.0, 0.0, 0.0, 0.0)),
        tg.TG(40.0, (-30.0, 30.0), (1.0, 2.0, 3.0), (0.0, 0.0, 0.0)),
    ],
)
def test_gates_of_any_numbers_keep_their_digits(t):
    far = torch.tensor(FAR)
    x = torch.cat([torch.linspace(-40, 40, 4001), far, -far])
    (found,), _ = evaluated([gate_of(t)], x)
    want = t(x.double())
    size = x.double().abs() * max(map(abs, t.s)) + max(map(abs, t.c)) + 1
    assert ((found.double() - want).abs() / size).max() < 1e-6  # 8 roundings, as above


def test_numbers_alone_do_not_make_another_function():
    gates = [gate_of(tg.taxonomy.leaky_relu(w)) for w in (0.1, 0.2, 0.3)]
    assert len({written(g).signature for g in gates}) == 1


def test_softmax_keeps_masked_logits_at_zero_and_rows_of_nothing_as_asked():
    z = torch.randn(4, 6) * 8
    z[0, 2:] = -math.inf
    z[1, :] = torch.finfo(torch.float32).min
    z[2, 0] = 60.0
    zero = Gate("here", None, masked=0.0)
    (found,), _ = evaluated([zero], z)
    assert (found[0, 2:] == 0).all()
    assert torch.allclose(found, torch.softmax(z.double(), -1).float(), atol=2e-7)  # 2 ulp of 1
    (rest, gone), _ = evaluated([zero, Gate("here", None)], torch.full((1, 3), -math.inf))
    assert torch.equal(rest, torch.zeros(1, 3))
    assert gone.isnan().all()


def test_a_soft_gate_whose_numbers_the_network_computes_is_refused():
    t = tg.TAXONOMY["silu"]
    whole = gate_of(t)
    gate = Gate("here", exact(t)._replace(theta=(None,)), (whole.rows[0], (None,), *whole.rows[2:]))
    with pytest.raises(ExportError, match="here is a soft gate whose numbers the network computes"):
        written(gate)
