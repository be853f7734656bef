"""What the commands of `tg` take: the same option is the same in each, and old ones are refused."""

import argparse
import re

import pytest

from threshold_gating import kernels
from threshold_gating.cli import COMMANDS, main, options, shared, table
from threshold_gating.conversion import perplexity
from threshold_gating.conversion.enumeration import FORMATS, name_of
from threshold_gating.hardware import physical


def parsers():
    (commands,) = (a for a in options.parser()._actions if hasattr(a, "choices") and a.choices)
    return commands.choices


def taken(option):
    """The option in every command that has it."""
    found = {name: parser._option_string_actions.get(option) for name, parser in parsers().items()}
    return {name: action for name, action in found.items() if action is not None}


def test_every_command_that_runs_has_a_parser():
    assert list(parsers()) == list(COMMANDS)


def test_literal_choices_are_those_of_the_modules_that_run():
    assert tuple(table.FORMATS) == options.TABLES
    assert tuple(perplexity.COLUMNS) == options.COLUMNS
    assert tuple(map(name_of, FORMATS)) == options.DTYPES
    assert physical.SHARES == options.SHARED_GATES
    # torch's own op in place of the gates would be compared with itself
    assert tuple(name for name in kernels.BACKENDS if name != "native") == options.BACKENDS


def test_json_is_taken_by_every_command():
    assert list(taken("--json")) == list(COMMANDS)


SHARED = ["--json", "--checkpoint", "--trust", "--pretrained", "--inputs"]
SHARED += ["--gates", "--site", "--tol", "--device"]


@pytest.mark.parametrize("option", SHARED)
def test_an_option_of_several_commands_is_the_same_in_each(option):
    every = taken(option)
    if option == "--gates":  # of export: what its files hold, beside --native-where-exact
        assert every.pop("export").nargs == 0
    found = [(a.metavar, a.nargs, a.default, a.type, a.help) for a in every.values()]
    assert len(found) > 1
    assert all(each == found[0] for each in found)


def test_what_is_written_is_named_by_o_or_out():
    assert (
        list(taken("-o"))
        == list(taken("--out"))
        == ["explain", "convert", "calibrate", "report", "spice", "rtl", "demo"]
    )


def test_a_number_of_branches_is_checked_in_the_same_way_everywhere():
    assert list(taken("-K")) == ["explain", "calibrate"]
    assert len({action.type for action in taken("-K").values()}) == 1


def test_defaults_are_shown_as_they_are():
    """Where the help names a number or a word, parsing nothing gives it."""
    seen = 0
    for parser in parsers().values():
        for action in parser._actions:
            shown = re.search(r"\(default: ([\w. ]+)\)", action.help or "")
            default = action.default
            if shown is None or shown[1] in ("all", "here", "Table 2", "as convert chooses"):
                continue
            words = (
                map(str, default)
                if isinstance(default, list)
                else [f"{default:g}"]
                if isinstance(default, float)
                else [str(default)]
            )
            assert " ".join(words) == shown[1]
            seen += 1
    assert seen >= 10


def test_every_option_has_a_help_text():
    for name, parser in parsers().items():
        assert [a.dest for a in parser._actions if not a.help] == [], name


OLD = [
    ("explain gelu --k 3", "--k is now -K"),
    ("calibrate net.py:f --k 3", "--k is now -K"),
    ("table --format json", "JSON is now --json FILE, or --json - for standard output"),
    ("env --json", "argument --json: give a FILE, or - for standard output"),
    ("convert net.py:f --json --tol inf", "argument --json: give a FILE, or - for standard output"),
    (
        "explain --json gelu",
        "required: WHAT (--json took 'gelu' as its FILE; - is standard output)",
    ),
    (
        "verify --json net.py:f out",
        "required: DIR (--json took 'net.py:f' as its FILE; - is standard output)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), OLD)
def test_an_old_spelling_is_answered_with_the_new_one(line, said, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_old_spellings_are_not_in_the_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
    assert "--k" not in capsys.readouterr().out.split()


@pytest.mark.parametrize("word", ["nan", "-1", "x"])
def test_a_bound_is_a_number_from_0_on(word):
    with pytest.raises(argparse.ArgumentTypeError, match="E must be a number from 0 on, or inf"):
        shared.bound(word)
