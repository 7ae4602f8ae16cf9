"""The server: federated averaging."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import CentralDP, DistributedNoise
from shared_noise.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = CentralDP(
        privacy=DistributedNoise(epsilon=8.0, clipping_norm=1.0), secure_sum=SecureSum()
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
