"""The phases of a run: which function belongs to which, in one table.

The innermost frame of a stack that the table has decides the phase of the stack.
"""

from collections.abc import Sequence
from functools import cache

from flwr_privacy.clients.profiling.frames import is_own

__all__ = ["CLIENTS", "PHASES", "TABLE", "Frame", "is_clients", "phase_of"]

Frame = tuple[str, str, str]
"""Module, function and file."""

PHASES = {
    "training": "forward and backward passes and steps of an optimiser, in torch",
    "evaluation": "the same without steps, on the clients or the server",
    "own code": "the app's or the task's code outside of torch, such as loading data",
    "records": "copies of a model: into records and arrays, and back into torch",
    "clip": "updates: their difference, norm and clipping",
    "noise": "sampling of noise",
    "sum": "adding up answers, and the step to the new model",
    "masks": "secure sums and shares: keys, masks, sealed messages",
    "scheme": "what only acfl, fedvs, m2fdp or mspdq computes, such as coded data",
    "ledger": "charges, accountants, privacy card, checkpoints and other files",
    "requests": "drawing clients, building and checking requests and answers",
    "wire": "serialisation, and transport between processes",
    "wait": "waiting for other processes",
    "start": "start of the process, imports, settings",
    "profiler": "writing of the samples",
    "clients": "of the server, where it shares a process with the clients: all of their work",
    "other": "everything else",
}
"""The phases in the order of the printed table, and what belongs to each."""

CLIENTS = "clients"

TABLE = {
    "importlib": "start",
    "multiprocessing": "wire",
    "multiprocessing.connection:_recv": "wait",
    "multiprocessing.popen_spawn_posix": "start",
    "multiprocessing.process": "start",
    "multiprocessing.resource_tracker": "start",
    "multiprocessing.spawn": "start",
    "multiprocessing.util": "start",
    "concurrent.futures": "wire",
    "pickle": "wire",
    "selectors": "wait",
    "subprocess": "start",
    "threading:_wait_for_tstate_lock": "wait",
    "threading:wait": "wait",
    "torch": "training",
    "torch.nn:__init__": "own code",
    "torch.nn.init": "own code",
    "torch.nn.modules.module:load_state_dict": "records",
    "torch.nn.modules.module:state_dict": "records",
    "torch.serialization": "records",
    "torch.utils.data": "own code",
    "opacus": "training",
    "ray": "wire",
    "ray._private.worker:main_loop": "wait",
    "grpc": "wire",
    "google.protobuf": "wire",
    "cryptography": "masks",
    "dp_accounting": "ledger",
    "flwr": "wire",
    "flwr.app": "records",
    "flwr.app:deflate": "wire",
    "flwr.app:inflate": "wire",
    "flwr.clientapp": "requests",
    "flwr.serverapp.strategy": "sum",
    "flwr_privacy.accounting": "ledger",
    "flwr_privacy.acfl": "scheme",
    "flwr_privacy.central_dp": "noise",
    "flwr_privacy.central_dp.guarantee": "ledger",
    "flwr_privacy.central_dp.joint_cost": "ledger",
    "flwr_privacy.central_dp.mean": "clip",
    "flwr_privacy.central_dp.plan": "ledger",
    "flwr_privacy.clients": "requests",
    "flwr_privacy.clients.node.data_cache": "own code",
    "flwr_privacy.clients.node.generated": "own code",
    "flwr_privacy.clients.node.records": "records",
    "flwr_privacy.clients.node.secure_sum": "masks",
    "flwr_privacy.clients.private_steps": "training",
    "flwr_privacy.clients.profiling.recorder:_write": "profiler",
    "flwr_privacy.clients.torch": "training",
    "flwr_privacy.clients.torch.models": "own code",
    "flwr_privacy.clients.torch.trainable": "records",
    "flwr_privacy.clients.torch.training:get_arrays": "records",
    "flwr_privacy.clients.torch.training:initialise": "own code",
    "flwr_privacy.clients.torch.training:set_arrays": "records",
    "flwr_privacy.clients.vertical": "scheme",
    "flwr_privacy.coding": "scheme",
    "flwr_privacy.coding.shamir": "masks",
    "flwr_privacy.evaluation": "evaluation",
    "flwr_privacy.fedvs": "scheme",
    "flwr_privacy.m2fdp": "scheme",
    "flwr_privacy.mspdq": "scheme",
    "flwr_privacy.pipeline": "ledger",
    "flwr_privacy.pipeline.sealed": "masks",
    "flwr_privacy.pipeline.users_code": "own code",
    "flwr_privacy.privacy": "ledger",
    "flwr_privacy.privacy.adaptive_clipping": "clip",
    "flwr_privacy.privacy.averaging": "sum",
    "flwr_privacy.privacy.distributed_noise": "noise",
    "flwr_privacy.privacy.failures": "clip",
    "flwr_privacy.privacy.grid": "sum",
    "flwr_privacy.privacy.noise": "noise",
    "flwr_privacy.privacy.randomness": "noise",
    "flwr_privacy.privacy.rejection_sampler": "noise",
    "flwr_privacy.privacy.running_statistics": "requests",
    "flwr_privacy.privacy.updates": "clip",
    "flwr_privacy.secure_sum": "masks",
    "flwr_privacy.simulations.app": "requests",
    "flwr_privacy.simulations.engines": "wire",
    "flwr_privacy.simulations.settings": "start",
    "flwr_privacy.simulations.settings.metrics_file": "ledger",
    "flwr_privacy.simulations.settings.run_folder": "ledger",
    "flwr_privacy.simulations.tasks": "own code",
    "flwr_privacy.simulations.tasks.private_descent": "training",
    "flwr_privacy.strategies": "requests",
    "flwr_privacy.strategies.acfl": "scheme",
    "flwr_privacy.strategies.central_dp.planned_budget": "ledger",
    "flwr_privacy.strategies.central_dp.spent_budgets": "ledger",
    "flwr_privacy.strategies.loop.charge_log": "ledger",
    "flwr_privacy.strategies.loop.draws": "sum",
    "flwr_privacy.strategies.loop.inner": "sum",
    "flwr_privacy.strategies.loop.model_step": "sum",
    "flwr_privacy.strategies.m2fdp.simulated_aggregators": "noise",
    "flwr_privacy.strategies.private_evaluation": "evaluation",
    "flwr_privacy.strategies.requests.exchange": "wait",
    "flwr_privacy.strategies.requests.federation:wait": "wait",
    "flwr_privacy.strategies.requests.pulling": "wire",
    "flwr_privacy.strategies.requests.replies": "sum",
    "flwr_privacy.strategies.requests.superlink": "wire",
    "flwr_privacy.strategies.state": "ledger",
    "flwr_privacy.strategies.transport.sum_exchanges": "masks",
    "flwr_privacy.strategies.transport.summed": "masks",
    "flwr_privacy.strategies.vertical": "scheme",
    "flwr_privacy.udp": "noise",
    "flwr_privacy.udp.budgets": "ledger",
    "flwr_privacy.udp.guarantee": "ledger",
    "flwr_privacy.udp.plan": "ledger",
    "flwr_privacy.udp.schedule": "ledger",
    "flwr_privacy.wire": "wire",
    "flwr_privacy.wire.arrays": "records",
    "flwr_privacy.wire.channel": "masks",
    "flwr_privacy.wire.files": "ledger",
    "flwr_privacy.wire.frozen": "records",
    "flwr_privacy.wire.layout": "records",
}
"""The phase of what is in a package or module, or of its functions of a name (behind a colon).

The longest name counts; of a package and its functions of a name the latter.
"""

EVALUATIONS = {
    "flwr_privacy.clients.node.adapters:_evaluate_by_message",
    "flwr_privacy.clients.node.adapters:_evaluate_by_numpy",
    "flwr_privacy.clients.torch.server_model:metrics",
    "flwr_privacy.clients.torch.training:evaluate",
    "flwr_privacy.simulations.tasks.tasks:evaluate_client",
    "flwr_privacy.simulations.tasks.tasks:evaluate_server",
    "flwr_privacy.simulations.tasks.tasks:validation_loss",
    "flwr_privacy.strategies.loop.server_loop:_end_round",
}
"""Functions around an evaluation: what is training or own code within them is evaluation."""

ENTRIES = {
    "flwr_privacy.clients.node.node:answer",
    "flwr_privacy.simulations.engines.inline.workers:_run",
}
"""Functions around the work of a client, in whichever process."""

_BUILT_IN = {"sleep": "wait", "lock.acquire": "wait", "_thread.lock.acquire": "wait"}
"""Functions that have no module."""


def phase_of(stack: Sequence[Frame]) -> str:
    """Return the phase of a stack, whose innermost frame is the last one."""
    phase = next((phase for frame in reversed(stack) if (phase := _phase(*frame))), "other")
    if phase in ("training", "own code") and any(f"{m}:{f}" in EVALUATIONS for m, f, _ in stack):
        return "evaluation"
    return phase


def is_clients(stack: Sequence[Frame]) -> bool:
    """Tell whether a stack is of the work of a client."""
    return any(f"{module}:{function}" in ENTRIES for module, function, _ in stack)


@cache
def _phase(module: str, function: str, file: str) -> str:
    """Return the phase that a frame stands for; nothing if the frames around it decide."""
    if file == "<built-in>":
        return _BUILT_IN.get(function, "")
    if function == "<module>" and module and module != "__main__":
        return "start"  # it is imported
    if is_own(file, module):
        return "own code"
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if found := TABLE.get(f"{name}:{function}") or TABLE.get(name):
            return found
    return ""
