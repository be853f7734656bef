"""The gated inputs of tier W by the kernels of `blend`, on a CPU; run with TRITON_INTERPRET=1."""

import pytest
import torch

from tests.kernels.product.test_many_soft import check_all, check_launches

check_all("cpu", [torch.float32, torch.bfloat16])
with pytest.MonkeyPatch.context() as patch:
    check_launches(patch)
print("ok")
