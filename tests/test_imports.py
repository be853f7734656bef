"""Imports point one way, and importing the package needs torch alone and is quick."""

import ast
import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import threshold_gating as tg
from threshold_gating.cli import COMMANDS

PACKAGE = "threshold_gating"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# What each module may import from the package; a module must stand here before it is written.
# Mathematics at the bottom, faster forms of it above, models and tools on top.
_BASE = {"primitive", "instance"}
_KERNELS = {*_BASE, "taxonomy", "logits", "kernels"}
_NN = {*_KERNELS, "nn"}
_CONVERSION = {*_NN, "fitting", "_version", "conversion"}
_THEORY = {*_CONVERSION, "theory"}
ALLOWED = {
    "_version": set(),
    "primitive": set(),
    "instance": {"primitive"},
    "fitted": _BASE,
    "taxonomy": {*_BASE, "fitted"},
    "logits": _BASE,
    "kernels": _KERNELS,
    "nn": _NN,
    "fitting": _KERNELS,
    "conversion": _CONVERSION,
    "training": _CONVERSION,
    "theory": _THEORY,
    "hardware": _THEORY | {"hardware"},
    "export": _CONVERSION | {"export"},
    "insight": _THEORY | {"training", "show", "insight"},
    "show": _THEORY | {"hardware"},
    "cli": None,  # anything
    "__main__": None,
    "__init__": None,
}

# Everything an extra brings. torch takes numpy when it is there and does without when it is not.
# fmt: off
EXTRAS = [
    "accelerate", "hls4ml", "huggingface_hub", "jinja2", "lightning", "matplotlib", "mpmath", "numpy", "onnx",
    "onnxruntime", "onnxscript", "pytorch_lightning", "qonnx", "ray", "safetensors", "scipy", "sklearn",
    "tensorboard", "timm", "tokenizers", "torchvision", "tqdm", "transformers", "triton",
]
# fmt: on


def imports_of_package(source, module, *, is_package=False):
    """The modules of the package that `source`, the text of `module`, imports, at any depth."""
    here = [PACKAGE, *module.split(".")] if module != "__init__" else [PACKAGE]
    if not is_package:
        here = here[:-1]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            root, *rest = name.split(".")
            if root == PACKAGE:
                # A name that is no module comes from __init__, which imports everything.
                found.add(rest[0] if rest and rest[0] in ALLOWED else "__init__")
    return found


def violations(module, imported):
    """What is wrong with `module` importing `imported`, as sentences."""
    top = module.split(".")[0]
    if top not in ALLOWED:
        return [f"{module} is unknown: say in ALLOWED of {Path(__file__).name} what it may import"]
    if ALLOWED[top] is None:
        return []
    wrong = imported - ALLOWED[top] - {top}
    return [f"{module} imports {name}, against the direction of imports" for name in sorted(wrong)]


def modules():
    """Every source file of the package by the name of its module."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        inside = parts[-1] == "__init__" and len(parts) > 1
        yield ".".join(parts[:-1] if inside else parts), path


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    path = MODULES[module]
    is_package = path.stem == "__init__"
    assert not violations(
        module, imports_of_package(path.read_text(), module, is_package=is_package)
    )


@pytest.mark.parametrize(
    ("module", "is_package", "line", "imported"),
    [
        ("primitive", False, "from threshold_gating import nn", "nn"),
        ("primitive", False, "from threshold_gating.nn.activation import Activation", "nn"),
        ("primitive", False, "import threshold_gating.cli as c", "cli"),
        ("primitive", False, "from . import taxonomy", "taxonomy"),
        ("primitive", False, "def f():\n    from .kernels import blend", "kernels"),
        ("taxonomy", False, "from threshold_gating import TG", "__init__"),
        ("kernels", True, "from ..nn import Activation", "nn"),
        ("kernels.blend", False, "from .. import nn", "nn"),
    ],
)
def test_a_wrong_import_is_found(module, is_package, line, imported):
    assert imports_of_package(line, module, is_package=is_package) == {imported}
    assert violations(module, {imported})


def test_a_right_import_is_let_through():
    source = "import torch\nfrom ..primitive import blend\nfrom .table import PAIRS"
    imported = imports_of_package(source, "kernels.blend")
    assert imported == {"primitive", "kernels"}
    assert not violations("kernels.blend", imported)


def test_an_unknown_module_must_be_placed():
    assert "unknown" in violations("made_up", set())[0]


def _python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


_BLOCK = f"""
import sys
class Block:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Block)
"""


def test_importing_needs_torch_alone():
    _python(_BLOCK + f"from {PACKAGE} import *")


def test_the_block_works():
    _python(_BLOCK + "try: import matplotlib\nexcept ImportError: pass\nelse: sys.exit(1)")


def test_importing_loads_no_extra():
    """Where the extras are installed they are not touched either."""
    code = f"import sys, torch; before = set(sys.modules); from {PACKAGE} import *; "
    loaded = _python(code + "print(*(set(sys.modules) - before))").split()
    assert f"{PACKAGE}.conversion" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(EXTRAS)


def test_the_modules_of_the_commands_load_no_extra():
    """The first answer of `tg explain` must not wait for scipy and matplotlib."""
    modules = ", ".join(f"{PACKAGE}.cli.{name}" for name in sorted({*COMMANDS.values()}))
    code = f"import sys, torch; before = set(sys.modules); import {modules}; "
    loaded = _python(code + "print(*(set(sys.modules) - before))").split()
    assert f"{PACKAGE}.cli.explain" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(EXTRAS)


def test_importing_every_name_takes_under_0_3_s_more_than_torch(tmp_path):
    """With bytecode, which an installed package has from its second import on at the latest."""
    code = "import sys, time, torch; sys.dont_write_bytecode = False; "
    code += f"sys.pycache_prefix = {str(tmp_path)!r}; t = time.process_time(); "
    names = sorted(set(tg.__all__) - {"theory", "training"})  # most programs do without
    code += f"from {PACKAGE} import {', '.join(names)}; print(time.process_time() - t)"
    # Time of the processor, not of a clock: others may use the machine. The first one compiles.
    assert min(float(_python(code)) for _ in range(3)) < 0.3


# Names that are imported when they are used


def test_the_package_itself_waits_for_nothing():
    assert _python(f"import sys, {PACKAGE}; print('torch' in sys.modules)") == "False\n"


def test_every_public_name_is_found_and_is_what_its_module_has():
    for name in tg.__all__:
        found = getattr(tg, name)
        home = tg._HOMES.get(name)
        module = importlib.import_module(f"{PACKAGE}.{home or tg._MODULES.get(name, name)}")
        assert found is (getattr(module, name) if home else module)
    assert {*tg._HOMES, *tg._MODULES} <= set(tg.__all__) <= set(dir(tg))


def test_no_public_name_is_called_as_a_module_is():
    """The import of that module would put it in the name's place."""
    tops = {module.partition(".")[0] for module in MODULES}
    assert not tops & {*tg._HOMES, *tg._MODULES}


def test_type_checkers_see_the_same_names():
    source = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (
        n for n in source.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    )
    names = [alias.asname or alias.name for line in block.body for alias in line.names]
    assert sorted(names) == sorted(tg.__all__)


def test_any_name_may_be_the_first_that_is_used():
    """Each in a process of its own, which has torch already."""
    one_of_each_home = {*{home: name for name, home in tg._HOMES.items()}.values()}
    code = f"""
import os, sys, torch, {PACKAGE} as tg
for name in {sorted({*one_of_each_home, *tg.__all__} - ({*tg._HOMES} - one_of_each_home))}:
    if not os.fork():
        getattr(tg, name)
        os._exit(0)
    print(name, os.wait()[1])
"""
    found = dict(line.split() for line in _python(code).splitlines())
    assert len(found) > 10
    assert set(found.values()) == {"0"}


@pytest.mark.parametrize("name", ["convrt", "__main__", "__wrapped__"])
def test_a_name_that_is_none_is_an_attribute_error(name):
    with pytest.raises(
        AttributeError, match=f"module 'threshold_gating' has no attribute '{name}'"
    ):
        getattr(tg, name)


def test_a_package_that_is_missing_is_named():
    """Without torch nothing works, and that is what is said."""
    blocked = _BLOCK.replace(repr(EXTRAS), "['torch']")
    code = (
        f"import {PACKAGE} as tg\ntry: tg.convert\nexcept ModuleNotFoundError as e: print(e.name)"
    )
    assert _python(blocked + code) == "torch\n"


def test_help_and_version_need_no_torch():
    blocked = _BLOCK.replace(repr(EXTRAS), repr(["torch", *EXTRAS]))
    code = f"from {PACKAGE}.cli import COMMANDS, main\n"
    code += "for words in (['--help'], ['--version'], *([c, '--help'] for c in COMMANDS)):\n"
    code += "    try: main(words)\n    except SystemExit as end: assert end.code == 0\n"
    said = _python(blocked + code)
    assert said.count("usage: tg") == 1 + len(COMMANDS)
    assert f"tg {tg.__version__}\n" in said


def test_help_takes_under_0_3_s(tmp_path):
    """With bytecode. Time of the processor, start of Python included: others use the machine."""
    words = [sys.executable, "-X", f"pycache_prefix={tmp_path}", "-m", PACKAGE, "--help"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    taken = []
    for _ in range(4):  # the first one compiles
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.3


def test_two_threads_may_use_a_name_first():
    code = f"""
import threading, {PACKAGE} as tg
failed = []
def use(name):
    try: getattr(tg, name)
    except Exception as error: failed.append(error)
threads = [threading.Thread(target=use, args=(n,)) for n in ("convert", "training", "theory")]
[t.start() for t in threads], [t.join() for t in threads]
print(failed)
"""
    assert _python(code).strip() == "[]"


# What modules of networks call of `kernels`: none of it asks which backend is in force.
CALLED = {"Conv", "Structure", "attention", "blend", "either", "gated_product", "lstm", "synaptic"}


def names_of_kernels(source):
    """The names of `kernels` that `source` uses: attributes of it, and what it imports from it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "kernels" else set()
        elif isinstance(node, ast.ImportFrom) and "kernels" in (node.module or "").split("."):
            found |= {alias.name for alias in node.names}
    return found


def test_modules_of_networks_call_seven_names_of_kernels():
    texts = [path.read_text() for path in (SOURCE / "nn").glob("*.py")]
    assert set.union(*map(names_of_kernels, texts)) == CALLED


def test_names_of_kernels_are_seen_however_they_are_imported():
    source = "from threshold_gating.kernels.backend import use\nkernels.blend(x)\nx.native()"
    assert names_of_kernels(source) == {"use", "blend"}
