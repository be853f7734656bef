"""The mutation tool: its mutants are those meant, and a test that is missing shows."""

from tools import mutate

SOURCE = b'''
import math


def clipped(x: float, low: float = 0.0) -> float:
    """A docstring."""
    if not math.isfinite(x):
        raise ValueError(f"{x + 1} is not finite")
    total = [low]
    total.append(x)
    return x if x < low else total.copy()[1]
'''


def test_mutants_are_one_change_each_and_leave_messages_and_types_alone():
    found = {(m.line, m.after) for m in mutate.mutants(SOURCE)}
    assert found == {
        (5, "1.0"),
        (7, "if False:\n        raise ValueError(f'{x + 1} is not finite')"),
        (7, "(math.isfinite(x))"),
        (10, "pass"),
        (10, "(total)"),
        (11, "(total.copy()[1] if x < low else x)"),
        (11, "(x <= low)"),
        (11, "(total)"),
        (11, "2"),
    }


def test_every_file_and_every_test_of_the_list_exists():
    for file, tests in mutate.TESTS.items():
        assert (mutate.ROOT / "src" / "threshold_gating" / file).exists(), file
        assert all([*mutate.ROOT.glob(f"tests/**/test_{name}.py")] for name in tests), file


def test_a_run_that_fails_kills_and_the_file_is_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "threshold_gating").mkdir()
    (tmp_path / "threshold_gating" / "__init__.py").touch()
    module = tmp_path / "threshold_gating" / "small.py"
    module.write_bytes(b"ONE = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(
        "from threshold_gating.small import ONE\n\ndef test_one():\n    assert ONE == 1\n"
    )
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    assert mutate.survives("small.py", b"ONE = 1.0\n", tmp_path, ("small",), 60)
    assert not mutate.survives("small.py", b"ONE = 2\n", tmp_path, ("small",), 60)
    assert not mutate.survives("small.py", b"while True: pass\n", tmp_path, ("small",), 3)
    assert module.read_bytes() == b"ONE = 1\n"
