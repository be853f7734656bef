"""Neural nonlinearity as one tunable gate: y = sum_k g_k(x) (s_k x + c_k).

Names are imported when they are first used: `tg --help` must not wait for torch.
"""

import importlib
import threading
from types import ModuleType
from typing import TYPE_CHECKING

from threshold_gating._version import __version__ as __version__

if TYPE_CHECKING:
    from threshold_gating import (
        conversion,
        fitting,
        hardware,
        insight,
        kernels,
        nn,
        primitive,
        taxonomy,
        theory,
        training,
    )
    from threshold_gating.conversion import GateConfig, calibrate, convert, sites, verify
    from threshold_gating.conversion.audit import audit
    from threshold_gating.conversion.checkpoint.pretrained import load
    from threshold_gating.fitting import fit, match
    from threshold_gating.instance import TG
    from threshold_gating.nn import activation as layers
    from threshold_gating.nn import attention, dense
    from threshold_gating.nn import rnn as recurrent
    from threshold_gating.nn.activation import Activation
    from threshold_gating.nn.attention import softmax
    from threshold_gating.nn.dense import Conv1d, Conv2d, Conv3d, Linear
    from threshold_gating.nn.rnn import GRU, LSTM
    from threshold_gating.primitive import blend, gates
    from threshold_gating.taxonomy import TAXONOMY, family

__all__ = [
    "GRU",
    "LSTM",
    "TAXONOMY",
    "TG",
    "Activation",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "GateConfig",
    "Linear",
    "attention",
    "audit",
    "blend",
    "calibrate",
    "conversion",
    "convert",
    "dense",
    "family",
    "fit",
    "fitting",
    "gates",
    "hardware",
    "insight",
    "kernels",
    "layers",
    "load",
    "match",
    "nn",
    "primitive",
    "recurrent",
    "sites",
    "softmax",
    "taxonomy",
    "theory",
    "training",
    "verify",
]

# Where each public name lives that is not itself a module. None may be called as a module is.
_HOMES = {
    "GRU": "nn",
    "LSTM": "nn",
    "TAXONOMY": "taxonomy",
    "TG": "instance",
    "Activation": "nn",
    "Conv1d": "nn",
    "Conv2d": "nn",
    "Conv3d": "nn",
    "GateConfig": "conversion",
    "Linear": "nn",
    "audit": "conversion",
    "blend": "primitive",
    "calibrate": "conversion",
    "convert": "conversion",
    "family": "taxonomy",
    "fit": "fitting",
    "gates": "primitive",
    "load": "conversion.checkpoint.pretrained",
    "match": "fitting",
    "softmax": "nn",
    "verify": "conversion",
}
# Modules by another name than the path that they have in the package.
_MODULES = {
    "attention": "nn.attention",
    "dense": "nn.dense",
    "layers": "nn.activation",
    "recurrent": "nn.rnn",
    "sites": "conversion.sites",
}

if not TYPE_CHECKING:  # or a type checker would take any name for one of ours
    # Two threads that import parts which need each other would each see half of one.
    _importing = threading.RLock()

    def _imported(name: str) -> ModuleType:
        with _importing:
            return importlib.import_module(f"{__name__}.{name}")

    def __getattr__(name: str) -> object:
        """A public name or a module of the package, imported at its first use."""
        home = _HOMES.get(name)
        if home is not None:
            value = getattr(_imported(home), name)
            return globals().setdefault(name, value)  # found there from now on
        path = _MODULES.get(name, name)
        module = f"{__name__}.{path}"
        try:
            if name.startswith("__") or not name.isidentifier():  # __main__ would run
                raise ModuleNotFoundError(name=module)
            return _imported(path)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
