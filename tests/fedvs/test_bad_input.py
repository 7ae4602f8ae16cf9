"""Parameters, data and labels that do not fit: an error says which, and nothing is shared."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import vertical
from apps import make, model_of, run_strategy, same
from flwr.serverapp.strategy import Strategy
from vertical import ROWS, Wire, digits

from flwr_privacy.clients import VerticalData, fedvs_client_app
from flwr_privacy.errors import DataError, FlwrPrivacyError, InvalidParameterError, ProtocolError
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import FedVS
from flwr_privacy.strategies.vertical.fedvs import CODE, DEAL
from flwr_privacy.wire.message import RECORD
from flwr_privacy.wire.pins import Identity


def refused(clients: int = 4, *, kind: Any = InvalidParameterError, **changes: Any) -> str:
    """Return the text with which a training is refused; no share has left any client."""
    wire = Wire()
    with pytest.raises(kind) as caught:
        vertical.train(clients, before=wire, num_rounds=2, timeout=5, **changes)
    if wire.grid is not None:
        dealt = [m for _, m in wire.of(wire.said, CODE) if vertical.arrays_in(m)]
        assert dealt == []
        assert wire.of(wire.said, DEAL) == []
    return str(caught.value)


def only(which: int, **parts: Any) -> dict[str, Any]:
    """Return options of an app of which one client gives other parts."""

    def given(index: int, usual: dict[str, Any]) -> dict[str, Any]:
        if index != which:
            return usual
        return {**usual, **{name: change(usual) for name, change in parts.items()}}

    return {"given": given}


# -- Parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "changes", "numbers"),
    [
        (4, {"K": 2}, ["N = 4", "R = 2 (K + T - 1) + 1 = 5", "K = 2", "T = 1"]),
        (4, {"T": 2}, ["N = 4", "= 5", "K = 1", "T = 2"]),
        (12, {"K": 6}, ["N = 12", "= 13", "K = 6", "T = 1"]),
        (2, {}, ["N = 2", "= 3"]),
        (4, {"K": None, "T": 2}, ["N = 4", "T = 2"]),
    ],
)
def test_F6_fewer_clients_than_answers_are_needed_share_nothing(
    clients: int, changes: Any, numbers: list[str]
) -> None:
    text = refused(clients, **changes)
    for number in numbers:
        assert number in text


def test_one_client_shares_nothing() -> None:
    assert "clients = 1: expected at least 2: the sum of one client's" in refused(
        1, min_available_nodes=1
    )


@pytest.mark.parametrize(
    ("prime", "text"),
    [
        (91, "p = 91: expected a prime (the next below is 89)"),
        (2**31 - 3, "a prime (the next below is 2147483629)"),
        (5, "p = 5: expected at least N + K + T = 6"),
        (2**31, "prime = 2147483648: expected an integer from 3 to 2147483647"),
        (1, "prime = 1: expected an integer from 3"),
        (3.0, "prime = 3.0: expected an integer"),
    ],
)
def test_a_field_that_is_none_or_too_small(prime: Any, text: str) -> None:
    assert text in refused(prime=prime)


def test_scales_that_could_wrap_around_name_the_largest_that_fit() -> None:
    """48 columns (2^l_x + 1/2) (2^(l_w + 1) + 1) <= 2^30 - 1 allows a sum of 23."""
    text = refused(data_bits=12, weight_bits=12)
    assert "(data_bits, weight_bits) = (12, 12): expected a sum of at most 23" in text
    assert "for 48 columns" in text
    small = refused(prime=4194301)
    assert "modulo 4194301" in small
    assert vertical.train(num_rounds=1, data_bits=11, weight_bits=12, evaluation="none").history


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"K": 0}, "K = 0: expected an integer of at least 1"),
        ({"K": True}, "K = True: expected an integer"),
        ({"T": 0}, "T = 0: expected an integer of at least 1"),
        ({"spare": -1}, "spare = -1: expected an integer of at least 0"),
        ({"spare": 2}, "spare = 2: expected at most 1: 3 of 4 answers are needed"),
        ({"least_dealers": 1}, "least_dealers = 1: expected an integer of at least 2"),
        ({"least_dealers": 2}, "least_dealers = 2: expected from 3, the answers that are needed"),
        ({"least_dealers": 5}, "least_dealers = 5: expected from 3, the answers that are needed"),
        ({"refresh_every": 0}, "refresh_every = 0"),
        ({"relay_limit": 0}, "relay_limit = 0"),
        ({"evaluation": "plain"}, "evaluation = 'plain': expected one of"),
        ({"evaluate_every": 0}, "evaluate_every = 0"),
        ({"embedding": 0}, "embedding = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"learning_rate": float("nan")}, "learning_rate = nan"),
        ({"client_learning_rate": -1.0}, "client_learning_rate = -1.0"),
        ({"aggregation": "max"}, "aggregation = 'max'"),
        ({"w_max": 0}, "w_max = 0"),
        ({"x_max": 0}, "x_max = 0"),
        ({"data_bits": 31}, "data_bits = 31"),
        ({"weight_bits": -1}, "weight_bits = -1"),
        ({"order": 0}, "order = 0: expected an integer from 1 to 64"),
        ({"order": 2.5}, "order = 2.5"),
        ({"paper": True, "zero_mask": True}, "zero_mask = True: expected false with paper=True"),
        ({"paper": 1}, "paper = 1: expected true or false"),
    ],
)
def test_parameters_out_of_range(changes: Any, text: str) -> None:
    assert text in refused(**changes)


def test_an_order_is_for_every_client() -> None:
    text = refused(order={"0": 1, "1": 2, "3": 1})
    assert "expected an order for every client by its name, the text '2' among them" in text
    orders = {"0": 1, "1": 2, "2": 3, "3": 1}
    wire = Wire()
    vertical.train(num_rounds=1, order=orders, before=wire, evaluation="none")
    assert wire.of(wire.asked, CODE)[0][1].content[RECORD]["orders"] == [1, 2, 3, 1]


def test_without_zero_masks_a_batch_is_small_enough_to_say_no_more_than_its_sum() -> None:
    """(K + T) b <= E - 3: 24 columns, and 3 of 31 bits are 93 above 64."""
    assert "(K + T) b = 82: expected (K + T) b of at most E - 3 = 45" in refused(
        zero_mask=False, batch_size=64
    )
    assert "made with paper=True" in refused(kind=ProtocolError, zero_mask=False)
    result = vertical.train(
        num_rounds=2,
        zero_mask=False,
        batch_size=20,
        experiment_id="e",
        app_options={"paper": True},
    )
    masked = vertical.train(num_rounds=2, batch_size=20, experiment_id="e")
    assert same(masked.arrays, result.arrays)


def test_a_secure_sum_is_refused() -> None:
    text = refused(secure_sum=SecureSum())
    assert "the answers of 'fedvs' are no codes on a grid" in text


def test_a_quorum_is_refused() -> None:
    """R answers are needed, and no others are waited for."""
    assert "quorum" in refused(quorum=2)


def test_a_central_model_that_is_none_is_refused() -> None:
    assert "server_model" in refused(server_model=3, kind=FlwrPrivacyError)


def test_a_users_own_start_is_refused() -> None:
    class Own(FedVS):
        start = Strategy.start  # type: ignore[assignment]

    with pytest.raises(ProtocolError, match="'fedvs' works only where this strategy's own start"):
        run_strategy(
            make(Own, **vertical.options(4)),
            vertical.app(4),
            arrays=vertical.arrays(),
            insecure_seed=5,
        )


# -- Data and labels ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["train", "test"])
def test_other_numbers_of_rows_name_the_clients(part: str) -> None:
    options = only(2, **{part: lambda usual: usual[part][:-1]})
    text = refused(kind=ProtocolError, app_options=options)
    assert text.startswith("client 2 has rows")
    assert "client 0 has" in text
    assert "all clients must have the same rows" in text


def test_a_part_that_one_client_lacks() -> None:
    text = refused(kind=ProtocolError, app_options=only(1, test=lambda _: None))
    assert "client 1 has rows {'train': 41}" in text


def test_missing_values_are_counted_and_not_told() -> None:
    def hole(usual: Any) -> Any:
        rows = usual["train"].copy()
        rows[3, 1], rows[5, 0] = np.nan, np.inf
        return rows

    text = refused(kind=ProtocolError, app_options=only(2, train=hole))
    assert "clients ['2'] did not say what data they have" in text
    assert "2 of 41 rows of the part 'train' have missing or infinite values" in text


def test_rows_in_another_order_are_refused_by_their_identities() -> None:
    names = [f"patient {i}" for i in range(ROWS)]

    def given(index: int, usual: Any) -> Any:
        return {**usual, "ids": {"train": names[::-1] if index == 2 else names}}

    text = refused(kind=ProtocolError, app_options={"given": given})
    assert "the rows 'train' of clients ['2'] have other identities than those of client 0" in text
    assert "or another order" in text
    assert "patient" not in text


def test_the_same_identities_are_fine() -> None:
    def given(index: int, usual: Any) -> Any:
        return {**usual, "ids": {"train": range(ROWS)}}

    result = vertical.train(num_rounds=1, app_options={"given": given})
    assert not result.history[1]["skipped"]


@pytest.mark.parametrize(("x_max", "factor"), [(1.0, 1.5), (2.0, 1.5), (0.5, 1.0)])
def test_values_beyond_the_bound_end_the_setup(x_max: float, factor: float) -> None:
    """Powers of them too: 1.5 squared is beyond 2. The text has no value of the data."""
    with pytest.raises(ProtocolError) as caught:
        vertical.train(
            num_rounds=1,
            x_max=x_max,
            app_options=only(2, train=lambda usual: usual["train"] * factor),
        )
    assert f"the part 'train' has values beyond x_max = {x_max:g}, or powers of them" in str(
        caught.value
    )


def test_a_data_function_that_fails_tells_nothing_of_the_data() -> None:
    def given(index: int, usual: Any) -> Any:
        raise ValueError("patient 7 has 0.4321")

    text = refused(kind=ProtocolError, app_options={"given": given})
    assert "the client's own data function failed; the log of the node says how" in text
    assert "0.4321" not in text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"train": "rows"}, "no matrix of numbers"),
        ({"train": [[1.0], []]}, "no matrix of numbers"),
        ({"train": []}, "shape (0,)"),
        ({"train": [1.0, 2.0]}, "shape (2,)"),
        ({"train": [[1.0]], "test": [[1.0, 2.0]]}, "has 2 columns, the training rows have 1"),
        ({"train": [[1.0]], "ids": {"train": [1, 2]}}, "has 1 rows and 2 ids"),
        ({"train": [[float("nan")]]}, "1 of 1 rows of the part 'train' have missing"),
    ],
)
def test_data_that_are_none(given: Any, text: str) -> None:
    with pytest.raises(DataError) as caught:
        VerticalData(**given)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (np.zeros(ROWS - 1, int), "'40 labels': expected a label for each of the 41 rows"),
        (np.zeros(ROWS + 1, int), "'42 labels': expected a label for each of the 41 rows"),
        (np.full(ROWS, np.nan), "NaN or infinity"),
        (np.zeros((ROWS, 2)), "(41, 2)"),
        (None, "NoneType"),
        (["a"] * ROWS, "list"),
        ([], "expected a vector of numbers"),
    ],
)
def test_labels_that_do_not_fit(labels: Any, text: str) -> None:
    found = refused(labels=labels)
    assert found.startswith("labels")
    assert text in found


def test_labels_of_rows_that_nobody_has() -> None:
    text = refused(app_options={"given": lambda index, usual: {"train": usual["train"]}})
    assert "test_labels = 13: expected nothing: no rows 'test'" in text
    assert "test_labels = '3 labels'" in refused(test_labels=np.zeros(3, int))


# -- What goes wrong in the middle ---------------------------------------------------------------


def test_weights_that_leave_the_field_name_client_and_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As printed nothing bounds them. The model stays as it was when it went wrong."""
    result = vertical.train(
        num_rounds=3,
        paper=True,
        client_learning_rate=1e5,
        data_bits=12,
        weight_bits=12,
        evaluation="none",
        app_options={"paper": True},
    )
    assert [line["skipped"] for line in result.history[1:]] == [False, True, True]
    assert "client 2, round 2: an owner's part of the sum is beyond" in caplog.text
    assert "the weights have left their bounds" in caplog.text


def test_with_bounds_the_same_steps_stay_in_the_field() -> None:
    result = vertical.train(
        num_rounds=3, client_learning_rate=1e5, data_bits=11, weight_bits=12, evaluation="none"
    )
    assert not any(line["skipped"] for line in result.history[1:])


def test_a_step_that_is_not_finite_does_not_become_the_model() -> None:
    with np.errstate(all="ignore"):
        result = vertical.train(num_rounds=4, learning_rate=1e38, evaluation="none")
    assert all(np.isfinite(array).all() for array in model_of(result.arrays).values())


# -- What clients and nodes do not allow ---------------------------------------------------------


def test_a_client_takes_part_in_the_papers_version_only_if_it_says_so() -> None:
    text = refused(kind=ProtocolError, paper=True)
    assert "declined: answers without zero masks were asked for" in text
    assert "paper=True" in text


def test_a_client_has_a_least_number_of_colluders() -> None:
    text = refused(kind=ProtocolError, app_options={"min_privacy": 2})
    assert "declined: T = 1 was asked for: this client has min_privacy = 2" in text
    fine = vertical.train(5, num_rounds=1, T=2, app_options={"min_privacy": 2}, evaluation="none")
    assert not fine.history[1]["skipped"]


def test_a_client_takes_part_in_sums_without_others_only_if_it_says_so() -> None:
    """Sums with and without a client differ by its embeddings."""
    text = refused(kind=ProtocolError, least_dealers=3, app_options={"partial_sums": False})
    assert "declined: sums over 3 of 4 clients were asked for" in text
    assert "partial_sums=True" in text


@pytest.mark.parametrize("changes", [{"min_privacy": 0}, {"min_privacy": 1.5}, {"paper": "yes"}])
def test_a_client_app_with_parameters_out_of_range(changes: Any) -> None:
    with pytest.raises(InvalidParameterError, match=next(iter(changes))):
        fedvs_client_app(lambda context: VerticalData(train=[[0.0]]), **changes)


def nodes_with(folder: Path, policies: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    for index in range(4):
        config: dict[str, Any] = {"partition-id": index, "num-partitions": 4}
        if index in policies:
            path = folder / f"{index}.toml"
            path.write_text(tomli_w.dumps(policies[index]))
            assert tomllib.loads(path.read_text()) == policies[index]
            config["privacy-policy"] = str(path)
        nodes.append(config)
    return nodes


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"max_epsilon": 5.0}, "'fedvs' has no budget: the node's policy has max_epsilon"),
        ({"units": ["record"]}, "the node's policy has units = ['record']"),
        ({"schemes": ["udp"]}, "fedvs"),
        ({"min_sigma": 0.1}, "min_sigma"),
    ],
)
def test_a_node_whose_policy_wants_noise_declines(
    policy: dict[str, Any], text: str, tmp_path: Path
) -> None:
    nodes = nodes_with(tmp_path, {1: policy})
    found = refused(kind=ProtocolError, nodes=nodes)
    assert "clients ['1']" in found
    assert "declined" in found
    assert text in found


def test_a_node_declines_sums_over_too_few(tmp_path: Path) -> None:
    nodes = nodes_with(tmp_path, {1: {"min_summed": 4}})
    with pytest.raises(ProtocolError, match=r"clients .'1'. did not answer .* declined: .*4"):
        vertical.train(num_rounds=1, nodes=nodes, least_dealers=3)
    fine = vertical.train(num_rounds=1, nodes=nodes, evaluation="none")
    assert not fine.history[1]["skipped"]


def pinned(folder: Path, *, wrong: str = "", unpinned: str = "", bare: str = "") -> Any:
    """Return nodes that know one another's long-term keys, but for the one that is named."""
    keys = {str(i): Identity.generate() for i in range(4)}
    for name, identity in keys.items():
        identity.write(folder / f"{name}.pem")
    nodes = nodes_with(folder, {})
    for name, config in zip(keys, nodes, strict=True):
        pins = {peer: key.public for peer, key in keys.items() if peer not in (name, unpinned)}
        if wrong and wrong != name:
            pins[wrong] = Identity.generate().public
        (folder / f"{name}.pins").write_text(tomli_w.dumps({"clients": pins}))
        config["privacy-pins"] = str(folder / f"{name}.pins")
        if name != bare:
            config["privacy-identity"] = str(folder / f"{name}.pem")
    return nodes


def test_nodes_that_pin_keys_train_as_others_do(tmp_path: Path) -> None:
    plain = vertical.train(num_rounds=2, experiment_id="e")
    known = vertical.train(num_rounds=2, experiment_id="e", nodes=pinned(tmp_path))
    assert same(plain.arrays, known.arrays)
    assert "their nodes pin the keys that they signed" in known.guarantee.text()
    assert "keys are not signed" in plain.guarantee.text()


@pytest.mark.parametrize("change", ["wrong", "unpinned", "bare"])
def test_keys_that_do_not_fit_the_pins_end_the_setup(change: str, tmp_path: Path) -> None:
    nodes = pinned(tmp_path, **{change: "2"})
    with pytest.raises(ProtocolError, match="the data could not be coded") as caught:
        vertical.train(num_rounds=1, nodes=nodes)
    assert "2" in str(caught.value)


def test_a_server_that_puts_a_key_of_its_own_is_noticed_by_whose_it_replaces() -> None:
    """Without pins only by that client; with them by everybody."""

    def ask(message: Any) -> None:
        if wire.of([message], CODE):
            keys = list(message.content[RECORD]["keys"])
            keys[2] = bytes([9]) + bytes(31)
            message.content[RECORD]["keys"] = keys

    wire = Wire(ask=ask)
    with pytest.raises(ProtocolError, match="the key that is said to be this client's is not"):
        vertical.train(num_rounds=1, before=wire)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("copied", "two members have one name or one key"),
        (bytes(32), "client 2: the public key cannot be used: a point of low order"),
        (b"short", "client 2: the public key cannot be used: it is not 32 bytes"),
    ],
)
def test_keys_that_cannot_be_used(key: Any, text: str) -> None:
    def change(reply: Any) -> Any:
        for name, _ in wire.of([reply], "enrol"):
            if name == "1":
                keys.append(reply.content[RECORD]["key"])
            if name == "2":
                reply.content[RECORD]["key"] = keys[0] if key == "copied" else key
        return reply

    keys: list[bytes] = []
    wire = Wire(change)
    with pytest.raises(ProtocolError) as caught:
        vertical.train(num_rounds=1, before=wire)
    assert text in str(caught.value)


def test_two_nodes_of_one_name_are_refused() -> None:
    nodes = [{"client-id": name} for name in ("a", "b", "b", "c")]
    names = ["a", "b", "c"]
    with pytest.raises(ProtocolError, match="'b'"):
        vertical.train(nodes=nodes, num_rounds=1, app_options={"names": names})


@pytest.mark.parametrize("claims", ["2", "stranger"])
def test_with_pins_an_impostor_does_not_keep_the_others_from_training(
    claims: str, tmp_path: Path
) -> None:
    nodes = pinned(tmp_path)
    keys = [f'"{name}" = "{Identity.read(tmp_path / f"{name}.pem").public}"' for name in "0123"]
    pins = tmp_path / "server.toml"
    pins.write_text("\n".join(["[clients]", *keys]))
    Identity.generate().write(tmp_path / "another.pem")
    impostor = {**nodes[0], "client-id": claims, "privacy-identity": str(tmp_path / "another.pem")}
    for place in (0, len(nodes)):
        federation = [*nodes[:place], impostor, *nodes[place:]]
        result = vertical.train(num_rounds=1, nodes=federation, pins=pins)
        assert not result.history[1]["skipped"]
    if claims == "2":  # whose own node is not there
        with pytest.raises(ProtocolError, match=r"all columns are needed.*its pinned key"):
            vertical.train(num_rounds=1, nodes=[*nodes[:2], nodes[3], impostor], pins=pins)


def test_names_are_put_in_their_natural_order() -> None:
    """So that ten comes after nine, whatever the order in which nodes connect."""
    names = [f"site-{i}" for i in (10, 9, 2, 1)]
    wire = Wire()
    result = vertical.train(
        nodes=[{"client-id": name} for name in names],
        num_rounds=1,
        before=wire,
        evaluation="none",
        app_options={"names": names},
    )
    assert not result.history[1]["skipped"]
    members = wire.of(wire.asked, CODE)[0][1].content[RECORD]["members"]
    assert members == ["site-1", "site-2", "site-9", "site-10"]
    widths = wire.of(wire.asked, CODE)[0][1].content[RECORD]["columns"]
    given = {name: columns.shape[1] for name, columns in zip(names, digits(4)[0], strict=True)}
    assert widths == [given[name] for name in members]
