from flwr_privacy.simulations.settings.run_labels import differing_settings, labels
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.stragglers import StragglerModel


class TestLabels:
    def test_name_what_differs(self, create):
        folders = [
            create(str(rate), Settings(scheme=scheme).with_values({"training.learning_rate": rate}))
            for scheme, rate in (("fedavg", 0.1), ("fedavg", 0.2), ("udp", 0.3))
        ]
        assert differing_settings(folders) == [
            {"scheme": "fedavg", "training.learning_rate": 0.1},
            {"scheme": "fedavg", "training.learning_rate": 0.2},
            {"scheme": "udp", "training.learning_rate": 0.3},
        ]
        assert labels(folders) == [
            *("fedavg, learning_rate 0.1", "fedavg, learning_rate 0.2", "udp, learning_rate 0.3")
        ]

    def test_leave_out_what_is_usual(self, create):
        folders = [
            create("a", Settings()),
            create("b", Settings(scheme="mspdq", strategy={"bits": 4})),
            create("c", Settings(stragglers=StragglerModel(slow_fraction=0.2))),
        ]
        assert labels(folders) == ["fedavg", "mspdq, bits 4", "fedavg, slow_fraction 0.2"]
        assert differing_settings(folders)[0]["stragglers.kind"] is None

    def test_say_the_weight_that_tells_acfl_from_its_rivals(self, create):
        rivals = ({}, {"alpha": 0.0}, {"alpha": 0.0, "straggler_rate": 0.0}, {"alpha": 0.0})
        folders = [
            create(str(place), Settings(scheme="acfl", strategy=strategy))
            for place, strategy in enumerate(rivals)
        ]
        assert labels(folders) == [
            *("acfl", "acfl, alpha 0.0 (1)", "acfl, alpha 0.0, straggler_rate 0.0"),
            "acfl, alpha 0.0 (3)",
        ]

    def test_tell_equal_runs_apart(self, create):
        folders = [create("a"), create("b"), create("c/a")]
        assert differing_settings(folders) == [{}, {}, {}]
        assert labels(folders) == ["fedavg (a) #1", "fedavg (b)", "fedavg (a) #2"]
        assert differing_settings([]) == labels([]) == []

    def test_say_of_what_a_kind_is(self, create):
        shards = Settings().with_values({"partition.kind": "shards"})
        folders = [create("a"), create("b"), create("c", shards)]
        assert labels(folders)[2] == "fedavg, partition.kind shards"
