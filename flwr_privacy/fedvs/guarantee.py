"""States the guarantee of FedVS, as text and data."""

from flwr_privacy.privacy.guarantee import Guarantee

from .terms import CodeTerms

__all__ = ["guarantee_of"]

_EVIDENCE = (
    "tests that list all shares of a small field: those of T clients tell nothing of the data",
    "tests of the coding against an independent implementation of its field",
    "the attack on sums of embeddings that flwr-privacy attack fedvs runs",
)


def guarantee_of(
    terms: CodeTerms | None, *, pinned: bool = False, insecure: bool = False
) -> Guarantee:
    """Return the guarantee of a training: what each adversary learns, and what it does not.

    Parameters
    ----------
    terms : CodeTerms, optional
        What was agreed on; None before the setup.
    pinned : bool, default False
        Whether all clients signed their keys, so that nodes with pins can check them.
    insecure : bool, default False
        Whether a client draws its masks from a seed.
    """
    T = "T" if terms is None else str(terms.privacy)
    more = "T + 1" if terms is None else str(terms.privacy + 1)
    breach = "K + T" if terms is None else str(terms.partitions + terms.privacy)
    hardened = terms is None or terms.zero_mask
    protects = f"features and weights of a client in the shares that up to {T} other clients hold"
    adversary = f"up to {T} colluding clients who follow the protocol"
    if hardened:
        protects += (
            ", and in the answers to the server everything but the sums of the clients' embeddings"
        )
        adversary = (
            f"an honest-but-curious server, also together with up to {T} clients, and up to {T} "
            "colluding clients without it; of any computing power but for the sealing of shares "
            "on their way through the server"
        )
    return Guarantee(
        scheme="fedvs",
        protects=protects,
        adversary=adversary,
        not_protected=(
            "the sums: over many rounds their differences and the server's own gradients give the "
            "server the inner products of all pairs of rows, over all clients' features together; "
            "who knows all other clients' features learns the victim's part of them",
            "labels: the gradients of single rows go to all clients, and rows of one class have "
            "similar ones",
            f"against {more} colluding clients: the weights of every client in every round, and "
            "with the gradients linear equations on its features; features of few values outright, "
            "binary ones at once and those of a byte with a few more clients (lattice reduction); "
            f"against {breach}, all features of everybody",
            f"stored shares: whoever gets those of {breach} nodes later opens all features "
            "(refresh() codes the data anew)",
            *_unhardened(terms),
            *_left_out(terms),
            "sizes of the clients' data, a hash of the rows' identities if they are given, who is "
            "slow or missing, which rows make a batch",
            "that rows of different clients belong together: they are aligned beforehand",
        ),
        assumptions=(
            "everybody follows the protocol; a wrong answer is noticed only where more clients "
            "than needed answer",
            "the clients are different parties"
            + (
                ", and their nodes pin the keys that they signed"
                if pinned
                else ": keys are not signed, so a server that makes clients up opens everything"
            ),
            "the clients' first weights are secret: with known ones the sums of the first round "
            "are linear equations on the features",
        ),
        evidence=_EVIDENCE,
        void="a client draws its masks from a seed" if insecure else "",
    )


def _left_out(terms: CodeTerms | None) -> tuple[str, ...]:
    if terms is None or terms.least == len(terms.members):
        return ()
    return (
        "the embeddings of a client that misses a round: sums with and without it differ by little "
        "else",
    )


def _unhardened(terms: CodeTerms | None) -> tuple[str, ...]:
    if terms is None or terms.zero_mask:
        return ()
    return (
        "what all answers together say beyond the sums: the paper proves something of single "
        "answers only; it is nothing if the rows of a batch, masks included, are linearly "
        "independent, and the server with one client learns more even then",
    )
