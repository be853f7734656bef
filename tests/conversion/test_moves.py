"""Functions that only move elements: each is tried, in every spelling."""

import pytest
import torch
import torch.nn.functional as F

from threshold_gating.conversion.moves import COPIES, TURNS, VIEWS, spelled

X = torch.linspace(-3, 3, 24).view(4, 6)
INDEX = torch.tensor([2, 0, 2])
# What each is called with behind x.
GIVEN = {
    **dict.fromkeys(("permute", "movedim", "moveaxis"), (1, 0)),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), (0, 1)),
    **dict.fromkeys(("t", "adjoint", "ravel", "flatten", "squeeze", "diagonal", "unbind"), ()),
    **dict.fromkeys(("view", "reshape"), (3, 8)),
    **dict.fromkeys(("view_as", "reshape_as"), (torch.zeros(3, 8),)),
    **dict.fromkeys(("chunk", "tensor_split", "unsafe_chunk", "split", "unsafe_split"), (2,)),
    **dict.fromkeys(("repeat", "tile"), (2, 3)),
    **{"unflatten": (1, (2, 3)), "unsqueeze": (1,), "narrow": (1, 2, 3), "select": (1, 2)},
    **{"expand": (5, 4, 6), "expand_as": (torch.zeros(5, 4, 6),), "split_with_sizes": ([1, 3],)},
    **{"__getitem__": (slice(1, 3),), "index_select": (0, INDEX), "roll": (2, 1), "flip": ((0,),)},
    **{"take_along_dim": (torch.tensor([[1], [0], [3], [2]]), 1), "rot90": (1, (0, 1))},
}
# torch.permute and others take one argument where the method takes several.
TOGETHER = {torch.permute, torch.reshape, torch.tile}


def called(function, x):
    name = function.__name__
    if name == "__get__":
        return [function(x)]
    args = GIVEN[name.removeprefix("linalg_")]
    y = function(x, args) if function in TOGETHER else function(x, *args)
    return [y] if isinstance(y, torch.Tensor) else list(y)


def spelling(function):
    return getattr(function, "__qualname__", function.__name__)


@pytest.mark.parametrize("function", sorted(VIEWS | COPIES, key=repr), ids=spelling)
def test_what_moves_elements_commutes_with_an_activation(function):
    for after, before in zip(called(function, F.relu(X)), called(function, X), strict=True):
        assert torch.equal(after, F.relu(before))


@pytest.mark.parametrize("function", sorted(VIEWS | COPIES, key=repr), ids=spelling)
def test_a_view_is_in_the_memory_of_its_input_and_a_copy_is_not(function):
    where = X.untyped_storage().data_ptr()
    for y in called(function, X):
        assert (y.untyped_storage().data_ptr() == where) == (function in VIEWS)


def test_turns_are_views_and_a_name_means_all_its_spellings():
    assert TURNS < VIEWS
    assert not VIEWS & COPIES
    assert spelled("flip") == {torch.flip, torch.Tensor.flip}
    assert spelled("silu") == {F.silu}
