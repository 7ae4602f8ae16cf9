"""`CASES` has a question of every kind that a scheme puts to a client."""

from dataclasses import replace
from typing import Any

import numpy as np
from acfl_app import gradient_terms, setup_terms
from flwr.app import Context, RecordDict
from scheme_node import MODEL, SUMMED, Case, Fields, Inner, Node
from users_code import (
    batches,
    columns,
    evaluation,
    fit,
    losses,
    nothing,
    private_steps,
    steps,
    tables,
)

from flwr_privacy import m2fdp, mspdq, udp
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.clients import (
    ACFLClient,
    CentralDPClient,
    FedAvgClient,
    FedVSClient,
    M2FDPClient,
    MSPClient,
    MSPDQClient,
    SchemeClient,
    SecureSumClient,
    SplitVFLClient,
    Trained,
    UDPClient,
)
from flwr_privacy.clients.mspdq.baselines import (
    DrawnFedAvgClient,
    JoPEQFedAvgClient,
    NbAFLClient,
    QuantizedFedAvgClient,
)
from flwr_privacy.clients.node.context_store import ContextStore
from flwr_privacy.clients.node.data_cache import DataCache
from flwr_privacy.clients.vertical import columns as client_columns
from flwr_privacy.fedvs.split_vfl import EmbeddingRequest
from flwr_privacy.fedvs.terms import Chunk, CodeTerms, DealRequest, Evaluation
from flwr_privacy.m2fdp.messages import going_down, packed
from flwr_privacy.m2fdp.sensitivity import Reach
from flwr_privacy.pipeline.experiment_keys import channel_to
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.secure_sum import fedavg_terms
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.fields import write

MATRIX = {"W": np.zeros((3, 2))}


def with_(terms: Any, **changes: Any) -> Any:
    return replace(terms, **changes)


BUDGET = {"epsilon": 100.0, "delta": 1e-5}
UPDATE = udp.UDPTerms(
    unit="user",
    noise_multiplier=5.0,
    **BUDGET,
    gap=1e-3,
    clipping_norm=1.0,
    grid=-16,
    count_failed=True,
)
STEPS = with_(UPDATE, unit="record", learning_rate=0.5, grid=-24, count_failed=False)
PRIVATE = udp.PrivateStepsTerms(
    steps=2,
    sampling_rate=1.0,
    clipping_norm=1.0,
    noise_multiplier=5.0,
    **BUDGET,
    gap=1e-3,
    grid=-27,
)
LOSS = udp.LossTerms(unit="user", cap=4.0, noise_multiplier=5.0, **BUDGET, gap=1e-2)
SHARES = CentralDPTerms(
    noise="distributed",
    sampling="fixed",
    neighbours="replace_one",
    noise_multiplier=5.0,
    count_share=0.1,
    **BUDGET,
    gap=1e-3,
    clipping_norm=1.0,
    grid=-20,
    parties=SUMMED,
)
DEVICE = m2fdp.M2FDPTerms(
    unit="user",
    noise_multiplier=0.5,
    epsilon=1e3,
    delta=1e-5,
    grid=-24,
    period=0,
    law="worst",
    growth=1.0,
    depth=2,
    clipping_norm=0.5,
    steps=2,
    parent="t1-0",
    noised=True,
    sealed=False,
    event=0,
    tier=0,
)
EMBED = EmbeddingRequest(
    training="t",
    session="s",
    update=0,
    learning_rate=0.1,
    trained_rows=[],
    trained_clients=[],
    divisor=1,
    part="train",
    rows=[0, 2, 5],
    order=2,
    bias=False,
    x_max=1.0,
    embedding=2,
    epsilon=0.0,
    clip=0.0,
)
SUM_TERMS = fedavg_terms.FedAvgSumTerms(
    grid=CodeGrid(-16), value_range=64.0, weighted_by="num-examples"
).write()
CODING = CodeTerms(
    generation="g",
    members=["0", "1", "2"],
    keys=[b"", KeyPair().public, KeyPair().public],
    signatures=[b""] * 3,
    columns=[3] * 3,
    orders=[2] * 3,
    parts=["train"],
    rows=[12],
    partitions=1,
    privacy=1,
    least=3,
    prime=2**31 - 1,
    data_bits=8,
    weight_bits=8,
    x_max=1.0,
    w_max=2.0,
    embedding=2,
    bias=False,
    mean=True,
    zero_mask=True,
    project=True,
    paper=False,
)


def coding(node: "Node") -> Fields:
    """Return the question to deal shares of all rows, after the enrolment."""
    config = {k: v for k, v in node.config.items() if k != "privacy-policy"}
    context = Context(1, 1, config, RecordDict(), {})
    place = {"experiment-id": "e", "round": 0, "request": 0, "generation": "g"}
    told = FedVSClient(columns(), context).handle("enrol", {}, place, None)[1]  # type: ignore[arg-type]
    terms = with_(CODING, keys=[told["key"], *CODING.keys[1:]])
    chunk = Chunk(part="train", first=0, count=terms.segments("train").length)
    return {**write(terms), **write(chunk), "training": "t", "update": 0}


CIRCLE = ("0", "1", "2")
BATCH = DealRequest(
    generation="g",
    session="r",
    update=1,
    learning_rate=0.1,
    trained_rows=[1, 2, 4],
    trained_dealers=list(CIRCLE),
    deals=True,
    share_set="s",
    part="train",
    evaluated_rows=[0, 3, 7],
    maskers=list(CIRCLE),
)
GRADIENT = {"gradient": np.full((3, 2), 0.5, np.float32)}


def directly(node: "Node", name: str, phase: str, arrays: Any, fields: Fields) -> Any:
    """Put a question of FedVS to a client whose node has no policy."""
    config = {"client-id": name, "privacy-state": str(node.folder)}
    client = FedVSClient(columns(), Context(1, 1, config, RecordDict(), {}))
    place = {"experiment-id": "e", "round": 1, "request": 0}
    return client.handle(phase, arrays, {**place, **fields}, None)  # type: ignore[arg-type]


def passed_on(dealt: dict[str, Any], receiver: str) -> Fields:
    """Return what of all sealed shares one client gets."""
    place = CIRCLE.index(receiver)
    pieces = [
        dealt[name][place - (place > CIRCLE.index(name))] for name in CIRCLE if name != receiver
    ]
    return {"sealed": np.concatenate(pieces)}


def coded(node: "Node") -> None:
    """Have three clients code their data, once in a folder."""
    if any(node.folder.glob("0.fedvs/*/*.coded")):
        return
    told = {n: directly(node, n, "enrol", {}, {"generation": "g"})[1] for n in CIRCLE}
    terms = with_(CODING, keys=[told[name]["key"] for name in CIRCLE])
    count = terms.segments("train").length
    common = {**write(terms), "training": "t", "update": 0}
    chunk, end = (write(Chunk(part="train", first=0, count=size)) for size in (count, 0))
    dealt = {n: directly(node, n, "code", {}, {**common, **chunk})[0]["sealed"] for n in CIRCLE}
    for name in CIRCLE:
        directly(node, name, "code", passed_on(dealt, name), {**common, **end})
    client_columns._prepared = DataCache()  # deployed, every message has a process of its own


def dealt(node: "Node") -> None:
    """Have three clients deal shares of their weights."""
    if not any(node.folder.glob("0.fedvs/*/*.coded")):
        coded(node)
        for name in CIRCLE:
            directly(node, name, "weights", GRADIENT, write(BATCH))


def shares(node: "Node") -> Fields:
    """Return the shares of weights that the first client is to evaluate."""
    again = {n: directly(node, n, "weights", GRADIENT, write(BATCH))[0]["sealed"] for n in CIRCLE}
    return passed_on(again, "0")


def mixing(half: type[SchemeClient], *, summed: int = 0, **terms: Any) -> Fields:
    """Return the case of the message that follows a training of MSP or MSPDQ."""
    agreed = mspdq.MSPTerms(rounds=3, **terms)
    place = {"experiment-id": "e", "round": 1, "request": 0, "summed": summed, "width": 0.5}

    def train(node: "Node") -> None:
        config = {key: node.config[key] for key in ("client-id", "privacy-state")}
        client = half(Inner(fit), Context(1, 1, config, node.context.state, {}))
        moved = {name: array + np.float32(0.25) for name, array in MODEL.items()}
        given = {**write(agreed), **place, "sums": summed > 0}
        client.handle("train", MODEL, given, lambda start: Trained(moved, {}))

    begun = agreed.start == "reference"
    first = 1 if agreed.leaps and agreed.start == "global" else 0
    fields = {"width": 0.5, "sums": summed > 0, **({} if begun else {"step": first})}
    return {
        "half": half,
        "user": nothing,
        "before": train,
        "phase": "sync" if begun else "mix",
        "fields": fields,
        "summed": summed,
        "remembers": True,
    }


def zone_terms(node: "Node", **changes: Any) -> Fields:
    """Return what a question to an aggregator says of the release that its answer goes into."""
    names = set(m2fdp.Duty.__dataclass_fields__) & set(m2fdp.Delivery.__dataclass_fields__)
    names -= {"own_tier", "parent", "siblings", "children", "event"}
    common = {name: getattr(DEVICE, name) for name in names}
    return {**common, "depth": node.tree.depth, "event": 0, **changes}


def average(node: "Node", way: str) -> Fields:
    """Return the question for the average of what two devices have sealed."""
    me, tree = node.case.client, node.tree
    devices, parent = list(tree.children(me)), tree.parent(me)
    sealed: list[bytes] = []
    tier = tree.tier(me) if way == m2fdp.DOWN else 0
    terms = with_(DEVICE, noised=False, sealed=True, siblings=devices, parent=me, tier=tier)
    asked = {
        **write(with_(terms, depth=tree.depth)),
        **node.keys_of(me, "parent-key", "parent-signature"),
        **{"experiment-id": "e", "round": 1, "request": 0},
    }
    told = [node.keys_of(name, "keys", "signatures") for name in devices]
    for name in devices:
        config = {**node.config_of(name), "privacy-policy": str(node.folder / f"{name}.policy")}
        device = M2FDPClient(None, Context(1, 1, config, RecordDict(), {}))
        given = device.handle("train", MODEL, asked, lambda start: Trained(start, {}))
        sealed.append(given[1]["sealed"])
    duty = m2fdp.Duty(
        **zone_terms(node, tier=tier),
        own_tier=tree.tier(me),
        way=way,
        parent=parent,
        siblings=list(tree.children(parent)),
        children=devices,
        senders=devices,
        sealed=sealed,
        round_model=bytes(32),
    )
    up = node.keys_of(parent, "parent-key", "parent-signature") if way == m2fdp.UP else {}
    return {**write(duty), **up, **{key: [own[key] for own in told] for key in told[0]}}


def delivery(node: "Node") -> Fields:
    """Return the question to pass on what the parent has sealed after a clean event."""
    me, tree = node.case.client, node.tree
    parent, children = tree.parent(me), list(tree.children(me))
    asked = m2fdp.Delivery(
        **zone_terms(node),
        own_tier=tree.tier(me),
        parent=parent,
        siblings=list(tree.children(parent)),
        children=children,
    )
    key, signature = node.keys_of(me, "key", "signature").values()
    store = ContextStore.of(Context(1, 1, node.config_of(parent), RecordDict(), {}))
    about = going_down(
        {"experiment-id": "e", "round": 1},
        asked.event,
        sender=parent,
        receiver=me,
        tier=asked.own_tier,
        children=asked.siblings,
    )
    model = m2fdp.Upload(np.arange(4), Reach(anchor=1, shared=0.5))
    channel = channel_to(store, "m2fdp", "e", me, key, signature)
    told = [node.keys_of(child, "keys", "signatures") for child in children]
    return {
        **write(asked),
        **node.keys_of(parent, "parent-key", "parent-signature"),
        **{key: [own[key] for own in told] for key in told[0]},
        "start-sealed": channel.seal(packed(model, asked), *about),
    }


RECORDS = {"noise": "record", "epsilon": 1e4, "alpha": 0.5}
PAPER = {"noise": "variances", "sigma1_sq": 0.5, "sigma2_sq": 0.5}


def acfl(phase: str, *, summed: int = 0, **wish: Any) -> Fields:
    """Return the case of a question of ACFL."""
    make = setup_terms if phase == "setup" else gradient_terms
    terms = make(parties=summed, **wish)
    charge = terms.charge()
    # The most that twelve records within their bounds move, from no records at all.
    move = 12 * 3 * max(terms.feature_bound, terms.label_bound) * 2
    if phase == "train":
        move = 1.2 * 12 * terms.clipping_norm
    return {
        "half": ACFLClient,
        "user": tables,
        "fields": write(terms),
        "phase": phase,
        "model": MATRIX if phase == "train" else {},
        "summed": summed,
        "failing": "refused" if charge is None else "ends",
        "charged": charge is not None,
        "once": summed > 0,
        "reach": move,
        "grid": terms.grid,
        "unprotected": charge is None,
        **({"other": {"max_records": 21}, "single": True} if phase == "setup" else {}),
    }


USER_LEVEL: Fields = {"failing": "zero", "charged": True}
RECORD_LEVEL: Fields = {"failing": "ends", "charged": True}
OTHER_PERIOD: Fields = {"other": {"period": 1, "event": 1}}
ZONE: Fields = {"half": M2FDPClient, "user": nothing, "model": {}}
CASES: dict[str, Case] = {
    "fedavg": Case(half=FedAvgClient),
    "fedavg, evaluation": Case(half=FedAvgClient, user=evaluation, phase="evaluate"),
    "fedavg in a sum": Case(half=SecureSumClient, fields=SUM_TERMS, summed=SUMMED),
    "udp": Case(half=UDPClient, fields=write(UPDATE), **USER_LEVEL, reach=1.0, grid=-16),
    "udp, shares": Case(
        half=UDPClient,
        fields=write(with_(UPDATE, parties=SUMMED)),
        summed=SUMMED,
        **USER_LEVEL,
        once=True,
        reach=1.0,
        grid=-16,
    ),
    "udp, bare": Case(
        half=UDPClient,
        fields=write(with_(UPDATE, noise_multiplier=0.0, count_failed=False)),
        unprotected=True,
    ),
    "udp, records": Case(
        half=UDPClient, user=steps, fields=write(STEPS), **RECORD_LEVEL, reach=0.5, grid=-24
    ),
    "udp, private steps": Case(
        half=UDPClient,
        user=private_steps,
        fields=write(PRIVATE),
        **RECORD_LEVEL,
        reach=2.0,
        grid=-24,
    ),
    "udp, shares of records": Case(
        half=UDPClient,
        user=steps,
        fields=write(with_(STEPS, max_records=8, grid=-20, parties=SUMMED)),
        summed=SUMMED,
        **RECORD_LEVEL,
        once=True,
        reach=2.5,
        grid=-20,
    ),
    "udp, loss": Case(
        half=UDPClient, user=evaluation, fields=write(LOSS), phase="evaluate", **USER_LEVEL
    ),
    "udp, bare loss": Case(
        half=UDPClient,
        user=evaluation,
        fields=write(with_(LOSS, noise_multiplier=0.0)),
        phase="evaluate",
        unprotected=True,
    ),
    "udp, losses": Case(
        half=UDPClient,
        user=losses,
        fields=write(with_(LOSS, unit="record")),
        phase="evaluate",
        **RECORD_LEVEL,
    ),
    "central-dp": Case(
        half=CentralDPClient,
        fields=write(SHARES),
        summed=SUMMED,
        **USER_LEVEL,
        once=True,
        reach=1.0,
        grid=-20,
    ),
    "central-dp, server": Case(
        half=CentralDPClient,
        fields=write(with_(SHARES, noise="server", parties=1)),
        unprotected=True,
    ),
    "msp": Case(half=MSPClient, fields=write(mspdq.MSPTerms(rounds=3))),
    "mspdq": Case(half=MSPDQClient, fields=write(mspdq.MSPTerms(rounds=3, levels=16))),
    "mspdq in a sum": Case(
        half=MSPDQClient,
        fields={
            **write(mspdq.MSPTerms(rounds=3, levels=16, start="global", interval="fixed")),
            "width": 0.5,
            "sums": True,
        },
        summed=SUMMED,
    ),
    "mspdq-fedavg": Case(half=DrawnFedAvgClient),
    "mspdq-ldp": Case(
        half=NbAFLClient,
        fields={"clip": "update", "clipping-norm": 1.0, "law": "gaussian", "scale": 1.0},
    ),
    "mspdq-plain": Case(half=QuantizedFedAvgClient, fields={"bits": 8}),
    "mspdq-jopeq": Case(half=JoPEQFedAvgClient, fields={"epsilon": 4.0, "bits": 8, "dither": 1}),
    "acfl, setup": Case(**acfl("setup", **RECORDS)),
    "acfl, gradient": Case(**acfl("train", **RECORDS)),
    "acfl, setup in shares": Case(**acfl("setup", summed=SUMMED, **RECORDS)),
    "acfl, gradient in shares": Case(**acfl("train", summed=SUMMED, **RECORDS)),
    "acfl, setup of the paper": Case(**acfl("setup", **PAPER)),
    "acfl, exact setup": Case(**acfl("setup", noise="none")),
    "acfl, exact gradient": Case(**acfl("train", noise="none")),
    "acfl, exact gradient in a sum": Case(**acfl("train", summed=SUMMED, noise="none")),
    "acfl, projection": Case(**acfl("setup", noise="none", encoding="scfl", alpha=0.5)),
    "m2fdp": Case(
        half=M2FDPClient,
        fields=write(DEVICE),
        **USER_LEVEL,
        **OTHER_PERIOD,
        reach=0.5,
        grid=-24,
    ),
    "m2fdp, records": Case(
        half=M2FDPClient,
        user=batches,
        fields=write(with_(DEVICE, unit="record", sampling=1.0, sampling_rate=0.5)),
        **RECORD_LEVEL,
        **OTHER_PERIOD,
        reach=0.5,
        grid=-24,
    ),
    "m2fdp, in the open": Case(
        half=M2FDPClient,
        fields=write(with_(DEVICE, noised=False)),
        **USER_LEVEL,
        **OTHER_PERIOD,
        kept=False,
        reach=0.5,
        grid=-24,
        unprotected=True,
    ),
    "m2fdp, sealed": Case(
        half=M2FDPClient,
        fields=lambda node: {
            **write(with_(DEVICE, noised=False, sealed=True, siblings=["0", "1"])),
            **node.keys_of("t1-0", "parent-key", "parent-signature"),
        },
        **USER_LEVEL,
        **OTHER_PERIOD,
        kept=False,
    ),
    "m2fdp, up": Case(
        **ZONE,
        fields=lambda node: average(node, m2fdp.UP),
        phase="aggregate",
        client="t2-0",
        fanouts=(1, 2, 2),
    ),
    "m2fdp, down": Case(
        **ZONE,
        fields=lambda node: average(node, m2fdp.DOWN),
        phase="aggregate",
        client="t1-0",
    ),
    "m2fdp, deliver": Case(
        **ZONE, fields=delivery, phase="deliver", client="t2-0", fanouts=(1, 2, 2)
    ),
    "m2fdp, zone": Case(
        **ZONE,
        fields=lambda node: average(node, m2fdp.NOISED),
        phase="aggregate",
        failing="ends",
        charged=True,
        other={"noise_multiplier": 0.75},
        single=True,
        client="t1-0",
    ),
    "m2fdp, without noise": Case(
        half=M2FDPClient,
        fields=write(with_(DEVICE, noised=False, noise_multiplier=0.0)),
        unprotected=True,
    ),
    "fedvs": Case(
        half=FedVSClient, user=columns, fields={"generation": "g"}, phase="enrol", model={}
    ),
    "fedvs, coding": Case(half=FedVSClient, user=columns, fields=coding, phase="code", model={}),
    "fedvs, weights": Case(
        half=FedVSClient,
        user=columns,
        before=coded,
        fields=write(BATCH),
        phase="weights",
        model=GRADIENT,
        other={"share_set": "t"},
        remembers=True,
    ),
    "fedvs, embeddings": Case(
        half=FedVSClient,
        user=nothing,
        before=dealt,
        fields=write(Evaluation(generation="g", share_set="s", dealers=list(CIRCLE))),
        model=shares,
        other={"dealers": ["0", "1"]},
        single=True,
        remembers=True,
    ),
    "fedvs, plain embeddings": Case(
        half=FedVSClient,
        user=columns,
        before=coded,
        fields=write(Chunk(part="train", first=0, count=5)),
        phase="oracle",
        model={},
        remembers=True,
        simulated=True,
    ),
    "msp, mixing": Case(**mixing(MSPClient)),
    "mspdq, common start": Case(**mixing(MSPDQClient, levels=16, start="reference")),
    "mspdq, mixing": Case(**mixing(MSPDQClient, levels=16, start="global")),
    "mspdq, mixing in a sum": Case(
        **mixing(MSPDQClient, summed=SUMMED, levels=16, start="global", interval="fixed")
    ),
    "split-vfl": Case(half=SplitVFLClient, user=columns, fields=write(EMBED)),
    "split-vfl in a sum": Case(
        half=SplitVFLClient, user=columns, fields={**write(EMBED), **SUM_TERMS}, summed=SUMMED
    ),
}
CHARGED = [name for name, case in CASES.items() if case.charged]
UNCHARGED = [name for name, case in CASES.items() if not case.charged]
REMEMBERED = [name for name, case in CASES.items() if case.remembers]
