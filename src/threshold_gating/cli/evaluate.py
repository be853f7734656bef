"""`tg evaluate`: the perplexity of a Hugging Face model before and after conversion.

    tg evaluate hf:FOLDER --data FILE.txt --context 1024
    torchrun --nproc-per-node 8 -m threshold_gating evaluate hf:FOLDER --data FILE.txt --device cuda

The measuring itself is in `conversion.perplexity`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from threshold_gating.cli import spec
from threshold_gating.cli.convert import choices
from threshold_gating.cli.options import WIKITEXT
from threshold_gating.cli.printing import Tell, UsageError, progress, show
from threshold_gating.cli.spec import brief, needed
from threshold_gating.conversion.perplexity import Evaluation
from threshold_gating.conversion.perplexity import evaluate as measured
from threshold_gating.conversion.perplexity import windows as cut


def evaluate(args: argparse.Namespace) -> int:
    """`tg evaluate`."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
    if ranks > 1:
        dist.init_process_group("gloo")
    try:
        return _evaluate(args, int(os.environ.get("RANK", "0")))
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def _evaluate(args: argparse.Namespace, rank: int) -> int:
    start = time.monotonic()
    _check(args)
    chosen = choices(args.site)
    with redirect_stdout(sys.stderr):
        model, tokenizer = load(args.network, getattr(torch, args.dtype))
    tokens = tokenised(tokenizer, read_text(args.data))[: args.limit]
    try:
        found = cut(tokens, args.context, args.stride)
        if not found:
            raise ValueError(f"{args.data} has {len(tokens)} tokens; nothing can be predicted.")
        said = f"{args.network} on {args.data}: {len(tokens):,} tokens, context {args.context:,}"
        said += "" if args.stride is None else f", stride {args.stride:,}"
        device = _device(args.device)
        with progress("") if rank == 0 else nullcontext() as tell:
            result = measured(
                model.to(device),
                found,
                columns=args.columns,
                sites=chosen,
                finished=args.finished,
                progress=partial(_told, tell),
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if rank == 0:
        facts = {"network": args.network, "data": str(args.data), "tokens": len(tokens)}
        facts |= {"context": args.context, "stride": args.stride, "dtype": args.dtype}
        facts |= {"device": str(device), "seconds": round(time.monotonic() - start, 1)}
        text = f"{said}\n\n{result.table()}\n\n{_summary(result)}"
        show(args, {**facts, **result.to_dict()}, text)
    return 0


def _told(tell: Tell | None, done: int, count: int, ppl: dict[str, float]) -> None:
    if tell is not None:
        values = "  ".join(f"{name} {value:.3f}" for name, value in ppl.items())
        tell(f"window {done}/{count}  {values}", done / count)


def _check(args: argparse.Namespace) -> None:
    """What would fail only after the work is done, or give the figures of another text."""
    if args.limit is not None and args.limit < 2:
        raise UsageError(f"--limit must be at least 2 tokens; got {args.limit}.")
    path = args.finished
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"--finished {path} cannot be written; give a file in a directory.")


def _summary(result: Evaluation) -> str:
    return (
        f"{result.predicted:,} tokens predicted in {result.windows:,} windows; "
        f"{result.sites['softmax']} softmax and {result.sites['activations']} activations gated; "
        "native ops off."
    )


def _device(name: str) -> torch.device:
    """The device of that name; of several GPUs, the one of this process."""
    device = spec.device(name)
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    return device


def load(network: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """A causal language model, in evaluation, and its tokenizer: hf:FOLDER_OR_ID, hf:FILE.gguf."""
    source, _, name = network.partition(":")
    if source != "hf" or not name:
        raise UsageError(f"no network {network!r}; write hf:FOLDER_OR_ID or hf:FILE.gguf.")
    transformers = needed("transformers", "text")
    options: dict[str, Any] = {}
    if name.endswith(".gguf"):
        path = Path(name)
        name, options = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    except Exception as error:  # of transformers, of its hub or of what these connect with
        raise UsageError(f"hf: {brief(error)}") from error
    return model.eval(), tokenizer


def read_text(data: str) -> str:
    """The text of a file; rows of a parquet file, and of WikiText-2, put together as they are.

    Some put two newlines between the rows of WikiText-2; that is another text, and its perplexity
    another one.
    """
    path = Path(data)
    if path.is_file() and path.suffix == ".parquet":
        parquet = needed("pyarrow.parquet")
        try:
            return "".join(parquet.read_table(path)["text"].to_pylist())
        except (KeyError, OSError, TypeError, ValueError) as error:
            raise UsageError(f"--data {path} has no column of texts ({brief(error)}).") from error
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"--data {path} is not text ({brief(error)}).") from error
    if data != WIKITEXT:
        raise UsageError(
            f"--data {data!r} is not a file; give FILE.txt, FILE.parquet or {WIKITEXT}."
        )
    datasets = needed("datasets")
    try:
        part = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{WIKITEXT} could not be fetched ({str(error).splitlines()[0]}); give its test part "
            "as FILE.txt or FILE.parquet."
        ) from error
    return "".join(part["text"])


def tokenised(tokenizer: Any, text: str) -> Tensor:
    """All tokens of a text, as the tokenizer begins and ends one."""
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    return ids
