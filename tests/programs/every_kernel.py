"""A program: every kernel of Triton, step by step, is reached by a pair, and is caught if broken,
in every role that it has.

It has to be a process of its own, because Triton asks whether to interpret when it is imported.
"""

import ast
import sys
from pathlib import Path

import torch
from triton.runtime.interpreter import InterpretedFunction

import threshold_gating
from benchmarks.checking import check
from benchmarks.pairs import PAIRS
from threshold_gating import kernels
from threshold_gating.kernels.structure import Role

FLOAT32 = (torch.float32,)
# Other tests of pairs have these step by step; and a few of these stand for all.
ELSEWHERE, FEW = ("blend", "times", "frozen module"), ("module", "compiled")
# Which kernels have roles, and which roles: a copy is kept forward, a norm's sums are made backward.
NORMS = {Role.NORMED, Role.JOINED}
ROLES = {"blend_forward": {*Role} - NORMS, "blend_backward": {*Role} - {Role.KEPT}}
# These pairs launch every kernel in every role, and write everything that it can write.
ENOUGH = (
    "silu layer module",
    "silu channel module of many rows",
    "silu channel read",
    "silu frozen times",
    "silu channel over its input",
    "relu theta s normed",
    "silu joined",
    "two soft channel product of few",
    "one vector channel product",
    "two general synapses",
    "two shared synapses of images",
    "attention literal causal",
    "attention fused causal tau",
    "attention statistics causal",
    "lstm free over time",
)
# Rooms for sums that are not done: what is in them afterwards nobody reads.
SCRATCH = {("chosen_columns", None, "scratch")}
ordinary, inner = InterpretedFunction.run, InterpretedFunction.__call__


def in_the_source():
    """The functions that Triton compiles by name, and those of them that no other one calls."""
    found, called = {}, set()
    for path in Path(threshold_gating.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "triton.jit" in map(
                ast.unparse, node.decorator_list
            ):
                assert node.name not in found, f"two kernels are called {node.name}"
                found[node.name] = path.name
                calls = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
                called |= {f.id for f in calls if isinstance(f, ast.Name)}
    return set(found), set(found) - called


def role_of(kernel, args):
    """What its second input does; None for a kernel without roles."""
    if "ROLE" not in kernel.arg_names:
        return None
    return Role(args[kernel.arg_names.index("ROLE")])


def as_bytes(t):
    return t.detach().contiguous().view(-1).view(torch.uint8).clone()


class Watch:
    """What runs for a pair: kernels, the functions in them, the arguments that they write."""

    def __init__(self):
        self.launched, self.entered, self.written = set(), set(), set()

    def __enter__(self):
        def run(kernel, *args, **options):
            tensors = {
                n: a for n, a in zip(kernel.arg_names, args, strict=False) if torch.is_tensor(a)
            }
            before = {name: as_bytes(t) for name, t in tensors.items()}
            ordinary(kernel, *args, **options)
            self.launched.add(kernel.__name__)
            role = role_of(kernel, args)
            changed = {n for n, t in tensors.items() if not torch.equal(as_bytes(t), before[n])}
            self.written |= {(kernel.__name__, role, name) for name in changed}

        def call(function, *args, **options):
            self.entered.add(function.__name__)
            return inner(function, *args, **options)

        InterpretedFunction.run, InterpretedFunction.__call__ = run, call
        return self

    def __exit__(self, *_):
        InterpretedFunction.run, InterpretedFunction.__call__ = ordinary, inner


class Broken:
    """The kernel `name` with one of its results off by a hundredth (an index by one), in one role.

    Of sums of a norm and of gates, which are one result, those of the norm alone.
    """

    def __init__(self, name, role, argument):
        self.name, self.role, self.argument = name, role, argument

    def __enter__(self):
        def run(kernel, *args, **options):
            ordinary(kernel, *args, **options)
            if kernel.__name__ == self.name and role_of(kernel, args) == self.role:
                t = args[kernel.arg_names.index(self.argument)]
                t = t[:, -2:] if self.role in NORMS and self.argument != "dx_p" else t
                t.mul_(1.01) if t.is_floating_point() else t.add_(1)

        InterpretedFunction.run = run

    def __exit__(self, *_):
        InterpretedFunction.run = ordinary


def every_function_is_reached():
    """By pairs that are right and run what they say."""
    functions, entries = in_the_source()
    assert len(entries) >= 10, entries
    reached, said = set(), set()
    for pair in PAIRS.values():
        if pair.family in ELSEWHERE or (pair.family in FEW and "channel" not in pair.name):
            continue
        with Watch() as seen:
            wrong = check("cpu", [pair], FLOAT32)
        assert not wrong, wrong
        assert seen.launched == set(pair.launches), f"{pair.name} runs {sorted(seen.launched)}"
        reached |= seen.launched | seen.entered
        said |= set(pair.launches)
    missing = sorted(functions - reached)
    assert not missing, f"no pair in benchmarks/pairs.py reaches {', '.join(missing)}"
    assert said == entries, said ^ entries


def each_broken_kernel_is_caught():
    """Every result of every kernel in turn; one of the pairs in which it is written says so."""
    _, entries = in_the_source()
    results = {}
    for pair in (PAIRS[name] for name in ENOUGH):
        with Watch() as seen:
            assert not check("cpu", [pair], FLOAT32)
        for result in seen.written - SCRATCH:
            results.setdefault(result, []).append(pair)
    assert {name for name, _, _ in results} == entries
    for name in entries:
        found = {role for kernel, role, _ in results if kernel == name}
        assert found == ROLES.get(name, {None}), f"{name} is in pairs as {found}"
    for (name, role, argument), pairs in results.items():
        with Broken(name, role, argument):
            found = (line for pair in pairs for line in check("cpu", [pair], FLOAT32))
            assert any(name in line for line in found), (
                f"{name} writes a wrong {argument} as {role}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    kernels.use("triton")
    {"reach": every_function_is_reached, "break": each_broken_kernel_is_caught}[sys.argv[1]]()
    print("ok")
