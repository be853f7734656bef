"""The kernels of an LSTM, step by step, with NaN in what is not written; wrong ones are found."""

from unittest import mock

import test_lstm as t
import torch
from poison import poison

from threshold_gating import kernels
from threshold_gating.kernels.recurrent import lstm

poison(torch.Tensor, "new_empty")
torch.set_num_threads(1)
kernels.use("triton")
with mock.patch.object(lstm, "_forward", wraps=lstm._forward) as calls:
    t.check("lstm over time", t.SHAPES[0], "cpu")
    t.check("lstm packed both over time", t.SHAPES[1], "cpu")
    t.check("lstm free over time", t.SHAPES[2], "cpu")
    t.check("lstm over time", (2, 3, 5), "cpu", torch.bfloat16)
    assert calls.call_count == 5  # it was the kernels: twice where there are two directions
    t.check_others("cpu")
sums, backward = lstm._sums, lstm._backward
wrong = {  # on purpose: the numbers of gates alone, and the first step's state alone
    "_sums": lambda *a: 1.01 * sums(*a),
    "_backward": lambda *a: [1.01 * g if k == 4 else g for k, g in enumerate(backward(*a))],
}
for name, worse in wrong.items():
    with mock.patch.object(lstm, name, worse):
        try:
            t.check("lstm over time", (2, 3, 5), "cpu")
        except AssertionError:
            continue
        raise SystemExit(f"a wrong {name} passes")
print("ok")
