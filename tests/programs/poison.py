"""NaN in whatever is allocated and not written, for the programs that interpret kernels."""


def poison(home, *names):
    """Let these functions of `home` allocate tensors that are full of NaN."""
    for name in names:
        setattr(home, name, _filled(getattr(home, name)))


def _filled(allocate):
    def allocated(*args, **kwargs):
        out = allocate(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return allocated
