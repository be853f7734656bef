"""The tree and the picture in docs/architecture.md, made from the sources so that they stay true.

`python -m tools.architecture` writes both; a test fails when they are not those of the sources.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "threshold_gating"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
START, END = "<!-- tree: made by tools/architecture.py -->", "<!-- end of the tree -->"

# The modules of the root are one box: the paper's equations, in plain torch.
EQUATIONS = "equations"
_APART = {"__init__", "__main__", "_version"}
# The tests of a module that has no file of its own name in tests/.
HELD_BY = {
    "cli/demo/networks.py": "cli/test_demo.py",
    "cli/energy.py": "cli/test_energy_command.py",
    "cli/evaluate.py": "conversion/test_perplexity.py",
    "cli/insight.py": "cli/test_insight_command.py",
    "cli/pages.py": "cli/test_report_command.py",
    "cli/report.py": "cli/test_report_command.py",
    "cli/rtl.py": "cli/test_rtl_command.py",
    "cli/shared.py": "cli/test_options.py",
    "cli/spec.py": "cli/test_convert.py",
    "cli/spice.py": "cli/test_spice_command.py",
    "cli/spice_cell.py": "cli/test_spice_command.py",
    "cli/spice_pair.py": "cli/test_spice_command.py",
    "cli/spice_tables.py": "cli/test_spice_command.py",
    "conversion/answering.py": "conversion/test_intercept.py",
    "conversion/aten_ops.py": "conversion/test_audit.py",
    "fitting/options.py": "fitting/test_fitting.py",
    "fitting/scaled.py": "fitting/test_search.py",
    "kernels/blend/kept.py": "export/test_graph.py",
    "primitive/graphs.py": "export/test_graph.py",
    "conversion/checkpoint/beside.py": "conversion/test_pretrained.py",
    "conversion/checkpoint/card.py": "conversion/test_pretrained.py",
    "conversion/checkpoint/compare.py": "cli/test_convert.py",
    "conversion/checkpoint/digest.py": "conversion/test_pretrained.py",
    "conversion/checkpoint/files.py": "conversion/test_checkpoint.py",
    "conversion/checkpoint/pretrained.py": "conversion/test_pretrained.py",
    "conversion/checkpoint/save_load.py": "conversion/test_checkpoint.py",
    "conversion/checkpoint/schema.py": "conversion/test_checkpoint.py",
    "conversion/choices.py": "conversion/test_plan.py",
    "conversion/enumeration.py": "conversion/test_proof.py",
    "conversion/hub.py": "conversion/test_pretrained.py",
    "conversion/learned_calls.py": "conversion/test_learn.py",
    "conversion/lines.py": "conversion/test_intercept.py",
    "conversion/recomputing.py": "conversion/test_intercept.py",
    "conversion/record.py": "conversion/test_proof.py",
    "conversion/sampling.py": "conversion/test_calibration.py",
    "conversion/site.py": "conversion/test_plan.py",
    "conversion/site_error.py": "conversion/test_certificate.py",
    "conversion/verification.py": "conversion/test_certificate.py",
    "fitted.py": "test_taxonomy.py",
    "insight/attention.py": "insight/test_heads.py",
    "insight/gates.py": "insight/test_reading.py",
    "insight/looking.py": "insight/test_reading.py",
    "insight/maps.py": "insight/test_drawing.py",
    "insight/records.py": "insight/test_reading.py",
    "insight/text.py": "insight/test_reading.py",
    "fitting/inputs.py": "fitting/test_fitting.py",
    "fitting/minimax.py": "fitting/test_fitting.py",
    "fitting/varpro.py": "fitting/test_fitting.py",
    "hardware/assumptions.py": "hardware/test_energy.py",
    "hardware/crossbar_layers.py": "hardware/test_crossbar.py",
    "export/body.py": "export/test_formulas.py",
    "export/soft.py": "export/test_formulas.py",
    "hardware/digital/bench.py": "hardware/test_rtl.py",
    "hardware/digital/codes.py": "hardware/test_fixed_point.py",
    "hardware/digital/coverify.py": "hardware/digital/test_digital_network.py",
    "hardware/digital/keys.py": "hardware/digital/test_digital_network.py",
    "hardware/digital/narrow.py": "hardware/digital/test_digital_network.py",
    "hardware/digital/network.py": "hardware/digital/test_digital_network.py",
    "hardware/digital/site.py": "hardware/digital/test_digital_network.py",
    "hardware/digital/format.py": "hardware/test_fixed_point.py",
    "hardware/digital/search.py": "hardware/digital/test_segments.py",
    "hardware/digital/synthesis.py": "hardware/test_rtl.py",
    "hardware/digital/unit.py": "hardware/test_fixed_point.py",
    "hardware/digital/verilog.py": "hardware/test_rtl.py",
    "hardware/digital/walk.py": "hardware/digital/test_digital_network.py",
    "hardware/drawn.py": "hardware/test_analog.py",
    "hardware/energy_text.py": "hardware/test_energy.py",
    "hardware/lightning.py": "hardware/test_analog.py",
    "hardware/report.py": "hardware/test_analog.py",
    "hardware/seen.py": "hardware/test_analog.py",
    "kernels/attention/backward.py": "kernels/attention/test_attention_kernels.py",
    "kernels/attention/forward.py": "kernels/attention/test_attention_kernels.py",
    "kernels/attention/function.py": "kernels/attention/test_attention_kernels.py",
    "kernels/attention/gates.py": "kernels/attention/test_attention_kernels.py",
    "kernels/attention/launch.py": "kernels/attention/test_attention_kernels.py",
    "kernels/attention/tiles.py": "kernels/attention/test_attention_kernels.py",
    "kernels/blend/arithmetic.py": "kernels/blend/test_blend.py",
    "kernels/blend/cpu.py": "kernels/blend/test_blend.py",
    "kernels/blend/formulas.py": "kernels/blend/test_pairs.py",
    "kernels/blend/function.py": "kernels/blend/test_blend.py",
    "kernels/blend/gpu.py": "kernels/blend/test_pairs.py",
    "kernels/blend/gradients.py": "kernels/blend/test_gpu_tiles.py",
    "kernels/blend/graph.py": "kernels/blend/test_compile.py",
    "kernels/blend/kernels.py": "kernels/blend/test_pairs.py",
    "kernels/blend/parameters.py": "kernels/blend/test_pairs.py",
    "kernels/blend/places.py": "kernels/blend/test_gpu_tiles.py",
    "kernels/blend/steps.py": "kernels/blend/test_blend.py",
    "kernels/blend/sums.py": "kernels/blend/test_pairs.py",
    "kernels/blend/tiles.py": "kernels/blend/test_blend.py",
    "kernels/call.py": "kernels/test_structure.py",
    "kernels/instructions.py": "kernels/blend/test_pairs.py",
    "kernels/product/formula.py": "nn/test_dense.py",
    "kernels/product/function.py": "nn/test_dense.py",
    "kernels/product/one_vector_kernels.py": "kernels/product/test_one_vector.py",
    "kernels/product/two_soft_kernels.py": "kernels/product/test_two_soft.py",
    "kernels/recurrent/gates.py": "kernels/recurrent/test_lstm.py",
    "kernels/recurrent/lstm_kernels.py": "kernels/recurrent/test_lstm.py",
    "kernels/synapse/arithmetic.py": "kernels/synapse/test_synapse.py",
    "kernels/synapse/formula.py": "nn/test_dense.py",
    "kernels/synapse/function.py": "kernels/synapse/test_synapse.py",
    "kernels/synapse/gpu.py": "kernels/synapse/test_synapse.py",
    "kernels/synapse/kernels.py": "kernels/synapse/test_synapse.py",
    "kernels/synapse/pair_kernels.py": "kernels/synapse/test_synapse.py",
    "kernels/runtime.py": "kernels/blend/test_blend.py",
    "kernels/weights.py": "kernels/blend/test_pairs.py",
    "logits.py": "nn/test_attention.py",
    "nn/rnn_steps.py": "nn/test_rnn.py",
    "nn/tying.py": "nn/test_dense.py",
    "primitive/arguments.py": "test_primitive.py",
    "primitive/branches.py": "test_primitive.py",
    "primitive/hard.py": "test_primitive.py",
    "primitive/reading.py": "test_primitive_reading.py",
    "primitive/soft.py": "test_primitive.py",
    "show/demo.py": "show/test_demo_page.py",
    "show/details.py": "show/test_report.py",
    "show/digital.py": "cli/test_rtl_command.py",
    "show/energy.py": "cli/test_energy_command.py",
    "show/functions.py": "show/test_seen.py",
    "show/panel.py": "show/test_report.py",
    "show/explorer/server.py": "cli/test_explore.py",
    "show/explorer/sites.py": "show/test_explorer.py",
    "show/simulation.py": "cli/test_simulate.py",
    "theory/explanation.py": "theory/test_claims.py",
    "training/closeness.py": "training/test_promotion.py",
    "training/families.py": "training/test_groups.py",
    "training/graph.py": "training/test_promotion.py",
    "training/paths.py": "training/test_promotion.py",
    "training/tiers.py": "training/test_promotion.py",
}


def first_line(path: Path) -> str:
    """The first line of a module's docstring, which says what the module is."""
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if not said:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring; it says what the module is.")
    return said.splitlines()[0].rstrip(".")


def tests_of(path: Path) -> str:
    """The tests of a module: the file of its name, or the file of HELD_BY."""
    inside = path.relative_to(SOURCE)
    if path.stem in _APART:
        return ""
    named = f"{inside.parent / f'test_{path.stem}.py'}"
    held = named if (ROOT / "tests" / named).is_file() else HELD_BY.get(str(inside), "")
    if not (ROOT / "tests" / held).is_file():
        raise ValueError(f"{inside} has no tests/{named}; say in HELD_BY which file holds it.")
    return f"`tests/{held}`"


def tree() -> str:
    """A table of every module: what it is, and where its tests are."""
    lines = ["| module | what it is | tests |", "| --- | --- | --- |"]
    for path in sorted(SOURCE.rglob("*.py"), key=lambda p: (p.parent != SOURCE, p.parts)):
        if path.stem in ("__main__", "_version"):
            continue
        name = path.relative_to(ROOT).as_posix().removesuffix("__init__.py")
        if name == "src/threshold_gating/":
            name += "__init__.py"
        lines.append(f"| `{name}` | {first_line(path)} | {tests_of(path)} |")
    return "\n".join(lines)


def imports() -> dict[str, set[str]]:
    """For each folder of the package (the root is one): the other folders that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        if len(inside.parts) == 1 and inside.stem in _APART:
            continue
        here = inside.parts[0] if len(inside.parts) > 1 else EQUATIONS
        here = EQUATIONS if here == "primitive" else here  # one of the equations, in two files
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(SOURCE.name):
                inner = (node.module or "").split(".")[1:]
                names = inner[:1] or [alias.name for alias in node.names]
                found.setdefault(here, set()).update(
                    name if (SOURCE / name).is_dir() and name != "primitive" else EQUATIONS
                    for name in names
                    if name not in _APART
                )
    return {here: there - {here} for here, there in found.items()}


def levels(graph: dict[str, set[str]]) -> dict[str, int]:
    """How high each folder stands: one above the highest that it imports."""

    def height(name: str, below: tuple[str, ...] = ()) -> int:
        if name in below:
            raise ValueError(f"imports go round: {' -> '.join((*below, name))}")
        return max((1 + height(n, (*below, name)) for n in graph.get(name, ())), default=0)

    return {name: height(name) for name in graph}


def direct(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others: a -> c is left out beside a -> b -> c."""

    def reach(name: str) -> set[str]:
        return set().union(*({n} | reach(n) for n in graph.get(name, ())))

    return sorted(
        (name, n)
        for name, there in graph.items()
        for n in there
        if not any(n in reach(m) for m in there - {n})
    )


_WIDE, _HIGH, _GAP_X, _GAP_Y, _EDGE = 200, 54, 40, 46, 20


def picture() -> str:
    """The folders as boxes, each above what it imports, with the direct imports as arrows."""
    graph = imports()
    height = levels(graph)
    rows = [sorted(n for n in graph if height[n] == h) for h in range(max(height.values()) + 1)]
    width = max(map(len, rows)) * (_WIDE + _GAP_X) - _GAP_X + 2 * _EDGE
    tall = len(rows) * (_HIGH + _GAP_Y) - _GAP_Y + 2 * _EDGE
    at: dict[str, tuple[float, float]] = {}
    for h, row in enumerate(rows):
        left = (width - len(row) * (_WIDE + _GAP_X) + _GAP_X) / 2
        for i, name in enumerate(row):
            at[name] = (left + i * (_WIDE + _GAP_X), tall - _EDGE - _HIGH - h * (_HIGH + _GAP_Y))
    arrows = [_arrow(at[a], at[b]) for a, b in direct(graph)]
    boxes = [_box(name, *at[name]) for row in rows for name in row]
    return "\n".join([_HEAD.format(width=width, tall=tall), *arrows, *boxes, "</svg>", ""])


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall}" \
font-family="sans-serif" text-anchor="middle">
<title>The folders of the package; an arrow points to what a folder imports</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0 0L8 4L0 8z" fill="#57606a"/></marker></defs>
<rect width="{width}" height="{tall}" fill="#ffffff"/>"""
_IN_THE_ROOT = "primitive, instance, taxonomy, ..."


def _box(name: str, x: float, y: float) -> str:
    count = len(list((SOURCE / name).rglob("*.py"))) if name != EQUATIONS else 0
    below = f"{count} files" if count else _IN_THE_ROOT
    label = f"{name}/" if count else name
    middle = x + _WIDE / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{_WIDE}" height="{_HIGH}" rx="6" fill="#eef4fb" '
        f'stroke="#3b6ea5"/>\n<text x="{middle:g}" y="{y + 23:g}" font-size="16" '
        f'fill="#1b2733">{label}</text>\n<text x="{middle:g}" y="{y + 42:g}" font-size="11" '
        f'fill="#57606a">{below}</text>'
    )


def _arrow(a: tuple[float, float], b: tuple[float, float]) -> str:
    """From the lower edge of one box to the upper edge of the other."""
    (xa, ya), (xb, yb) = a, b
    lean = 0.3 * (xb - xa) * _WIDE / (abs(xb - xa) + _WIDE)  # not all from one point
    start, end = (xa + _WIDE / 2 + lean, ya + _HIGH), (xb + _WIDE / 2 - lean, yb)
    return (
        f'<path d="M{start[0]:.0f} {start[1]:.0f}L{end[0]:.0f} {end[1]:.0f}" stroke="#57606a" '
        'fill="none" marker-end="url(#tip)"/>'
    )


def page() -> str:
    """The page with the tree of today between its two marks."""
    text = PAGE.read_text("utf-8")
    before, rest = text.split(START)
    return f"{before}{START}\n{tree()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write the page and the picture."""
    PAGE.write_text(page(), "utf-8")
    PICTURE.write_text(picture(), "utf-8")


if __name__ == "__main__":
    main()
