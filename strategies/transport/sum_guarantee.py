"""States what every secure sum of a training hides: the weakest of them counts."""

from dataclasses import dataclass, field

from flwr_privacy.secure_sum import SecureSum, Session

__all__ = ["SumGuarantee", "is_complete"]


@dataclass
class SumGuarantee:
    """The weakest of the sums so far.

    Parameters
    ----------
    least : dict of str to int
        Clients of a sum (``threshold``) and of its cohort, colluders that it withstands, honest
        clients in a sum that a server opens which lies (``lying``), and clients without whom none
        is opened (``needed``); empty before the first sum.
    """

    least: dict[str, int] = field(default_factory=dict)

    def note(self, settings: SecureSum, session: Session) -> None:
        """Record a sum before it is requested, because cohorts shrink and grow."""
        cohort = session.bounds.cohort
        lying = settings.honest_in_sums(cohort, lying=True)
        this = {
            "threshold": session.threshold,
            "cohort": cohort,
            "colluders": settings.colluders_of(cohort),
            "lying": lying if is_complete(session) else 1,
            "needed": len(session.needed),
        }
        self.least = {key: min(value, self.least.get(key, value)) for key, value in this.items()}

    def text(self) -> str:
        """Return a text on what the server does not see."""
        least = self.least
        if not least:
            return "nothing was summed yet"
        lying = f"opens sums over {least['lying']} honest clients at least"
        if needed := least.get("needed"):
            lying += f", and none without the {needed} clients whom each sum needs"
        elif least["lying"] < 2:
            lying = "is not covered (a larger threshold helps)"
        return (
            f"an honest-but-curious server sees sums over at least {least['threshold']} of "
            f"{least['cohort']} clients and no single vector, if no more than "
            f"{least['colluders']} clients collude with it; a server that lies about who takes "
            f"part {lying}, and one that lies about keys can only be found out by nodes that pin "
            "them"
        )


def is_complete(session: Session) -> bool:
    """Tell whether every client shares a mask with every other one."""
    return all(len(roster) == len(session.rosters) for roster in session.rosters.values())
