"""The networks of the zoo: `build(name)` gives one, re-drawn, with inputs for it."""

import json
from pathlib import Path

import torch

from .drawing import redraw, set_statistics
from .transformer_table import TRANSFORMERS

TIMM_FILE = Path(__file__).parent / "timm.json"
TIMM = json.loads(TIMM_FILE.read_text()) if TIMM_FILE.exists() else {}
SIZES = (32, 48, 64, 96, 128, 160, 192, 224, 256, 384)
# At 32 the windows of these have one pixel, and what is in front of a softmax has no effect.
LARGER = {"gcvit_xxtiny": 64, "swinv2_cr_tiny_224": 64}


def names():
    """Every network: "timm:resnet" (a family of timm's), "hf:bert" (a type of transformers')."""
    return [*(f"timm:{name}" for name in TIMM), *(f"hf:{name}" for name in TRANSFORMERS)]


def build(name, seed=0):
    """The network and its inputs (as `convert` takes them), from this seed."""
    torch.manual_seed(seed)
    source, _, key = name.partition(":")
    model, batch, inputs = _timm(**TIMM[key]) if source == "timm" else _transformers(key)
    redraw(model, torch.Generator().manual_seed(seed))
    set_statistics(model, batch)
    return model.requires_grad_(False), inputs


def _timm(model, size, resized):
    import timm

    net = timm.create_model(model, **({"img_size": size} if resized else {}))
    # so many that the variances of a last stage of one pixel are not near zero by chance
    batch = torch.randn(32 if size <= 64 else 8, 3, size, size)
    return net, batch, batch[:1]


def _transformers(key):
    model, inputs = TRANSFORMERS[key]()
    one = inputs()
    many = [one, *(inputs() for _ in range(15))]
    alone = any(len(t) == 1 for t in one.values())  # a row that cannot be stacked
    return model, one if alone else {k: torch.cat([each[k] for each in many]) for k in one}, one


def choose_timm(report=print):
    """Write `timm.json`: the smallest member of every family, at the smallest size it takes."""
    import timm

    rows = []
    for family in timm.list_modules():
        counts = {name: _parameters(name) for name in timm.list_models(module=family)}
        if counts:
            name = min(counts, key=counts.get)
            rows.append(f"  {json.dumps(family)}: {json.dumps(_smallest_input(name))}")
            report(f"{rows[-1]} of {counts[name]} parameters")
    TIMM_FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _parameters(name):
    import timm

    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name).parameters())


def _smallest_input(name):
    for size in (s for s in SIZES if s >= LARGER.get(name, 0)):
        for resized in (False, True):
            given = {"model": name, "size": size, "resized": resized}
            if _runs(given):
                return given
    raise ValueError(f"{name} takes none of the sizes {SIZES}")


def _runs(given):
    try:
        model, batch, _ = _timm(**given)
        with torch.no_grad():
            return bool(model.eval()(batch[:1]).isfinite().all())
    except Exception:  # whatever it says: it does not take this input
        return False
