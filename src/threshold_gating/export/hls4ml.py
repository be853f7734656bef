"""`convert`: a network of layers and gates as an hls4ml model, every activation by one C++ header.

The layer is registered with hls4ml through its extension API; `threshold_gate.h`, beside this file,
has the arithmetic, and a layer gives it numbers alone. The model is compiled by g++ and runs as
hls4ml's C simulation.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from threshold_gating.export.graph import ExportError, needed
from threshold_gating.instance import TG
from threshold_gating.nn.activation import Activation

_needed = functools.partial(needed, extra="hls4ml")
HEADER = Path(__file__).with_name("threshold_gate.h")
_CONFIG = """struct config{index} : nnet::threshold_gate_config {{
    static const unsigned n_in = {n_in};
    static const unsigned branches = {branches};
    static const unsigned groups = {groups};
    static const bool hard = {hard};
    static const double *tau() {{ static const double w[] = {{{tau}}}; return w; }}
    static const double *theta() {{ static const double w[] = {{{theta}}}; return w; }}
    static const double *s() {{ static const double w[] = {{{s}}}; return w; }}
    static const double *c() {{ static const double w[] = {{{c}}}; return w; }}
    static const bool *owner_is_above() {{ static const bool w[] = {{{owner}}}; return w; }}
}};
"""
_CALL = "nnet::threshold_gate<{input_t}, {output_t}, {config}>({input}, {output});"


def convert(
    model: nn.Module,
    shape: Sequence[int],
    folder: str | os.PathLike[str],
    *,
    precision: str = "ap_fixed<20,8>",
    backend: str = "Vitis",
) -> Any:
    """The model of hls4ml, not yet compiled: `.compile()` and `.predict(x)` run it.

    Args:
        model: a converted network of torch's own layers and `Activation` modules.
        shape: of one input, without the batch.
        folder: where the project is written.
        precision: the type of every number between layers.
        backend: of hls4ml, one that writes for the C++ of Vivado: "Vitis" or "Vivado".
    """
    hls4ml = _needed("hls4ml")
    _register(backend)
    ready = _with_gates(model)
    options = {"default_precision": precision, "backend": backend}
    config = hls4ml.utils.config_from_pytorch_model(ready, tuple(shape), **options)
    return hls4ml.converters.convert_from_pytorch_model(
        ready,
        hls_config=config,
        output_dir=os.fspath(folder),
        backend=backend,
        io_type="io_parallel",
    )


def _with_gates(model: nn.Module) -> nn.Module:
    """A copy whose activations are leaves to hls4ml; calls it cannot see are refused."""
    ready = copy.deepcopy(model).eval()
    kind = _gate_class()
    if isinstance(ready, Activation):
        ready = nn.Sequential(ready)
    for name, module in list(ready.named_modules()):
        if "tg_sites" in vars(module):
            calls = ", ".join(vars(module)["tg_sites"] or {"as they come": None})
            raise ExportError(
                f"export: {name or 'the network'} calls {calls} in its forward, which hls4ml does "
                "not trace; write these as modules (nn.SiLU() in place of F.silu) and convert."
            )
        for child, part in list(module.named_children()):
            if isinstance(part, Activation):
                _check(f"{name}.{child}".lstrip("."), part)
                setattr(module, child, kind(part.instances()))
    return ready


def _check(name: str, act: Activation) -> None:
    t = act.init
    if t.q is not None or t.clamp is not None or t.form == "product" or t.K > 8:
        raise ExportError(
            f"export: {name} is {t}; the header has up to 8 affine branches under softmax gates or "
            "hard ones. `tg.fit` gives such an instance of any activation."
        )
    if act.share not in ("net", "layer") and act.axis not in (-1, 1):
        raise ExportError(
            f"export: {name} has its channels at axis {act.axis}; hls4ml at the last."
        )


@functools.cache
def _gate_class() -> Any:
    base: Any = _needed("hls4ml.utils.torch").HLS4MLModule

    class ThresholdGate(base):  # type: ignore[misc]
        """What hls4ml meets in place of an `Activation`."""

        def __init__(self, instances: Sequence[TG]) -> None:
            super().__init__()
            self.instances = list(instances)

        def forward(self, x: Tensor) -> Tensor:
            return x  # hls4ml asks for shapes alone

    return ThresholdGate


@functools.cache
def _register(backend: str) -> None:
    """The layer, how it is read, and what is written of it."""
    hls4ml = _needed("hls4ml")
    layers, attributes = _needed("hls4ml.model.layers"), _needed("hls4ml.model.attributes")
    written = _needed("hls4ml.backends.template")
    layer: Any = layers.Layer
    config: Any = written.LayerConfigTemplate
    call: Any = written.FunctionCallTemplate

    class HThresholdGate(layer):  # type: ignore[misc]
        _expected_attributes = (attributes.Attribute("n_in"), attributes.Attribute("branches"))

        def initialize(self) -> None:
            source = self.get_input_variable()
            self.add_output_variable(source.shape)
            self.set_attr("n_in", source.size())

    class Config(config):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(HThresholdGate)

        def format(self, node: Any) -> str:
            words = {k: node.get_attr(k) for k in ("n_in", "branches", "groups", "hard", *_ROWS)}
            return _CONFIG.format(index=node.index, **words)

    class Call(call):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(HThresholdGate, include_header=[f"nnet_utils/{HEADER.name}"])

        def format(self, node: Any) -> str:
            return _CALL.format(**self._default_function_params(node))

    if "HThresholdGate" not in layers.layer_map:
        layers.register_layer("HThresholdGate", HThresholdGate)
        hls4ml.converters.register_pytorch_layer_handler("ThresholdGate", _parsed)
    target = hls4ml.backends.get_backend(backend)
    target.register_template(Config)
    target.register_template(Call)
    target.register_source(HEADER)


_ROWS = ("tau", "theta", "s", "c", "owner")


def _parsed(
    operation: str, name: str, names: Any, shapes: Any, node: Any, module: Any, *rest: Any
) -> Any:
    """The numbers of a layer, one row of K for each group."""
    found = module.instances
    rows: dict[str, list[str]] = {key: [] for key in _ROWS}
    for t in found:
        taus = t.tau if isinstance(t.tau, tuple) else (t.tau,) * (t.K - 1)
        rows["tau"] += [repr(0.0 if t.hard else w) for w in (*taus, 0.0)]
        rows["theta"] += [repr(w) for w in (*t.theta, 0.0)]
        rows["s"] += map(repr, t.s)
        rows["c"] += map(repr, t.c)
        rows["owner"] += [str(w == "hi").lower() for w in (*(t.owner or ["lo"] * (t.K - 1)), "lo")]
    layer = {
        "class_name": "HThresholdGate",
        "name": name,
        "inputs": names,
        "branches": found[0].K,
        "groups": len(found) if len(set(found)) > 1 else 1,
        "hard": str(found[0].hard).lower(),
        **{key: ", ".join(w) for key, w in rows.items()},
    }
    return layer, list(shapes[0])
