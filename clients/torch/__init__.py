"""All torch code of a client: models, training and evaluation."""

from .computing import Loss
from .dp_sgd.private_training import private_training
from .extractor import FrozenExtractor
from .models import cnn, linear, mlp
from .per_record_evaluation import evaluate_per_record
from .per_record_training import train_per_record
from .poisson_training import train_poisson
from .released import statistics_of
from .server_model import TorchServerModel
from .trainable import freeze_lora_factor, load_trainable, trainable_names, trainable_state
from .training import evaluate, get_arrays, initialise, set_arrays, train

__all__ = [
    "FrozenExtractor",
    "Loss",
    "TorchServerModel",
    "cnn",
    "evaluate",
    "evaluate_per_record",
    "freeze_lora_factor",
    "get_arrays",
    "initialise",
    "linear",
    "load_trainable",
    "mlp",
    "private_training",
    "set_arrays",
    "statistics_of",
    "train",
    "train_per_record",
    "train_poisson",
    "trainable_names",
    "trainable_state",
]
