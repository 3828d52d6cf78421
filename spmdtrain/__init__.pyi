"""The public names of `spmdtrain`, and where each lives: `__init__.py` imports them lazily."""

from .checkpoints.restore import restore as restore
from .checkpoints.restore import run_config as run_config
from .checkpoints.restore import weights as weights
from .config import RunConfig as RunConfig
from .config import UserError as UserError
from .config import load as load
from .data.source import Source as Source
from .data.source import open_data as open_data
from .inference.evaluate import evaluate as evaluate
from .inference.sample import Choice as Choice
from .inference.sample import generate as generate
from .inference.sample import generate_ids as generate_ids
from .inference.sample import make_logits as make_logits
from .inference.trained_run import OpenedRun as OpenedRun
from .inference.trained_run import open_run as open_run
from .models.buffer import Buffer as Buffer
from .models.context import ForwardContext as ForwardContext
from .models.stack import Stack as Stack
from .models.transformer import Transformer as Transformer
from .planner.estimate import estimate as estimate
from .planner.plan import plan as plan
from .processes.processes import simulate_devices as simulate_devices
from .processes.xla_flags import set_xla_flags as set_xla_flags
from .running.device_batches import batches as batches
from .running.distillation.teacher_weights import with_teacher as with_teacher
from .running.loop import Outcome as Outcome
from .running.loop import run as run
from .running.save_state import save as save
from .running.start.first_state import init_state as init_state
from .train.evaluation import make_evaluate as make_evaluate
from .train.gradients.differentiable import make_gradients as make_gradients
from .train.gradients.differentiable import make_loss as make_loss
from .train.setup import Setup as Setup
from .train.shard import shard as shard
from .train.state import TrainState as TrainState
from .train.step import make_eval_step as make_eval_step
from .train.step import make_step as make_step
from .train.updates.optimizers import Rule as Rule
from .train.updates.shipped_optimizers import make_optimizer as make_optimizer

__version__: str
