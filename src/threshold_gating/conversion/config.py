"""`GateConfig`: what stands at the sites of a network and what of it learns, as a frozen record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from threshold_gating import taxonomy
from threshold_gating.instance import TG
from threshold_gating.nn.spec import LEARNABLE, SHARES, names_of


@dataclass(frozen=True)
class GateConfig:
    """What stands at a site, or at all sites of a network, and what of it learns.

    Of a network it is what `convert(model, config=..., inputs=x)` takes; in `sites` it is for the
    sites of one name or pattern, where whatever is None is as for the network. Frozen, hashable,
    and the same again from JSON.

    Args:
        init: what a site starts from: an instance, a key of `TAXONOMY` or a number of branches K.
            None: the function that is there. Only within `sites`.
        train: which of "tau", "theta", "s", "c" are learned; () for nothing.
        share: which elements share what is learned: "layer" (all of a site), "channel", "head" (of
            attention) or "neuron" (each position).
        axis: where the channels are in the input of a site; None: found from the run.
        sites: {name or "re:pattern": GateConfig, TG, key, K, or None to leave it alone}, as
            `convert` takes them. Kept as pairs, in order.

    >>> config = GateConfig(train=("tau", "theta"), share="channel", sites={"head.act": None})
    >>> GateConfig.from_json(config.to_json()) == config
    True
    """

    init: TG | str | int | None = None
    train: tuple[str, ...] | None = None
    share: str | None = None
    axis: int | None = None
    sites: tuple[tuple[str, Choice], ...] = ()

    def __post_init__(self) -> None:
        if self.train is not None:
            object.__setattr__(self, "train", _checked_train(self.train))
        if self.share is not None:
            check_share(self.share)
        if self.axis is not None and (isinstance(self.axis, bool) or type(self.axis) is not int):
            raise TypeError(f"GateConfig: axis must be a whole number or None; got {self.axis!r}.")
        check_choice("GateConfig: init", self.init)
        object.__setattr__(self, "sites", _pairs(self.sites))

    def over(self, default: GateConfig) -> GateConfig:
        """This for a site of a network whose config is `default`."""
        names = ("train", "share", "axis")
        return replace(self, **{k: getattr(default, k) for k in names if getattr(self, k) is None})

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values, without what is not set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        found = {k: v for k, v in values.items() if v is not None and k != "sites"}
        if self.train is not None:
            found["train"] = list(self.train)
        found |= {"init": _choice_to_json(self.init)} if self.init is not None else {}
        if self.sites:
            found["sites"] = {name: _choice_to_json(choice) for name, choice in self.sites}
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GateConfig:
        """The config that `to_dict` has written; keys it does not know are refused."""
        if not isinstance(data, Mapping):
            raise TypeError(f"GateConfig.from_dict: takes a dict; got {type(data).__name__}.")
        known = [f.name for f in fields(cls)]
        if unknown := [key for key in data if key not in known]:
            raise ValueError(
                f"GateConfig.from_dict: unknown key {unknown[0]!r}; known: {', '.join(known)}."
            )
        given = dict(data)
        if "init" in given:
            given["init"] = _choice_of_json(given["init"])
        if not isinstance(sites := given.get("sites", {}), Mapping):
            raise TypeError(f"GateConfig.from_dict: sites must be a dict; got {sites!r:.60}.")
        given["sites"] = {name: _choice_of_json(choice) for name, choice in sites.items()}
        return cls(**given)

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> GateConfig:
        """The config that `to_json` has written."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"GateConfig.from_json: not JSON text ({error}).") from error
        return cls.from_dict(data)


Choice = TG | str | int | GateConfig | None  # what a caller may give for a site


def _checked_train(train: Any) -> tuple[str, ...]:
    names = names_of("GateConfig", train)
    if unknown := [n for n in names if n not in LEARNABLE]:
        raise ValueError(
            f"GateConfig: train takes {', '.join(LEARNABLE)}, as in train=('tau', 'theta'); got "
            f"{unknown[0]!r}."
        )
    return tuple(n for n in LEARNABLE if n in names)


def check_share(share: Any) -> None:
    """Refuse what is no sharing of the sites of a network."""
    if share == "net":
        raise ValueError(
            "GateConfig: share='net' has no place in a conversion: each site keeps its parameters "
            "in the module that it is in, and starts from a function of its own; take 'layer', one "
            "gate for each site."
        )
    if share not in SHARES:
        known = ", ".join(repr(s) for s in SHARES if s != "net")
        raise ValueError(f"GateConfig: share is one of {known}; got {share!r}.")


def check_choice(what: str, choice: Any) -> None:
    """Refuse what is no instance, no key of it and no number of branches."""
    if isinstance(choice, str):
        taxonomy.key_of(choice)  # it has the words
    is_number = isinstance(choice, int) and not isinstance(choice, bool)
    if is_number and choice < 2:
        raise ValueError(f"{what}: a number of branches K is 2 or more; got {choice}.")
    if not (choice is None or is_number or isinstance(choice, TG | str)):
        raise TypeError(
            f"{what} takes a TG, a key of TAXONOMY, a number of branches K >= 2 or None; got "
            f"{choice!r:.60}."
        )


def _pairs(sites: Any) -> tuple[tuple[str, Choice], ...]:
    if isinstance(sites, str) or not isinstance(sites, Iterable):
        raise TypeError(f"GateConfig: sites is a dict by names of sites; got {sites!r:.60}.")
    pairs = tuple(_pair(each) for each in (sites.items() if isinstance(sites, Mapping) else sites))
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"GateConfig: sites has {twice[0]!r} twice; give each name once.")
    return pairs


def _check_name(caller: str, name: Any) -> None:
    """Refuse what is no name of a site and no pattern of names."""
    if not isinstance(name, str):
        raise TypeError(
            f"{caller}: names of sites must be strings, as `tg.audit` prints them; got "
            f"{name!r:.60}."
        )
    try:
        re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    except re.error as error:
        raise ValueError(
            f"{caller}: sites has {name!r}, and what is behind 're:' is no regular expression "
            f"({error}); re.escape(...) writes a name as one."
        ) from error


def _pair(pair: Any) -> tuple[str, Choice]:
    if isinstance(pair, str) or not (isinstance(pair, Iterable) and len(both := tuple(pair)) == 2):
        raise TypeError(f"GateConfig: sites is a dict by names of sites; got {pair!r:.60}.")
    name, choice = both
    _check_name("GateConfig", name)
    if not isinstance(choice, GateConfig):
        check_choice(f"GateConfig: sites[{name!r}]", choice)
    elif choice.sites:
        raise ValueError(f"GateConfig: the config of {name!r} has sites itself; put all into one.")
    return name, choice


def _choice_to_json(choice: Choice) -> Any:
    return choice.to_dict() if isinstance(choice, TG | GateConfig) else choice


def _choice_of_json(data: Any) -> Choice:
    if not isinstance(data, Mapping):
        choice: Choice = data
        return choice
    is_instance = "theta" in data  # which every instance has, and no config
    return TG.from_dict(dict(data)) if is_instance else GateConfig.from_dict(data)


def requested(
    caller: str, sites: Mapping[str, Choice] | None, train: Any, share: Any, config: Any
) -> tuple[GateConfig, Mapping[str, Choice]]:
    """What the arguments of `convert` ask for: the config of the network, and choices by site."""
    if config is None:
        default = GateConfig(train=names_of(caller, train), share=share)
        for name in sites or {}:
            _check_name(caller, name)
        return _learning(caller, default, share not in ("layer", None), sites or {})
    if not isinstance(config, GateConfig):
        raise TypeError(f"{caller}: config must be a GateConfig; got {type(config).__name__}.")
    given = {"sites": bool(sites), "train": bool(train), "share": share != "layer"}
    if twice := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"{caller}: config and {twice[0]} were both given; say all of it in the config, as "
            f"dataclasses.replace(config, {twice[0]}=...) does."
        )
    if config.init is not None:
        raise ValueError(
            f"{caller}: config.init={config.init!r:.40} would stand at every site; say it for the "
            "sites that are meant, as GateConfig(sites={'act': GateConfig(init=...)})."
        )
    default = replace(config, sites=(), train=config.train or (), share=config.share or "layer")
    return _learning(caller, default, config.share is not None, dict(config.sites))


def _learning(
    caller: str, default: GateConfig, is_shared: bool, sites: Mapping[str, Choice]
) -> tuple[GateConfig, Mapping[str, Choice]]:
    """The same, unless it says how something is shared or where its channels are, and not what."""
    configs = {name: c for name, c in sites.items() if isinstance(c, GateConfig)}
    trains = {name: bool(c.over(default).train) for name, c in configs.items()}
    asked = {"": is_shared or default.axis is not None} | {
        name: c.share is not None or c.axis is not None for name, c in configs.items()
    }
    learned = {"": bool(default.train) or any(trains.values()), **trains}
    if idle := [name for name, is_asked in asked.items() if is_asked and not learned[name]]:
        where = f"sites[{idle[0]!r}]" if idle[0] else "it"
        raise ValueError(
            f"{caller}: {where} says share or axis, which is for what is learned, and train names "
            "nothing; say what, as in train=('tau', 'theta'), or leave share and axis out."
        )
    return default, sites
