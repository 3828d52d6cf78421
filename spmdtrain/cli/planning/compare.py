"""`spmdtrain compare`: one run in several strategies, on these devices and predicted for others."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmdtrain.cli.devices import start_jax, without_devices
from spmdtrain.cli.outputs import refuse_unwritable
from spmdtrain.cli.shared_arguments import add_config, add_make, positive_int, whole
from spmdtrain.config import DONE, REFUSED, ConfigError, RunConfig, load

if TYPE_CHECKING:
    from spmdtrain.lab.strategies.side_by_side import StrategyTable
    from spmdtrain.lab.strategies.trained import TrainedStrategy


def add_compare(commands) -> None:
    """Adds the command `compare` and its arguments."""
    compare = commands.add_parser(
        "compare", help="train some steps in several strategies: time, memory, bytes, loss"
    )
    add_config(compare)
    add_make(compare)
    compare.add_argument(
        "--strategies",
        type=lambda text: text.split(","),
        metavar="A,B,C",
        help="of single, ddp, zero1, fsdp, tensor, pipeline and configured, the mesh of the config "
        "(default: ddp,zero1,fsdp,tensor,pipeline); the others are compared with the first",
    )
    compare.add_argument(
        "--rounds",
        type=whole,
        default=5,
        metavar="N",
        help="turns of each that are timed (default: %(default)s); 0: nothing runs here",
    )
    compare.add_argument(
        "--steps",
        type=positive_int,
        default=4,
        metavar="N",
        help="steps of a turn (default: %(default)s)",
    )
    compare.add_argument(
        "--hardware", metavar="NAME", help="also predict them on --devices of these GPUs"
    )
    compare.add_argument("--devices", type=positive_int, metavar="N", help="number of such GPUs")
    compare.add_argument(
        "--simulate-devices", type=positive_int, metavar="N", help="simulate N devices on the CPU"
    )
    compare.add_argument("--write", metavar="FILE.md", help="also write the tables as Markdown")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(command=run_compare)


def run_compare(parsed: argparse.Namespace) -> int:
    """Prints a row for each strategy. Returns REFUSED if one trains differently or none runs."""
    if (parsed.hardware is None) != (parsed.devices is None):
        raise ConfigError("--hardware and --devices go together", fix="--hardware h100 --devices 8")
    if parsed.rounds < 0 or (parsed.rounds == 0 and parsed.hardware is None):
        raise ConfigError(
            "nothing is to run, and nothing to be predicted",
            asked=f"--rounds {parsed.rounds}",
            fix="--rounds 5, or --hardware h100 --devices 8",
        )
    config = load(parsed.config, parsed.set)
    if parsed.write:
        refuse_unwritable(Path(parsed.write))
    _start(parsed)
    from spmdtrain.lab.strategies import side_by_side
    from spmdtrain.lab.strategies.layouts import DEFAULT, check_names, compared_run

    parsed.strategies = parsed.strategies or [*DEFAULT]
    check_names(parsed.strategies)
    config = compared_run(config)
    trained = _trained(parsed, config) if parsed.rounds else []
    tables: list[StrategyTable] = []
    answer: dict[str, Any] = {}
    if trained:
        title = _title(parsed)
        tables.append(side_by_side.table_trained(trained, title))
        answer["here"] = {
            "devices": title,
            "rows": [side_by_side.values_trained(strategy) for strategy in trained],
        }
    if parsed.hardware:
        table, values = _predicted(parsed, config)
        tables.append(table)
        answer["predicted"] = values
    if parsed.write:
        text = "\n".join(side_by_side.in_markdown(table) for table in tables)
        Path(parsed.write).write_text(text, encoding="utf-8")
    print(json.dumps(answer) if parsed.json else "\n\n".join(map(side_by_side.in_terminal, tables)))
    return DONE if _is_good(trained) else REFUSED


def _start(parsed: argparse.Namespace) -> None:
    if not parsed.rounds:
        without_devices()
        return
    parsed.coordinator = parsed.processes = parsed.process = None
    start_jax(parsed, alone=True, keeps_memory=True)


def _is_good(trained: "list[TrainedStrategy]") -> bool:
    """Returns True if some ran and all train alike, or if none was to run here."""
    ran = [strategy for strategy in trained if not strategy.refused]
    return all(strategy.is_same for strategy in ran) and bool(ran or not trained)


def _trained(parsed: argparse.Namespace, config: RunConfig) -> "list[TrainedStrategy]":
    import jax

    from spmdtrain.lab.strategies.trained import train_in_turns

    if jax.device_count() < 2:
        raise ConfigError(
            "strategies are ways over several devices", found="1", fix="--simulate-devices 8"
        )
    return train_in_turns(
        config,
        parsed.strategies,
        make=parsed.make,
        rounds=parsed.rounds,
        steps=parsed.steps,
        say=(lambda _: None) if parsed.json else (lambda line: print(line, flush=True)),
    )


def _title(parsed: argparse.Namespace) -> str:
    """Returns the title of what ran; it warns that times on simulated devices mean little."""
    import jax

    kind = jax.devices()[0].device_kind
    count = f"{jax.device_count()} x {kind}"
    if parsed.simulate_devices:
        count = f"{jax.device_count()} simulated devices, whose times say little of GPUs"
    return f"here: {count}; the median of {parsed.rounds} rounds of {parsed.steps} steps"


def _predicted(
    parsed: argparse.Namespace, config: RunConfig
) -> "tuple[StrategyTable, list[dict[str, Any]]]":
    from spmdtrain.lab.strategies import side_by_side
    from spmdtrain.lab.strategies.predicted import predict
    from spmdtrain.planner.cost.hardware import hardware

    kind = hardware(parsed.hardware)
    rows = predict(config, parsed.strategies, kind, parsed.devices)
    title = f"predicted: {parsed.devices} x {kind.name}, for {rows[0].offer.tokens:.4g} tokens"
    return side_by_side.table_predicted(rows, title), side_by_side.values_predicted(rows)
