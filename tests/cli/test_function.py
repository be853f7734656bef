"""Names, expressions and files give the function that they say."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from threshold_gating import TAXONOMY, taxonomy
from threshold_gating.cli.function import target

F = torch.nn.functional
X = torch.linspace(-4, 4, 33, dtype=torch.float64)


@pytest.mark.parametrize("key", TAXONOMY)
def test_every_key_is_a_target(key):
    found = target(key)
    assert found.name == key
    torch.testing.assert_close(found.f(X), taxonomy.ROWS[key].f(X), rtol=0, atol=0)


# (what is asked, the name it gets, the function it means)
ASKED = [
    ("GELU", "gelu", F.gelu),
    ("leaky-relu", "leaky_relu", F.leaky_relu),
    ("LeakyReLU", "leaky_relu", F.leaky_relu),
    ("LogSigmoid", "logsigmoid", F.logsigmoid),
    ("Softsign", "softsign", F.softsign),
    ("sin", "sin", torch.sin),
    ("snake", "snake", lambda x: x + torch.sin(x) ** 2),
    ("x", "x", lambda x: x),
    ("x-1", "x-1", lambda x: x - 1),
    (" x *  sigmoid(1.3*x)", "x * sigmoid(1.3*x)", lambda x: x * torch.sigmoid(1.3 * x)),
]


@pytest.mark.parametrize(("what", "name", "f"), ASKED, ids=[what for what, _, _ in ASKED])
def test_names_and_expressions_are_found(what, name, f):
    found = target(what)
    assert found.name == found.f.__name__ == name
    torch.testing.assert_close(found.f(X), f(X))


@pytest.mark.parametrize("name", taxonomy.NOT_REPRESENTABLE)
def test_what_has_no_instance_is_a_target_all_the_same(name):
    assert target(name).f(X).shape == X.shape


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below
        target("slu")
    assert str(caught.value) == (
        "no activation 'slu'; did you mean 'silu', 'selu', 'dsilu'? There are the names of "
        "`tg table --all`, expressions in x such as x*sigmoid(1.3*x), and FILE.py:NAME."
    )


def test_a_name_like_no_other_is_told_what_there_is():
    with pytest.raises(ValueError, match=r"^no activation 'qqqq'; there are the names of `tg "):
        target("qqqq")


@pytest.fixture(scope="module")
def source(tmp_path_factory, programs):
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(programs / "beside.py", folder)
    return Path(shutil.copy(programs / "acts.py", folder))


# (name in the file, the function it means)
OWN = {
    "swish": lambda x: x * torch.sigmoid(2 * x),
    "Slope": lambda x: F.leaky_relu(x, torch.tensor(0.3).item()),
    "steep": lambda x: F.leaky_relu(x, torch.tensor(0.7).item()),
    "Doubled": lambda x: 2 * x,
    "Plain": lambda x: 3 * x,
    "drop": lambda x: x,
}


@pytest.mark.parametrize("name", OWN)
def test_functions_modules_and_classes_of_a_file_are_found(source, name):
    found = target(f"{source}:{name}")
    assert found.name == found.f.__name__ == f"acts.py:{name}"
    torch.testing.assert_close(found.f(X).detach(), OWN[name](X))


def test_loading_leaves_the_path_and_other_modules_alone(source):
    before = list(sys.path), sys.modules.get("acts")
    target(f"{source}:swish")
    assert (list(sys.path), sys.modules.get("acts")) == before


def test_a_file_may_have_the_name_of_a_module(tmp_path):
    (tmp_path / "math.py").write_text("def half(x):\n    return x / 2")
    torch.testing.assert_close(target(f"{tmp_path / 'math.py'}:half").f(X), X / 2)
    assert sys.modules["math"].pi


def refusal(what):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is what is tested
        target(str(what))
    return str(caught.value)


def test_a_file_that_is_not_there_gets_the_nearest(source):
    near = source.with_name("act.py")
    assert refusal(f"{near}:swish") == f"no file '{near}'; did you mean '{source}'?"
    far = source.parent / "none" / "q.py"
    assert refusal(f"{far}:swish") == f"no file '{far}'."


def test_a_file_alone_is_asked_for_a_name(source):
    assert refusal(source) == f"which function of {source}? Give it as {source}:NAME."


def test_a_name_that_is_not_in_the_file_gets_the_nearest(source):
    assert refusal(f"{source}:swich") == f"no 'swich' in {source}; did you mean 'swish'?"
    assert refusal(f"{source}:qqqq") == f"no 'qqqq' in {source}; it has no such function."


def test_what_is_no_function_is_refused(source):
    assert refusal(f"{source}:number") == (
        "acts.py:number must be a function of a tensor or a module; it is int."
    )


def test_a_class_that_needs_arguments_is_refused(source):
    message = refusal(f"{source}:Sized")
    assert message.startswith("acts.py:Sized is a class that cannot be made without arguments (")
    assert message.endswith("'size'); name an instance of it.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\ny = z", " fails in line 2: NameError: name 'z' is not defined"),
        ("def f(:", " fails: SyntaxError: invalid syntax (broken.py, line 1)"),
        ("import sys\nsys.exit(3)", " fails in line 2: SystemExit: 3"),
    ],
)
def test_a_file_that_fails_is_said_with_the_line(tmp_path, text, reason):
    path = tmp_path / "broken.py"
    path.write_text(text)
    assert refusal(f"{path}:f") == f"{path}{reason}"
