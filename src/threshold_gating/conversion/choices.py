"""`Choices`: what the caller wants at which site, by names and patterns; every choice is used."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

from torch import Tensor

from threshold_gating import taxonomy
from threshold_gating.conversion import sites
from threshold_gating.conversion.config import Choice, GateConfig
from threshold_gating.conversion.site import ConversionError
from threshold_gating.instance import TG

Function = Callable[[Tensor], Tensor]


class Choices:
    """What the caller wants at which site, and whether every choice was used."""

    def __init__(
        self, given: Mapping[str, Choice] | None, default: GateConfig | None = None
    ) -> None:
        self.given = dict(given or {})
        self.default = default or GateConfig()
        self.used: set[str] = set()
        self.seen: dict[str, None] = {}  # the names of the sites, in their order

    def at(self, name: str, default: sites.Recognised, f: Function) -> sites.Recognised | None:
        """What stands at the element-wise site `name` for `f`; None leaves it alone."""
        self.seen[name] = None
        key = self.deciding(name)
        if key is None:
            return default
        choice = self.given[key]
        if choice is None:
            return None
        if isinstance(choice, GateConfig):
            choice = choice.init
        t = default.t if choice is None else instance_at(choice, default, f, name)
        return default if t == default.t else sites.judged(t, f)

    @property
    def trains(self) -> bool:
        """Whether anything is to be learned anywhere."""
        given = [c.train for c in self.given.values() if isinstance(c, GateConfig)]
        return any((self.default.train, *given))

    def config(self, name: str) -> GateConfig:
        """What a site learns, and how it is shared."""
        key = self._key(name)
        choice = None if key is None else self.given[key]
        return choice.over(self.default) if isinstance(choice, GateConfig) else self.default

    def names(self, name: str) -> bool:
        """Whether the caller has named this very site, and not by a pattern."""
        return name in self.given

    def leaves_alone(self, name: str) -> bool:
        """Whether a site is to stay as it is; asking uses no other choice."""
        key = self._key(name)
        return key is not None and self.given[key] is None and self.deciding(name) == key

    def leaves(self, name: str) -> bool:
        """Whether a site that is not element-wise is left alone: the only choice there."""
        self.seen[name] = None
        key = self.deciding(name)
        choice = None if key is None else self.given[key]
        choice = choice.init if isinstance(choice, GateConfig) else choice
        if key is not None and choice is not None and not key.startswith("re:"):
            raise ConversionError(
                f"{name} is not one element-wise function, so no instance can be chosen for it; "
                "give None to leave it alone.",
                name,
            )
        return self.leaves_alone(name)

    def check_free(self, name: str, what: str, why: str) -> None:
        """Refuse a choice for a site that has to stay as it is."""
        if (key := self.deciding(name)) is not None:
            raise ConversionError(
                f"{what} was given {self.given[key]!r} and has to stay as it is: {why}; give None.",
                name,
            )

    def deciding(self, name: str) -> str | None:
        """The name or pattern among the caller's that decides about a site, which is met."""
        self.used.update(self._patterns(name))
        self.used.update({name} & self.given.keys())
        return self._key(name)

    def _key(self, name: str) -> str | None:
        return name if name in self.given else next(reversed(self._patterns(name)), None)

    def _patterns(self, name: str) -> list[str]:
        return [k for k in self.given if k.startswith("re:") and re.fullmatch(k[3:], name)]

    def check_used(self) -> None:
        if unused := [k for k in self.given if k not in self.used]:
            near = difflib.get_close_matches(unused[0].removeprefix("re:"), self.seen, 5, 0.0)
            names = f"give the name of one, as {', '.join(map(repr, near))}; " if near else ""
            raise ConversionError(
                f"sites: {unused[0]!r} matches no site of this network; {names}"
                "`tg.audit(model, inputs)` lists them.",
                unused[0],
            )


def instance_at(choice: TG | str | int, default: sites.Recognised, f: Function, name: str) -> TG:
    if isinstance(choice, TG):
        return choice
    if isinstance(choice, str):
        return taxonomy.TAXONOMY[taxonomy.key_of(choice)]
    if isinstance(choice, bool) or not isinstance(choice, int) or choice < 2:
        raise ConversionError(
            f"{name}: sites takes a TG, a key of TAXONOMY, a number of branches K >= 2 or None; "
            f"got {choice!r}.",
            name,
        )
    if default.exact and choice == default.t.K:
        return default.t
    base = taxonomy.name_of(default.t)
    if base is not None and f"{base}_k{choice}" in taxonomy.TAXONOMY:
        return taxonomy.TAXONOMY[f"{base}_k{choice}"]
    from threshold_gating.fitting import fit  # scipy, only where a fit is needed

    return fit(f, over="line", K=choice).t
