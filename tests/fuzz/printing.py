"""A failing network as a Python program of its own."""

from __future__ import annotations

from tests.fuzz.check import Failure
from tests.fuzz.network import FORMS, Network, input_lines, make_lines, text


def program(network: Network, failure: Failure) -> str:
    """The classes, the inputs, the conversion and the step that fails."""
    source, noted = text(network)
    call, given = FORMS[network.form][3:]
    wishes = "{" + ", ".join(f"{k!r}: {v}" for k, v in noted.wishes.items()) + "}"
    more = f"{wishes}, tol=float('inf'), " if noted.wishes else ""
    learned = failure.stage.startswith("learned")
    more += f"train={network.train}, share={network.share!r}, " if learned else ""
    lines = [
        f"# {failure.stage}: {failure.message.strip().splitlines()[-1]}",
        source,
        *make_lines(network),
        *input_lines(network, network.inputs, network.batch, 1),
        f"gated = tg.convert(net, {more}inputs={given})",
        *(
            _learned(network, failure, call)
            if learned
            else _ending(network, failure.stage, failure, call, noted.edits)
        ),
    ]
    return "\n".join(lines) + "\n"


def _learned(network: Network, failure: Failure, call: str) -> list[str]:
    """The step after the start, and the same gates in two ways."""
    stage = failure.stage.removeprefix("learned ")
    if stage.startswith("start"):
        frozen = f"frozen = tg.convert(net, inputs={FORMS[network.form][4]})"
        both = (call.replace("net", name, 1) for name in ("frozen", "gated"))
        return [frozen, "with tg.kernels.use('reference'):", f"    print({', '.join(both)})"]
    run = call.replace("net", "gated", 1)
    taken = {"tuple": "[0]", "dict": "['out']"}.get(network.form, "")
    loss = f"({run}){taken}.double().square().sum()"
    step = [
        f"{loss}.backward()",
        "for p in gated.parameters():",
        "    if p.grad is not None and p.grad.any():",
        "        p.data -= 0.01 * p.grad / p.grad.abs().max()",
    ]
    ending = _ending(network, stage, failure, run, [])
    return [*step, "print(" + run + ")", *ending]


def _ending(
    network: Network, stage: str, failure: Failure, call: str, edits: list[str]
) -> list[str]:
    both = [f"print({call}, {call.replace('net', 'gated', 1)}, sep='\\n')"]
    if stage == "edit":
        changed = [edit.replace("net", "gated", 1) for edit in edits]
        return [*edits, *changed, *both]
    if stage.startswith(("reference", "auto", "unplanned")):
        second = input_lines(network, network.second, network.batch % 3 + 1, 2)
        lines = second if failure.message.startswith("second") else []
        if "train" in stage:
            lines = [*lines, "net.train(), gated.train()"]
        if "gradient" in stage:
            lines.append("x.requires_grad_()")
            run = call.replace("(x", "(x * 1").replace("x=x", "x=x * 1")
            taken = {"tuple": "[0]", "dict": "['out']"}.get(network.form, "")
            other = run.replace("net", "gated", 1)
            backend = stage.split()[0]
            return [
                *lines,
                f"with tg.kernels.use({backend!r}):",
                *(f"    print(torch.autograd.grad(({r}){taken}.sum(), x))" for r in (run, other)),
            ]
        backend = "auto" if stage.startswith("unplanned") else stage.split()[0]
        return [*lines, f"with tg.kernels.use({backend!r}):", *(f"    {line}" for line in both)]
    ways = {
        "aot_eager": "torch.compile(gated, backend='aot_eager')",
        "inductor": "torch.compile(gated)",
        "export": "torch.export.export(gated, (x,), strict=False).module()",
        "deepcopy": "__import__('copy').deepcopy(gated)",
        "pickle": "__import__('pickle').loads(__import__('pickle').dumps(gated))",
        "fold": "tg.training.fold_batchnorm(gated)",
        "save": "(tg.conversion.save(gated, 'out'), tg.conversion.load('out', net))[1]",
    }
    for name, way in ways.items():
        if stage.startswith(name):
            return [f"gated = {way}", *both]
    return both
