"""The policy of a node: the limits that its operator sets, whatever a server asks for."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flwr_privacy.accounting import ADD_REMOVE, RELATIONS, REPLACE_ONE, Charge
from flwr_privacy.errors import (
    DeclinedError,
    InvalidParameterError,
    check_choice,
    check_integer,
    check_number,
)
from flwr_privacy.wire.files import read_toml

__all__ = ["UNITS", "Policy"]

UNITS = ("record", "user")
"""What a guarantee can protect: one record, or everything of one user."""

_USUAL = (ADD_REMOVE, REPLACE_ONE)
"""Neighbours that a node answers for if its policy lists none."""

_LISTS = (
    "schemes",
    "units",
    "neighbours",
    "trusted_parents",
    "noise_members",
    "allow_unprotected",
    "allowed_messages",
)

_COUNTS = {"max_cohort": 2, "max_releases": 0, "max_releases_per_day": 0, "max_disk": 0}
"""Limits that are whole numbers, with the least value of each."""

_LONGEST_NAME = 64  # characters of a server's word in an error


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The limits of a node's releases; the defaults allow what each scheme guarantees.

    Parameters
    ----------
    max_epsilon : float, optional
        Largest epsilon, at `delta`, of everything that the node's ledger was ever charged, each
        release for its own unit: for a record this holds in any case, for a user where `units`
        allowed nothing else from the first release on. At least 0, which allows no release at all.
        It is counted for replaced data, or, if `neighbours` lists a single relation, for that one.
    delta : float, default 1e-5
        Between 0 and 1, both excluded.
    min_noise_multiplier : float, optional
        Smallest standard deviation (or Laplace scale) of the noise over the sensitivity, at least
        0.
    min_sigma : float, optional
        Smallest standard deviation (or Laplace scale) of the noise in the units of the weights, at
        least 0.
    schemes : list of str, optional
        Names of the schemes that may ask.
    units : list of {"record", "user"}, optional
        Units of protection that are enough.
    neighbours : list of {"add_remove", "replace_one", "zero_out"}, optional
        For which neighbours a guarantee is enough. By default all but ``zero_out``, which simulated
        clients answer for.
    trusted_parents : list of str, optional
        Aggregators that this node trusts with answers without noise, sealed for them, in a scheme
        with tiers; their keys must be pinned too. By default none.
    noise_members : list of str, optional
        Nodes that this node trusts to add the noise of a committee, a fifth of them, one at least,
        excepted; their keys must be pinned too. A node that is listed itself adds such noise, and
        does not train where a committee adds it. By default none.
    min_summed : int, optional
        Least number of clients in a secure sum, at least 2, without those beyond `max_cohort`; the
        node then answers only within one.
    min_children : int, default 2
        Of an aggregator in a scheme with tiers: fewest children whose answers it averages, at least
        1.
    allow_unprotected : list of str, optional
        Schemes that promise differential privacy and may all the same send answers without noise,
        e.g. ``["central-dp"]`` for a trusted server. By default none; simulated clients may always.
    allowed_messages : list of str, optional
        Types of the app's own messages (``"query.report"``) that are answered outside of the
        scheme. By default none of those that bring or return a record.
    max_cohort : int, optional
        Largest cohort of a secure sum that this node believes a server, at least 2. Clients beyond
        it count as the server's.
    max_releases : int, optional
        Most releases that the node's ledger may ever hold, at least 0.
    max_releases_per_day : int, optional
        Most releases within 24 hours, at least 0.
    max_disk : int, optional
        Most bytes that the node's ledger and reply cache may take, at least 0.

    Raises
    ------
    InvalidParameterError
        If a value has the wrong type or is out of range, or `allow_unprotected` is set beside a
        limit that refuses every answer without noise.

    Examples
    --------
    >>> policy = Policy(min_noise_multiplier=1.0, units=["user"])
    >>> policy.check(scheme="udp", unit="user", noise_multiplier=0.5, sigma=0.01)
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.DeclinedError: scheme 'udp' asks for noise multiplier 0.5: \
the node's policy has min_noise_multiplier = 1
    """

    max_epsilon: float | None = None
    delta: float = 1e-5
    min_noise_multiplier: float | None = None
    min_sigma: float | None = None
    schemes: Sequence[str] | None = None
    units: Sequence[str] | None = None
    neighbours: Sequence[str] | None = None
    trusted_parents: Sequence[str] | None = None
    noise_members: Sequence[str] | None = None
    min_summed: int | None = None
    min_children: int = 2
    allow_unprotected: Sequence[str] | None = None
    allowed_messages: Sequence[str] | None = None
    max_cohort: int | None = None
    max_releases: int | None = None
    max_releases_per_day: int | None = None
    max_disk: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_epsilon", "min_noise_multiplier", "min_sigma"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), minimum=0)
        check_number("delta", self.delta, minimum=math.ulp(0.0), maximum=math.nextafter(1.0, 0.0))
        for name in _LISTS:
            if getattr(self, name) is not None:
                # Lists, as TOML has them, become tuples: nothing changes a policy later.
                object.__setattr__(self, name, _names(name, getattr(self, name)))
        if self.min_summed is not None:
            check_integer("min_summed", self.min_summed, minimum=2)
        check_integer("min_children", self.min_children, minimum=1)
        for name, minimum in _COUNTS.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=minimum)
        for unit in self.units or ():
            check_choice("units", unit, UNITS)
        for relation in self.neighbours or ():
            check_choice("neighbours", relation, RELATIONS)
        if self.allow_unprotected and (limits := self._limits_on_noise()):
            raise InvalidParameterError(
                "allow_unprotected",
                list(self.allow_unprotected),
                f"nothing beside {', '.join(limits)}: a node with these refuses every answer "
                "without noise",
            )

    def _limits_on_noise(self) -> list[str]:
        """Return the names of the limits that no answer without noise can meet."""
        limits = {
            "max_epsilon": self.max_epsilon is not None,
            "units": self.units is not None,
            "neighbours": self.neighbours is not None,
            "min_noise_multiplier": bool(self.min_noise_multiplier),
            "min_sigma": bool(self.min_sigma),
        }
        return [name for name, given in limits.items() if given]

    @classmethod
    def read(cls, path: str | Path) -> "Policy":
        """Read a policy from a TOML file with any of the parameters as keys.

        Raises
        ------
        InvalidParameterError
            If the file cannot be read or is no TOML, a key is unknown (with the nearest names), or
            a value has the wrong type or is out of range. The message names the file.
        """

        def policy(values: dict[str, Any]) -> "Policy":
            for key in values:
                check_choice("key", key, [entry.name for entry in fields(cls)])
            return cls(**values)

        return read_toml("policy", path, policy)

    def check(
        self,
        *,
        scheme: str,
        unit: str,
        noise_multiplier: float,
        neighbours: str | None = None,
        sigma: float | None = None,
    ) -> None:
        """Check a release before anything is computed for it.

        Parameters
        ----------
        scheme : str
            Name of the scheme that asks.
        unit : {"record", "user"}
            What its guarantee protects.
        noise_multiplier : float
            Standard deviation (or Laplace scale) of its noise over the sensitivity; 0: no noise.
        neighbours : {"add_remove", "replace_one", "zero_out"}, optional
            For which it is that noise; None where nothing is to be checked of them.
        sigma : float, optional
            The same in the units of the weights, once it is known.

        Raises
        ------
        DeclinedError
            If the policy does not allow it; the message names what was asked and the policy.
        InvalidParameterError
            If a value is malformed; it may come from an adversary.
        """
        if not isinstance(scheme, str):
            raise InvalidParameterError("scheme", type(scheme).__name__, "a name")
        check_choice("unit", unit, UNITS)
        check_number("noise_multiplier", noise_multiplier, minimum=0)
        if sigma is not None:
            check_number("sigma", sigma, minimum=0)
        self.check_scheme(scheme)
        asking = f"scheme {scheme[:_LONGEST_NAME]!r}"
        if self.units is not None and unit not in self.units:
            raise _declined(f"{asking} protects the unit {unit!r}", f"units = {list(self.units)}")
        allowed = _USUAL if self.neighbours is None else self.neighbours
        if neighbours is not None and neighbours not in allowed:
            default = ", by default" if self.neighbours is None else ""
            raise _declined(
                f"{asking} asks for a release with a guarantee for the neighbours {neighbours!r}",
                f"neighbours = {list(allowed)}{default}",
            )
        if self.min_noise_multiplier is not None and noise_multiplier < self.min_noise_multiplier:
            raise _declined(
                f"{asking} asks for noise multiplier {_show(noise_multiplier)}",
                f"min_noise_multiplier = {_show(self.min_noise_multiplier)}",
            )
        if self.min_sigma is not None and sigma is not None and sigma < self.min_sigma:
            raise _declined(
                f"{asking} asks for sigma {_show(sigma)}", f"min_sigma = {_show(self.min_sigma)}"
            )

    def check_scheme(self, scheme: str) -> None:
        """Check whether a scheme may ask at all.

        Raises
        ------
        DeclinedError
            If the policy lists others.
        """
        if self.schemes is not None and scheme not in self.schemes:
            asked = f"scheme {scheme[:_LONGEST_NAME]!r} asks for a release"
            raise _declined(asked, f"schemes = {list(self.schemes)}")

    @property
    def relation(self) -> str:
        """The neighbours for which `max_epsilon` is counted, whatever is charged."""
        listed = self.neighbours or ()
        return listed[0] if len(set(listed)) == 1 else REPLACE_ONE

    def counted(self, charges: Iterable[Charge]) -> list[Charge]:
        """Return charges as `max_epsilon` counts them: for the neighbours of `relation`.

        The relation is one for all times and follows from the policy alone. If it followed from
        what was charged so far, a server could choose between two caps when it has seen answers,
        and neither would be a bound.

        Raises
        ------
        InvalidParameterError
            If a charge has no proven bound for these neighbours.
        """
        if self.relation == REPLACE_ONE:
            from flwr_privacy.accounting import as_replaced  # late: a node may charge nothing

            return [as_replaced(charge) for charge in charges]
        found = list(charges)
        for charge in found:
            if charge.neighbours != self.relation:
                raise InvalidParameterError(
                    "neighbours", charge.neighbours, f"'{self.relation}', as the policy counts"
                )
        return found

    def check_sum(self, threshold: int | None) -> None:
        """Check whether the secure sum has enough clients, or whether an answer may go without one.

        Raises
        ------
        DeclinedError
            If the policy does not allow it.
        """
        if self.min_summed is None or (threshold is not None and threshold >= self.min_summed):
            return
        asked = "an answer outside of a secure sum was asked for"
        if threshold is not None:
            asked = f"a secure sum of at least {threshold} clients was asked for"
        raise _declined(asked, f"min_summed = {self.min_summed}")


def _declined(asked: str, policy: str) -> DeclinedError:
    return DeclinedError(f"{asked}: the node's policy has {policy}")


def _names(parameter: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, str) and value for value in values
    ):
        raise InvalidParameterError(parameter, values, "a list of names")
    return tuple(values)


def _show(number: float) -> str:
    return repr(float(number)).removesuffix(".0")
