"""The trainer that the unit 'record' needs: put in for a usual loop of torch, else refused."""

import ast

import pytest
from drop_in import sides

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.inspector.changes.change import change_of
from flwr_privacy.simulations.inspector.findings import losses
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import Options, wrap_of
from tests.simulations.inspector.conftest import Small, new

CLIENT = """
from flwr.clientapp import ClientApp

from small.task import load, train as fit

app = ClientApp()


@app.train()
def train(message, context):
    net, loader = load(context)
    loss = fit(net, loader, 3)
    return reply(net, loss)
"""
TASK = """
import torch
from torch import nn
from torch.nn import functional as F


def load(context):
    ...


def train(net, loader, epochs):
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.train()
    running = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
    return running / len(loader)
"""


def changed(small: Small, task: str = TASK, client: str = CLIENT, scheme: str = "udp") -> str:
    """Return the training with the trainer of a scheme, and see that the server has its unit."""
    app = small(client=client, task=task)
    change = change_of(app, wrap_of(scheme, Options(clients=4, unit="record")))
    level = "RecordLevel" if scheme == "udp" else "RecordNoise"
    assert f"privacy={level}(epsilon=8.0, delta=1e-5, " in new(change, "server")
    text = new(change, "task") or new(change, "client")
    ast.parse(text)
    return text


@pytest.mark.parametrize(
    ("scheme", "call"),
    [
        ("udp", "train_per_record(net, loader)"),
        ("m2fdp", "train_poisson(net, loader, learning_rate=0.1)"),
    ],
)
def test_the_usual_loop_becomes_one_call(scheme: str, call: str, small: Small) -> None:
    text = changed(small, scheme=scheme)
    assert text.endswith(
        "def train(net, loader, epochs):\n"
        "    net.train()\n"
        f"    {call}\n"
        '    running = float("nan")  # it would tell of the records\n'
        "    return running / len(loader)\n"
    )
    name = call.partition("(")[0]
    assert f"\nfrom flwr_privacy.clients.torch import {name}\n" in text


def test_the_page_shows_this_change(small: Small) -> None:
    before, after = sides("record")
    head = "import torch\nfrom torch.nn.functional import cross_entropy\n\n\n"
    task = f"{head}def train(net, loader, epochs):\n{before}"
    assert changed(small, task=task).endswith(f"def train(net, loader, epochs):\n{after}")


@pytest.mark.parametrize(
    ("old", "other", "call"),
    [
        ("criterion(net(images), labels)", "F.cross_entropy(net(images), labels)", ""),
        ("loss = criterion(net(images), labels)", "out = net(images)\n            loss = "
         "criterion(out, labels)", ""),
        ("images, labels = images.to(device), labels.to(device)", "images = images.cuda()", ""),
        ("for images, labels in loader:",
         "for batch in loader:\n            images, labels = batch", ""),
        ("nn.CrossEntropyLoss()", "nn.MSELoss()", "loss=criterion"),
        ("criterion(net(images), labels)", "F.nll_loss(net(images), labels)", "loss=F.nll_loss"),
        ("            loss.backward()\n            optimizer.step()",
         "            loss.backward()\n            with torch.no_grad():\n"
         "                for p in net.parameters():\n                    p -= 0.1 * p.grad", ""),
        ("    for _ in range(epochs):\n        for images, labels in loader:\n",
         "    if True:\n        for images, labels in loader:\n", None),
    ],
)  # fmt: skip
def test_the_usual_loop_is_known_in_other_words(
    old: str, other: str, call: str | None, small: Small
) -> None:
    assert TASK.count(old) == 1
    task = TASK.replace(old, other)
    if call is None:
        with pytest.raises(UnfitError, match="no loop over the batches"):
            changed(small, task)
        return
    more = f", {call}" if call else ""
    assert f"    train_per_record(net, loader{more})\n" in changed(small, task)


DICTIONARIES = TASK.replace("images, labels in loader", "batch in loader").replace(
    "images, labels = images.to(device), labels.to(device)",
    'images = batch["img"].to(device)\n            labels = batch["label"].to(device)',
)


def test_batches_that_are_dictionaries_become_pairs_of_their_data_set(small: Small) -> None:
    pairs = '[(record["img"], record["label"]) for record in loader.dataset]'
    assert f"    train_per_record(net, {pairs})\n" in changed(small, DICTIONARIES)
    at_once = TASK.replace("images, labels in loader", "batch in loader").replace(
        "            images, labels = images.to(device), labels.to(device)\n", ""
    )
    at_once = at_once.replace("net(images), labels", 'net(batch["img"].to(device)), batch["label"]')
    assert f"    train_per_record(net, {pairs})\n" in changed(small, at_once)
    own = "    DataLoader(d, collate_fn=own)\nfrom torch.utils.data import DataLoader\n"
    assert "train_per_record(net, loader)" in changed(small, TASK.replace("    ...\n", own, 1))
    with pytest.raises(UnfitError, match="a DataLoader with collate_fn makes its batches itself"):
        changed(small, DICTIONARIES.replace("    ...\n", own, 1))
    with pytest.raises(UnfitError, match="no pair of features and labels"):
        changed(small, DICTIONARIES.replace('["label"]', '["img"]'))


def test_what_follows_the_loop_keeps_its_names(small: Small) -> None:
    after = "    running /= len(loader)\n    print(running)\n    loss = running\n    return loss\n"
    task = TASK.replace("    return running / len(loader)\n", after)
    task = task.replace(
        "            running +=", "            print(loss.item())\n            running +="
    )
    assert changed(small, task).endswith(
        "    train_per_record(net, loader)\n"
        '    running = float("nan")  # it would tell of the records\n' + after
    )


def test_a_loop_in_the_training_itself(small: Small) -> None:
    body = TASK.partition("    criterion")[2].replace("    return running", "    loss = running")
    client = CLIENT.replace("    loss = fit(net, loader, 3)\n", f"    criterion{body}")
    client = client.replace(", train as fit", "").replace("range(epochs)", "range(3)")
    client = client.replace("\nfrom small", "\nimport torch\nfrom torch import nn\n\nfrom small", 1)
    task = "def load(context):\n    ...\n"
    text = changed(small, task, client)
    assert "    train_per_record(net, loader)\n    running = float(" in text
    assert "backward" not in text


@pytest.mark.parametrize(
    ("old", "other", "reason"),
    [
        ("loss.backward()", "loss.backward()\n            clip(net)", "more than a step"),
        ("loss.backward()", "(loss + 0.1 * far(net)).backward()", "more than a step"),
        ("loss.backward()", "loss.backward(retain_graph=True)", "more than a step"),
        ("optimizer.step()", "scheduler.step()", "more than a step"),
        ("net(images)", "net(images, labels)", "more than a step"),
        ("net(images)", "net(images.float())", "more than a step"),
        ("images.to(device)", "images.to(torch.float64)", "more than a step"),
        ("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(weight=w)", "value for single records"),
        ("criterion(net(images), labels)", "own(net(images), labels)", "value for single records"),
        ("images, labels in loader", "images, labels, _ in loader", "no pair of features"),
        ("images, labels in loader", "labels in loader", "more than a step"),
        ("images, labels in loader", "(images, (labels, _)) in loader", "no pair of features"),
        ("loss.backward()", "loss += 0.1 * far\n            loss.backward()", "more than a step"),
        ("loss.backward()", "loss = loss + 0.1 * far\n            loss.backward()",
         "more than a step .*: loss = loss"),
        ("optimizer.zero_grad()", "labels = labels.float()", "labels = labels.float"),
        ("optimizer.zero_grad()", "images = images / 255", "images = images / 255"),
        ("            optimizer.step()\n", "", "not one step of an optimiser"),
        ("optimizer.step()", "optimizer.step()\n            optimizer.step()", "not one step"),
        ("SGD(net.parameters()", "SGD(net.head.parameters()", "of other parameters than all"),
        ("SGD(net.parameters()", "SGD([{'params': net.parameters()}]", "of other parameters"),
        ("in loader", "in tqdm(loader)", "not those of a DataLoader by its name"),
        ("return running / len(loader)", "return loss.item()", "loss of the loop is used after it"),
        ("return running / len(loader)", "return round(running)", "running of the loop is used"),
        ("loss.backward()", "go(loss)", r"loss.backward\(\) is called at 0 places"),
        ("def load", "def other(loss):\n    loss.backward()\n\n\ndef load", "at 2 places"),
        ("def load", "def other():\n    train(1, 2, 3)\n\n\ndef load", "is not called once in a"),
        ("    ...\n",
         "    DataLoader(d, drop_last=True)\nfrom torch.utils.data import DataLoader\n",
         "a DataLoader with drop_last leaves out"),
    ],
)  # fmt: skip
def test_a_loop_that_does_more_is_refused_with_the_lines_to_write(
    old: str, other: str, reason: str, small: Small
) -> None:
    assert old in TASK
    app = small(client=CLIENT, task=TASK.replace(old, other, 1))
    before = {path: path.read_bytes() for path in app.path.rglob("*.py")}
    with pytest.raises(UnfitError, match=reason) as refused:
        change_of(app, wrap_of("udp", Options(clients=4, unit="record"))).apply()
    assert refused.value.exit_code == 8
    by_hand = "\n".join(refused.value.by_hand)
    assert "from flwr_privacy.clients import UDPClientApp as ClientApp" in by_hand
    assert "client.py:10: def train(message, context):" in by_hand
    assert "in the place of its loop: train_per_record(" in by_hand
    assert "server: UDP(..., privacy=RecordLevel(epsilon=8.0, delta=1e-5" in by_hand
    assert {path: path.read_bytes() for path in app.path.rglob("*.py")} == before


@pytest.mark.parametrize(
    "call",
    [
        "for _ in range(3):\n        loss = fit(net, loader, 1)",
        "loss = fit(net, loader, 3)\n    fit(net, loader, 3)",
        "loss = run(fit, net, loader, 3)",
    ],
)
def test_a_loop_that_is_not_called_once_is_refused(call: str, small: Small) -> None:
    with pytest.raises(UnfitError, match="is not called once in a training, outside of a loop"):
        changed(small, client=CLIENT.replace("loss = fit(net, loader, 3)", call))


def test_a_step_of_which_the_size_is_not_found(small: Small) -> None:
    task = TASK.replace("SGD(net.parameters(), lr=0.1)", "Adam(net.parameters())")
    assert "train_per_record(net, loader)" in changed(small, task)  # the server says its step
    with pytest.raises(UnfitError, match="its step size is not found"):
        changed(small, task, scheme="m2fdp")


def test_an_app_that_calls_the_trainer_already_keeps_its_training(small: Small) -> None:
    task = (
        "from flwr_privacy.clients.torch import train_per_record\n\n\n"
        "def train(net, loader, epochs):\n    train_per_record(net, loader)\n"
    )
    app = small(client=CLIENT, task=task)
    change = change_of(app, wrap_of("udp", Options(clients=4, unit="record")))
    assert new(change, "task") == ""
    assert "privacy=RecordLevel(" in new(change, "server")


def test_applied_twice_is_applied_once_and_another_unit_is_refused(small: Small) -> None:
    wrap = wrap_of("udp", Options(clients=4, unit="record"))
    app = small(client=CLIENT, task=TASK)
    change_of(app, wrap).apply()
    again = type(app).read(app.path)
    assert change_of(again, wrap).empty
    with pytest.raises(UnfitError, match=r"has privacy=RecordLevel\(...\) already") as refused:
        change_of(again, wrap_of("udp", Options(clients=4)))
    assert refused.value.by_hand == ("write privacy=UserLevel(epsilon=8.0, delta=1e-5)",)


def test_what_the_app_loses_is_told(small: Small) -> None:
    app = small(client=CLIENT, task=TASK)
    for scheme, said in (("udp", "a round is one step on all"), ("m2fdp", "a local step takes")):
        wrap = wrap_of(scheme, Options(clients=4, unit="record"))
        assert any(line.startswith(said) for line in losses(app, wrap))
        assert not any(
            line.startswith(said) for line in losses(app, wrap_of(scheme, Options(clients=4)))
        )


@pytest.mark.parametrize(
    ("scheme", "unit", "allowed"),
    [
        ("udp", "recrod", "one of 'dp-sgd', 'record', 'user'"),
        ("udp", "device", "one of 'dp-sgd', 'record', 'user'"),
        ("m2fdp", "user", "one of 'device', 'record'"),
        ("central-dp", "record", "no --unit with 'central-dp': it goes with udp, m2fdp"),
        ("fedavg", "user", "no --unit with 'fedavg'"),
        ("acfl", "record", "no --unit with 'acfl'"),
    ],
)
def test_units_that_there_are_not(scheme: str, unit: str, allowed: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"^unit = '{unit}': expected {allowed}"):
        wrap_of(scheme, Options(unit=unit))


def test_the_noise_of_records_is_shared_in_a_secure_sum() -> None:
    wrap = wrap_of("udp", Options(unit="record", secure_sum=True))
    assert wrap.arguments == (
        "privacy=RecordLevel(epsilon=8.0, delta=1e-5, learning_rate=4.0, shared_noise=True)",
        "secure_sum=SecureSum()",
    )
