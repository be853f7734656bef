"""CTC for speech: the loss as one step of a CUDA graph, greedy decoding, and errors in words.

`F.ctc_loss` reads the lengths on the host, which a recorded step cannot. Here they stay on the
device, and the sums over all paths from the front and from the back are made in the same loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ALPHABET = "- ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # the first stands for the blank
_LOW = -1e30  # instead of -inf, whose differences are NaN


def encoded(text: str) -> list[int]:
    unknown = sorted(set(text) - set(ALPHABET[1:]))
    if unknown:
        raise ValueError(f"{text!r} has {unknown}; the alphabet is {ALPHABET[1:]!r}")
    return [ALPHABET.index(letter) for letter in text]


def decoded(best: Sequence[int]) -> str:
    """The text of the likeliest symbol of each frame: repeats are one, blanks are none."""
    kept = [k for before, k in pairwise((0, *best)) if k and k != before]
    return " ".join("".join(ALPHABET[k] for k in kept).split())


def word_errors(said: str, heard: str) -> int:
    """The fewest words to replace, leave out or put in that make `heard` what was said."""
    words = heard.split()
    row = list(range(len(words) + 1))
    for i, word in enumerate(said.split(), 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(words, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (word != other))
    return row[-1]


def ctc_loss(logp: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """-log probability of each text, [B], as `F.ctc_loss` has it.

    Args:
        logp: log probabilities of symbols, [B, T, K], blank first.
        targets: the symbols of each text, [B, U], with anything behind its end.
        frames, lengths: how many of T and of U count, [B].
    """
    states = targets.new_zeros(len(targets), 2 * targets.shape[1] + 1)  # a blank beside each symbol
    states[:, 1::2] = targets
    symbols = torch.arange(logp.shape[2], device=logp.device)
    chosen = (states[:, None, :] == symbols[:, None]).to(logp.dtype)  # [B, K, S]
    return -_Paths.apply(logp @ chosen, states, frames, 2 * lengths)


class _Paths(torch.autograd.Function):
    """Log probability of all paths of a text, from what its states emit, [B, T, S].

    Its slope is how likely a path is in each state at each frame: paths up to there, times those
    from there on, which are the paths of what is turned around.
    """

    @staticmethod
    def forward(ctx: Any, emitted: Tensor, states: Tensor, frames: Tensor, last: Tensor) -> Tensor:
        _, steps, count = emitted.shape
        t, s = (torch.arange(n, device=emitted.device) for n in (steps, count))
        back_t, back_s = (frames[:, None] - 1 - t).clamp(0), (last[:, None] - s).clamp(0)

        def turned(x: Tensor) -> Tensor:
            x = x.gather(1, back_t[:, :, None].expand_as(x))
            return x.gather(2, back_s[:, None, :].expand_as(x))

        both = torch.cat([emitted, turned(emitted)])
        sums = _sums(both, torch.cat([states, states.gather(1, back_s)]))
        ahead, rest = sums.chunk(2)
        end = ahead.gather(1, (frames - 1)[:, None, None].expand_as(ahead[:, :1])).squeeze(1)
        total = torch.logaddexp(*(end.gather(1, last[:, None] + k) for k in (1, 2)))
        inside = (t[:, None] < frames[:, None, None]) & (s <= last[:, None, None])
        share = (ahead[:, :, 2:] + turned(rest[:, :, 2:]) - emitted - total[:, :, None]).exp()
        ctx.save_for_backward(share.masked_fill(~inside, 0.0))
        return total.squeeze(1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        return ctx.saved_tensors[0] * slope[:, None, None], None, None, None


def _sums(emitted: Tensor, states: Tensor) -> Tensor:
    """Log probability of all paths that are in state s at t; two empty columns come first."""
    jumps = torch.zeros_like(states, dtype=torch.bool)
    jumps[:, 2:] = (states[:, 2:] != 0) & (states[:, 2:] != states[:, :-2])  # over a blank
    # no torch.where: it copies its numbers to the device, which a recorded step cannot
    barred = emitted.new_full(states.shape, _LOW).masked_fill(jumps, 0.0)
    frames = emitted.unbind(1)
    sums = emitted.new_full((len(frames), len(emitted), 2 + emitted.shape[2]), _LOW)
    sums[0, :, 2:4] = frames[0][:, :2]
    for t in range(1, len(frames)):
        a = sums[t - 1]
        stays = torch.logaddexp(a[:, 2:], a[:, 1:-1])
        torch.add(torch.logaddexp(stays, a[:, :-2] + barred), frames[t], out=sums[t, :, 2:])
    return sums.transpose(0, 1)
