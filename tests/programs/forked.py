"""Gates in processes that were forked after threads ran: torch's own ops would wait for ever there.

Called by Python, or by C++ where the environment lets it.
"""

import multiprocessing
import os

import torch
from torch.utils.data import DataLoader

from threshold_gating import TAXONOMY, kernels
from threshold_gating.kernels import host


def gated(x):
    return kernels.blend(x, TAXONOMY["gelu"])


def told(x, end):
    end.send_bytes(gated(x).numpy().tobytes())


def collated(rows):
    return torch.stack([gated(row) for row in rows])


if __name__ == "__main__":
    torch.set_num_threads(2)
    assert (host.module("cpu") is None) == (os.environ["TG_HOST"] == "python")
    x = torch.randn(200_000)
    want = gated(x)  # threads exist now, and not in the children
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=told, args=(x, there))
    child.start()
    assert here.poll(60), "the child waits"
    assert here.recv_bytes() == want.numpy().tobytes()
    child.join()
    rows = list(x.view(4, -1))
    loader = DataLoader(
        rows, 2, num_workers=1, collate_fn=collated, timeout=60, multiprocessing_context="fork"
    )
    assert torch.equal(torch.cat(list(loader)).view(-1), want)
    print("ok")
