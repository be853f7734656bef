"""A small GPT-2 with gelu_new, trained here, for what the paper says of GPT-2 (Tables 5 and 6).

What it is for: the paper's GPT-2 drifts by +0.22 % in perplexity when its GELUs become gates with
K = 2, "fully recovered at K = 3". Who has the weights of GPT-2 runs `experiments/table5_llm.py` on
them; this trains a network of the same architecture, small, on any texts.

    python -m experiments.gpt2_small --data FILE.txt ... [--device cuda] [--out DIR]
    python -m experiments.table5_llm --gpt2 DIR

A byte-level BPE is trained first, then the network on all but the last twentieth of each file; that
is written to DIR/heldout.txt. Training is bounded in steps, and the batch of a step depends on the
seed and the step alone: a run that was stopped goes on from DIR/state.pt. The weights are kept in
16 bits, and DIR/training.json has their hash.
"""

import argparse
import hashlib
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from experiments.evidence.common import DATA, ROOT

TEXTS = ["tinyshakespeare.txt", "charlotte-bronte.txt", "wikitext-2-valid.txt"]
HELD_OUT = 20  # one part of so many
RATE, WARM_UP = 1e-3, 100
KEPT_EVERY = 250  # steps


def split(files: list[Path]) -> tuple[str, str]:
    """The texts to learn from and those to be judged on."""
    learnt, held = [], []
    for file in files:
        text = file.read_text("utf-8")
        at = len(text) - len(text) // HELD_OUT
        learnt.append(text[:at])
        held.append(text[at:])
    return "\n".join(learnt), "\n".join(held)


def trained_tokenizer(text: str, size: int):
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def network(args: argparse.Namespace, vocabulary: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary, n_positions=args.context, n_embd=args.width, n_layer=args.layers,
        n_head=args.width // 32, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    assert config.activation_function == "gelu_new"
    return GPT2LMHeadModel(config)


def train(model, tokens: Tensor, args: argparse.Namespace) -> dict:
    """AdamW on random pieces; what was done as JSON values."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    cuda = args.device.startswith("cuda")
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=cuda)
    tokens, kept = tokens.to(args.device), args.out / "state.pt"
    along, first, loss = torch.arange(args.context, device=args.device), 0, torch.tensor(math.nan)
    if kept.exists():
        state = torch.load(kept, map_location=args.device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    start = time.monotonic()
    for step in range(first, args.steps):
        draw = torch.Generator().manual_seed(1_000_003 * args.seed + step)
        at = torch.randint(len(tokens) - args.context, (args.batch, 1), generator=draw)
        ids = tokens[at.to(args.device) + along]
        fall = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP) * fall
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % KEPT_EVERY == 0:
            print(f"step {step + 1} of {args.steps}: loss {loss.item():.3f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, kept.with_suffix(".new"))
            kept.with_suffix(".new").replace(kept)
    kept.unlink(missing_ok=True)
    seconds = round(time.monotonic() - start, 1)
    return {"steps": args.steps, "loss": loss.item(), "seconds": seconds, "started at": first}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", type=Path, default=[DATA / "text" / n for n in TEXTS])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpt2_small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    files = [f for d in args.data for f in (sorted(d.glob("*.txt")) if d.is_dir() else [d])]
    torch.manual_seed(args.seed)
    text, held_out = split(files)
    tokenizer = trained_tokenizer(text, args.vocabulary)
    tokens = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    model = network(args, len(tokenizer)).to(args.device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(tokens):,} tokens of {len(files)} files", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    done = train(model.train(), tokens, args)
    model.cpu().eval().half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "heldout.txt").write_text(held_out)
    facts = {"parameters": size, "tokens": len(tokens), "files": [f.name for f in files], **done}
    weights = (args.out / "model.safetensors").read_bytes()
    facts |= {"torch": torch.__version__, "sha256": hashlib.sha256(weights).hexdigest()}
    facts |= {
        k: getattr(args, k) for k in ("device", "seed", "layers", "width", "context", "batch")
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{done['steps']} steps in {done['seconds']} s, loss {done['loss']:.3f}; {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
