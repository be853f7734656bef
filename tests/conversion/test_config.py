"""`GateConfig`: a frozen record of a conversion, the same again from JSON."""

import json
import pickle

import pytest

from threshold_gating import TG, GateConfig

FULL = GateConfig(
    train=("theta", "tau"),
    share="channel",
    axis=-1,
    sites={
        "re:.*attn.*": GateConfig(share="head", train="tau"),
        "act": "gelu_k3",
        "act#1": 4,
        ":relu#0": TG(float("inf"), 0, (0, 1), (0, 0)),
        ":tanh#0": GateConfig(init=TG(2.0, 0.5, (0, 0), (-1, 1)), axis=1),
        "head": None,
    },
)


def test_a_config_is_the_same_again_from_json_and_hashable():
    again = GateConfig.from_json(FULL.to_json())
    assert again == FULL
    assert hash(again) == hash(FULL)
    assert GateConfig.from_dict(json.loads(json.dumps(FULL.to_dict()))) == FULL
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    assert GateConfig.from_json(GateConfig().to_json()) == GateConfig()


def test_what_is_learned_has_one_order_and_sites_keep_theirs():
    assert FULL.train == ("tau", "theta")
    assert GateConfig(train="theta").train == ("theta",)
    assert [name for name, _ in FULL.sites][:2] == ["re:.*attn.*", "act"]
    swapped = GateConfig(sites={"re:b": None, "re:a": None})
    assert swapped != GateConfig(sites={"re:a": None, "re:b": None})  # the last pattern wins


def test_a_config_of_a_site_has_the_rest_from_that_of_the_network():
    network = GateConfig(train=("tau",), share="channel", axis=1)
    assert GateConfig(axis=-1).over(network) == GateConfig(train=("tau",), share="channel", axis=-1)
    assert GateConfig(train=()).over(network).train == ()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"train": "slope"}, ValueError, "train takes tau, theta, s, c"),
        ({"train": 3}, TypeError, "train names what is learned"),
        ({"share": "row"}, ValueError, "share is one of 'layer', 'channel', 'head', 'neuron'"),
        ({"share": "net"}, ValueError, "take 'layer'"),
        ({"axis": 1.0}, TypeError, "axis must be a whole number"),
        ({"axis": True}, TypeError, "axis must be a whole number"),
        ({"init": "gelo"}, ValueError, "did you mean 'gelu'"),
        ({"init": 1}, ValueError, "K is 2 or more"),
        ({"init": 2.5}, TypeError, "takes a TG, a key of TAXONOMY"),
        ({"sites": {"act": object()}}, TypeError, r"sites\['act'\] takes a TG"),
        ({"sites": {3: None}}, TypeError, "names of sites must be strings"),
        ({"sites": ["act"]}, TypeError, "sites is a dict"),
        ({"sites": ["ab"]}, TypeError, "sites is a dict"),
        ({"sites": 5}, TypeError, "sites is a dict by names of sites; got 5"),
        ({"sites": "act"}, TypeError, "sites is a dict by names of sites; got 'act'"),
        ({"sites": (("a", None), ("a", 3))}, ValueError, "sites has 'a' twice"),
        ({"sites": {"re:(": None}}, ValueError, "'re:' is no regular expression .*re.escape"),
        ({"sites": {"a": GateConfig(sites={"b": None})}}, ValueError, "has sites itself"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_what_would_work(options, error, says):
    with pytest.raises(error, match=says):
        GateConfig(**options)


def test_keys_that_are_not_known_and_text_that_is_no_json_are_refused():
    with pytest.raises(ValueError, match="unknown key 'tran'; known: init, train, share"):
        GateConfig.from_dict({"tran": ["tau"]})
    with pytest.raises(ValueError, match="unknown key 'shared'"):
        GateConfig.from_dict({"sites": {"act": {"shared": "layer"}}})
    with pytest.raises(ValueError, match="not JSON"):
        GateConfig.from_json("{")
    with pytest.raises(TypeError, match="takes a dict"):
        GateConfig.from_json("[]")
