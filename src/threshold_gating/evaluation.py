"""Perplexity before and after conversion, as in Tables 5 and 6 of the paper: `tg evaluate`.

Four columns: the network as it is (`sm`), with softmax by gates only (`lse`, the paper's
LSE-theta), with activations by gates only (`act`, its TG-act), with both. All of them share one set
of weights, see the same tokens and run with native ops off. What the original would choose at each
place is compared as well: the share of equal argmax.

A window is the unit of work. Finished ones can be kept in a file, from which a later run goes on;
under torchrun the windows are shared out, and the result is the same.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion import audit, convert_
from threshold_gating.conversion.plan import Choice

COLUMNS = {
    "sm": "the network as it is",
    "lse": "softmax by gates",
    "act": "activations by gates",
    "both": "both by gates",
}
SOFTMAX = ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")


class Window(NamedTuple):
    """Tokens that are read together; those from `first` on are predicted."""

    ids: Tensor
    first: int = 1


class Score(NamedTuple):
    """One column, over all windows."""

    ppl: float
    delta: float  # of ppl, to the original's
    same: float  # share of predictions with the original's argmax


class Evaluation(NamedTuple):
    """What `evaluate` found: a score for each column, over how many windows and predictions."""

    scores: dict[str, Score]
    windows: int
    predicted: int
    sites: dict[str, int]  # how many sites of softmax and of activations are gates

    def to_dict(self) -> dict[str, Any]:
        scores = {name: score._asdict() for name, score in self.scores.items()}
        return {**self._asdict(), "scores": scores}

    def table(self) -> str:
        """The scores as text."""
        head = f"{'column':<7} {'':<22} {'PPL':>10} {'delta':>8} {'%':>9} {'same argmax':>12}"
        lines = [head, "-" * len(head)]
        original = self.scores["sm"].ppl
        for name, (ppl, delta, same) in self.scores.items():
            line = f"{name:<7} {COLUMNS[name]:<22} {ppl:>10.3f}"
            if name != "sm":
                percent = 100 * delta / original
                line += f" {_signed(delta, 3):>8} {_signed(percent, 4):>9} {100 * same:>10.3f} %"
            lines.append(line)
        return "\n".join(lines)


def _signed(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # + 0.0: no -0.000


def windows(tokens: Tensor, context: int, stride: int | None = None) -> list[Window]:
    """A text cut into windows of `context` tokens, one every `stride` (by default: no overlap).

    Every token is predicted once, except the first of the text and, where windows do not overlap,
    the first of each. Overlapping ones give each token at least `context - stride` before it.

    >>> [(w.ids.tolist(), w.first) for w in windows(torch.arange(7), 4, 2)]
    [([0, 1, 2, 3], 1), ([2, 3, 4, 5], 2), ([4, 5, 6], 2)]
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context or context < 2:
        raise ValueError(
            f"windows: context is at least 2 and stride from 1 to context; got {context}, {stride}."
        )
    found: list[Window] = []
    done = 0
    for start in range(0, len(tokens), stride):
        ids, first = tokens[start : start + context], max(done - start, 1)
        if len(ids) > first:
            found.append(Window(ids, first))
        done = start + len(ids)
        if done == len(tokens):
            break
    return found


def evaluate(
    model: nn.Module,
    windows: Sequence[Window],
    *,
    columns: Iterable[str] = COLUMNS,
    sites: Mapping[str, Choice] | None = None,
    finished: Path | None = None,
    progress: Callable[[int, int, dict[str, float]], None] = lambda done, count, ppl: None,
) -> Evaluation:
    """Perplexity of a causal language model, as it is and converted, on the same windows.

    Args:
        model: takes tokens (1, L) and gives logits (1, L, V), as a tensor or as `.logits`.
        windows: what it reads, as `windows` cuts a text.
        columns: of `COLUMNS`; the original is always one.
        sites: as `tg.convert` takes them, for activations other than the default.
        finished: a file (.jsonl) of finished windows. Those in it are not run again, new ones are
            added to it; if it is of another evaluation, that is an error.
        progress: called after each window with how many are done, of how many, and the
            perplexities so far.

    Where torch.distributed is initialised, each process takes every n-th window, and all get the
    result.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = [name for name in COLUMNS if name == "sm" or name in set(columns)]
    networks, counts = _networks(model, windows[0].ids, names, sites or {})
    key = _fingerprint(model, windows, names, sites or {})
    rows = {} if finished is None else _read(finished, key)
    mine = range(rank, len(windows), ranks)
    for index in mine:
        if index not in rows:
            rows[index] = _scored(networks, windows[index])
            if finished is not None:
                _append(finished, rank, {"key": key, "window": index, **rows[index]})
        progress(sum(i in rows for i in mine), len(mine), _perplexities(rows.values(), names))
    return _evaluation(_gathered(rows, ranks), names, counts)


def _gathered(rows: dict[int, dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """The rows of all processes, in the order of the windows, so that sums round alike."""
    if ranks > 1:
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, rows)
        rows = {index: row for part in parts for index, row in part.items()}
    return [rows[index] for index in sorted(rows)]


def _evaluation(rows: list[dict[str, Any]], names: list[str], counts: dict[str, int]) -> Evaluation:
    predicted = sum(row["predicted"] for row in rows)
    ppl = _perplexities(rows, names)
    same = {name: sum(row["same"][name] for row in rows) / predicted for name in names}
    scores = {name: Score(ppl[name], ppl[name] - ppl["sm"], same[name]) for name in names}
    return Evaluation(scores, len(rows), predicted, counts)


def _perplexities(rows: Iterable[dict[str, Any]], names: list[str]) -> dict[str, float]:
    rows = list(rows)
    predicted = sum(row["predicted"] for row in rows)
    return {n: math.exp(math.fsum(row["nats"][n] for row in rows) / predicted) for n in names}


def _networks(
    model: nn.Module, ids: Tensor, names: list[str], sites: Mapping[str, Choice]
) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """The network of each column, around the same tensors, and how many sites are gates."""
    model = model.eval()
    example = ids[None, :32].to(next(model.parameters()).device)  # convert proves it on these
    # whatever the gates are off by: the perplexity says what that is worth
    whole = convert_(_twin(model), sites, inputs=example, tol=math.inf)
    soft: list[str] = []
    bent: list[str] = []
    for site in audit(whole, example).sites:
        name = site.name if ":" in site.name else site.name.partition("#")[0]
        (soft if site.kind in SOFTMAX else bent).append(name)
    left = {"lse": bent, "act": soft}
    found = {"sm": model, "both": whole}
    for name in set(names) & set(left):
        chosen: dict[str, Choice] = {
            **(sites if name == "act" else {}),
            **dict.fromkeys(left[name]),
        }
        found[name] = convert_(_twin(model), chosen, inputs=example, strict=False)
    return {name: found[name] for name in names}, {"softmax": len(soft), "activations": len(bent)}


def _twin(model: nn.Module) -> nn.Module:
    """Modules of its own around the same tensors."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(t): t for t in tensors})


@torch.no_grad()
def _scored(networks: Mapping[str, nn.Module], window: Window) -> dict[str, Any]:
    """Nats of each column over a window, and how many choices are the original's."""
    nats: dict[str, float] = {}
    same: dict[str, int] = {}
    chosen = None
    device = next(networks["sm"].parameters()).device
    ids = window.ids.to(device)
    with kernels.use("reference"):
        for name, network in networks.items():
            out = network(ids[None])
            logits = getattr(out, "logits", out)[0, window.first - 1 : -1]
            nats[name] = math.fsum(_nats(logits, ids[window.first :]))
            best = logits.argmax(-1)
            chosen = best if chosen is None else chosen
            same[name] = int((best == chosen).sum())
    return {"predicted": len(ids) - window.first, "nats": nats, "same": same}


def _nats(logits: Tensor, targets: Tensor) -> Iterator[float]:
    """In float64, a few rows at a time: a large vocabulary takes much memory."""
    for some, wanted in zip(torch.split(logits, 128), torch.split(targets, 128), strict=True):
        yield F.cross_entropy(some.double(), wanted, reduction="sum").item()


def _fingerprint(
    model: nn.Module, windows: Sequence[Window], names: list[str], sites: Mapping[str, Choice]
) -> str:
    """Says of a file of finished windows whether it is of this evaluation."""
    found = hashlib.sha256(f"{names} {sorted((k, repr(v)) for k, v in sites.items())}".encode())
    for window in windows:
        found.update(f"{window.ids.tolist()} {window.first}".encode())
    for name, tensor in model.state_dict().items():
        values = tensor.flatten()[:: max(1, tensor.numel() // 64)].tolist()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {values}".encode())
    return found.hexdigest()[:16]


def _read(finished: Path, key: str) -> dict[int, dict[str, Any]]:
    """The windows that are done, in this file and in those of other processes beside it."""
    rows = {}
    for path in sorted(finished.parent.glob(f"{finished.name}*")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off when its process was killed
            if row.pop("key", None) != key:
                raise ValueError(
                    f"{path} has windows of another evaluation (network, text, columns or sites "
                    "differ); name another file or remove it."
                )
            rows[row.pop("window")] = row
    return rows


def _append(finished: Path, rank: int, row: dict[str, Any]) -> None:
    path = finished if rank == 0 else finished.with_name(f"{finished.name}.{rank}")
    cut = path.is_file() and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * cut + json.dumps(row) + "\n")
