"""The kernel for one vector, step by step: it equals float64, and wrong ones are found."""

import test_one_vector as t
import torch
from poison import poison

poison(torch.Tensor, "new_empty")
t.check("cpu")
t.check_copies()
t.check_parts()
t.check_a_counter_that_is_off()
right = t.one_vector.product
wrong = (  # on purpose: another region, and one owner for another
    lambda known, x, *rest: right(known, -x, *rest),
    lambda known, *rest: right(known._replace(owner=known.owner and ("lo", "lo")), *rest),
)
for t.one_vector.product in wrong:
    try:
        t.check("cpu")
    except AssertionError:
        continue
    raise SystemExit("a wrong kernel passes")
print("ok")
