"""The tiles of a GPU, step by step: of every shape, of turns of several, whole and ragged."""

import pytest

from threshold_gating.kernels.blend.gpu import Matrix


@pytest.mark.parametrize("names", [("silu", "hard"), ("gelu",), ("4", "6", "8")])
def test_gates_in_tiles_of_every_shape_equal_float64(step_by_step, names):
    step_by_step("interpret_tiles.py", *names)


def test_gates_far_out_equal_float64_up_to_the_largest_numbers(step_by_step):
    step_by_step("interpret_tiles.py", "far")


def test_infinity_is_a_lines_and_tails_keep_their_digits(step_by_step):
    step_by_step("interpret_tiles.py", "ends")


def test_nan_going_back_is_not_lost_and_sharp_frozen_gates_make_none(step_by_step):
    step_by_step("interpret_tiles.py", "lost")


def test_usual_gates_are_not_taken_one_by_one_nor_are_columns_that_are_not_there(step_by_step):
    step_by_step("interpret_tiles.py", "ways")


@pytest.mark.parametrize("sizes", [(37, 65, 1), (3, 5, 77), (1, 1, 1001), (1, 7, 1), (512, 256, 1)])
@pytest.mark.parametrize("turn", [1, 2, 4])
@pytest.mark.parametrize("programs", [1, 3, 2**31])
def test_every_tile_belongs_to_one_program_which_takes_whole_turns(sizes, turn, programs):
    m = Matrix.of(sizes)
    t = m.tiles(2, 32, 1, 1, programs, turn)
    across, along = m.grid(t)
    assert t.iters % t.turn == 0
    assert (along - 1) * t.iters < m.along(t) <= along * t.iters
    assert across * along <= max(programs, across)


@pytest.mark.parametrize(
    ("sizes", "ragged"),
    [
        ((64, 96, 1), [(65, 96, 1), (66, 96, 1), (64, 97, 1)]),
        ((4, 16, 128), [(4, 16, 127), (4, 16, 160), (3, 17, 128)]),
        ((1, 1, 4096), [(1, 1, 4095), (1, 1, 4160)]),
    ],
)
def test_tiles_are_whole_where_no_number_of_a_turn_is_outside(sizes, ragged):
    whole = [m.whole(m.tiles(2, 32, 1, 1, 3, 2)) for m in map(Matrix.of, (sizes, *ragged))]
    assert whole == [True, *[False] * len(ragged)]
