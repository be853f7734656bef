"""Perplexity before and after conversion, as in Tables 5 and 6 of the paper, for `tg evaluate`.

Four columns: the network as it is (`sm`), with softmax by gates only (`lse`, the paper's
LSE-theta), with activations by gates only (`act`, its TG-act), with both. All of them share one set
of weights, see the same tokens and run with native ops off. What the original would choose at each
place is compared as well: the share of equal argmax.

A window is the unit of work. Finished ones can be kept in a file, from which a later run goes on;
under torchrun the windows are shared out, and the result is the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from threshold_gating import kernels
from threshold_gating.conversion import audit, convert_
from threshold_gating.conversion.checkpoint.schema import structure
from threshold_gating.conversion.config import Choice
from threshold_gating.conversion.gate import twin

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

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        found = ", ".join(f"{name} {score.ppl:.3f}" for name, score in self.scores.items())
        return f"<Evaluation: {found} over {self.windows:,} windows>"


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
            f"windows: context must be at least 2 and stride from 1 to context; got {context}, "
            f"{stride}."
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
    wanted = {columns} if isinstance(columns, str) else set(columns)
    if not windows or wanted - set(COLUMNS):
        raise ValueError(
            f"evaluate needs at least one window, and columns out of {', '.join(COLUMNS)}; got "
            f"{len(windows)} windows and {', '.join(sorted(wanted))}."
        )
    names = [name for name in COLUMNS if name == "sm" or name in wanted]
    networks, counts = _networks(model, windows[0].ids, names, sites or {})
    key, rows = "", {}
    if finished is not None:
        finished.parent.mkdir(parents=True, exist_ok=True)
        key = _fingerprint(networks, windows)
        rows = _read(finished, key, names, windows)
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
    nats = {n: math.fsum(row["nats"][n] for row in rows) / predicted for n in names}
    # past this the perplexity is no float64; a network that far off has none to speak of
    return {n: math.exp(mean) if not mean > 709 else math.inf for n, mean in nats.items()}


def _networks(
    model: nn.Module, ids: Tensor, names: list[str], sites: Mapping[str, Choice]
) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """The network of each column, around the same tensors, and how many sites are gates."""
    model = model.eval()
    example = ids[None, :32].to(next(model.parameters()).device)  # convert proves it on these
    # whatever the gates are off by: the perplexity says what that is worth
    whole = convert_(twin(model), sites, inputs=example, tol=math.inf)
    soft: list[str] = []
    bent: list[str] = []
    with kernels.use("reference"):  # as it is scored
        found_sites = audit(whole, example).sites
    for site in found_sites:
        name = site.name if ":" in site.name else site.name.partition("#")[0]
        (soft if site.kind in SOFTMAX else bent).append(name)
    left = {"lse": bent, "act": soft}
    found = {"sm": model, "both": whole}
    for name in set(names) & set(left):
        chosen: dict[str, Choice] = {
            **(sites if name == "act" else {}),
            **dict.fromkeys(left[name]),
        }
        found[name] = convert_(twin(model), chosen, inputs=example, strict=False)
    return {name: found[name] for name in names}, {"softmax": len(soft), "activations": len(bent)}


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


def _fingerprint(networks: Mapping[str, nn.Module], windows: Sequence[Window]) -> str:
    """Says of a file of finished windows whether it is of this evaluation.

    It is of all that decides the figures: every value of every tensor, those that no state_dict
    has among them, the configuration of the network and of its modules, the gates of each column,
    the tokens and how they are cut, where it runs, in which precision and with which versions.
    """
    model = networks["sm"]
    found = hashlib.sha256()
    own: Any = getattr(model, "config", None)
    settings = own.to_dict() if hasattr(own, "to_dict") else own
    device = next(model.parameters()).device.type
    precision = torch.get_float32_matmul_precision()
    attention = getattr(own, "_attn_implementation", None)
    packages = {name: _version(name) for name in ("threshold_gating", "transformers")}
    about = [settings, attention, repr(model), device, precision, str(torch.__version__), packages]
    gates = {name: structure(network) for name, network in networks.items()}
    found.update(json.dumps([about, gates], sort_keys=True, default=repr).encode())
    for window in windows:
        found.update(f"{window.ids.tolist()} {window.first}".encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1).cpu().contiguous()
        values: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
        found.update(values)
    return found.hexdigest()[:32]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(
    finished: Path, key: str, names: list[str], windows: Sequence[Window]
) -> dict[int, dict[str, Any]]:
    """The windows that are done, in this file and in those of other processes beside it."""
    rows = {}
    parts = re.compile(re.escape(finished.name) + r"(\.\d+)?")  # see `_append`
    for path in sorted(p for p in finished.parent.iterdir() if parts.fullmatch(p.name)):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut off when its process was killed
            if not isinstance(row, dict) or row.get("key") != key:
                raise ValueError(
                    f"{path} has windows of another evaluation (network, its configuration, text, "
                    "columns, sites, precision or versions differ); name another file or remove it."
                )
            if not _is_of(row, names, windows):
                raise ValueError(
                    f"{path}, line {number} is not a window of this evaluation, so it is damaged; "
                    "remove the line, and its window is run again."
                )
            rows[row["window"]] = {k: row[k] for k in ("predicted", "nats", "same")}
    return rows


def _is_of(row: Mapping[str, Any], names: list[str], windows: Sequence[Window]) -> bool:
    """Whether a finished row is what `_scored` gives for one of the windows."""
    index, (nats, same) = row.get("window"), (row.get(k) for k in ("nats", "same"))
    if type(index) is not int or not 0 <= index < len(windows):
        return False
    predicted = len(windows[index].ids) - windows[index].first
    return (
        row.get("predicted") == predicted
        and isinstance(nats, dict)
        and isinstance(same, dict)
        and set(nats) == set(same) == set(names)
        and all(type(value) is float for value in nats.values())
        and all(type(count) is int and 0 <= count <= predicted for count in same.values())
    )


def _append(finished: Path, rank: int, row: dict[str, Any]) -> None:
    path = finished if rank == 0 else finished.with_name(f"{finished.name}.{rank}")
    cut = path.is_file() and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * cut + json.dumps(row) + "\n")
