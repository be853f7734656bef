"""NaN in whatever is allocated and not written, for the programs that interpret kernels."""


def poison(home, *names):
    """Let these functions of `home` allocate tensors that are full of NaN."""
    for name in names:
        setattr(home, name, _filled(getattr(home, name)))


def _filled(allocate):
    def allocated(*args, **kwargs):
        out = allocate(*args, **kwargs)
        # not what torch itself makes to learn and has no memory
        is_filled = out.is_floating_point() and out.numel()
        return out.fill_(float("nan")) if is_filled else out

    return allocated
