"""Reports as text: tables within their width, long lists in few words."""

import json
import math

from threshold_gating.conversion.text import WIDTH, columns, jsonable, some


def test_many_names_are_some_and_how_many_more():
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert some([str(k) for k in range(9)], 8) == "0, 1, 2, 3, 4, 5, 6, 7 and 1 more"


def test_a_table_keeps_to_its_width_whatever_its_names_are():
    long = "encoder." * 12 + "act"
    lines = columns([("site", "kind", "K"), (long, "gelu", "5"), ("act", "x" * 90, "2")])
    assert max(map(len, lines)) <= WIDTH
    assert any(line.endswith("act") and line in long for line in lines)  # a line to itself
    assert columns([("site", "kind"), ("a", "relu")]) == ["site  kind", "----  ----", "a     relu"]


def test_numbers_that_json_has_not_are_texts():
    plain = jsonable({"a": (1.0, math.inf), "b": [math.nan, None, {"c": -math.inf}]})
    assert json.dumps(plain, allow_nan=False)
    assert plain == {"a": [1.0, "inf"], "b": ["nan", None, {"c": "-inf"}]}
