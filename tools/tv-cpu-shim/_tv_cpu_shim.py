"""Declare the two operators that a CUDA-built torchvision lacks beside a CPU build of torch.

The torchvision wheel links the CUDA libraries. Beside a CPU build of torch its compiled part
cannot be loaded, so nobody declares `torchvision::nms` and `torchvision::qnms`, and
`import torchvision` ends in "operator torchvision::nms does not exist" although its models
and transforms need neither. Declared without an implementation, they let the import pass;
calling them still fails.

`tv_cpu_shim.pth` imports this module at every start of the interpreter. It only puts a
finder on `sys.meta_path`; torch is imported when torchvision is first looked for.
"""

import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library = None  # the operators live as long as this object does


class _Finder:
    """Acts once, when torchvision is first looked for, and leaves the finding to the others."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            if _built_for_cuda():
                _declare()
        return None


def _built_for_cuda():
    """Whether torchvision/version.py says so ('0.28.0+cu130'), read without importing it.

    A torchvision built for the CPU declares its operators itself; twice would be an error.
    """
    import re
    from importlib.machinery import PathFinder
    from pathlib import Path

    spec = PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file():
        return False
    text = version.read_text(encoding="utf-8")
    return re.search(r"^__version__ = ['\"][^'\"]*\+cu\d", text, re.MULTILINE) is not None


def _declare():
    global _library
    try:
        import torch
    except ImportError:
        return
    if torch.version.cuda is not None:
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        _library.define(operator + _SCHEMA)


sys.meta_path.insert(0, _Finder)
