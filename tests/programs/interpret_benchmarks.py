"""Every contender of the benchmarks but attention, by interpreted kernels."""

from small import fake_rows

from benchmarks.timing import Place
from threshold_gating import kernels

kernels.use("triton")
for name in ("elementwise", "gated units", "frozen", "tier W", "growth"):
    rows = fake_rows(Place("cpu", None), name)
    failed = {row.work: row.failed for row in rows if row.failed}
    assert rows
    assert not failed, failed
print("ok")
