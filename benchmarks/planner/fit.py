"""How far the planner's step times are from published ones; `--fit` fits the six constants to the
training tables.

    python benchmarks/planner/fit.py [--fit] [--rows] [--keep-back]

`--keep-back` fits without one training table after the other, and judges each by the fit that has
not seen it.

For every table: mean and worst absolute error in % as predicted blind, and after calibrating each
group of its rows on the group's first row.
"""

import argparse
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cases import ASSUMED, MAKERS, Case, cases
from frameworks import SoftwareTable, software_table

from spmdtrain.planner.cost.software import FITTED

RANKED = (
    "hagemann_layouts",
    "hagemann_sweeps",
    "zb_table4",
)  # whose groups are one run in several layouts
SPLIT = tomllib.loads((Path(__file__).parent / "split.toml").read_text())


def errors(found: list[Case], table: SoftwareTable) -> np.ndarray:
    """Relative errors, predicted / measured - 1."""
    return np.array([case.predict(table) / case.measured - 1 for case in found])


def calibrated(found: list[Case], blind: np.ndarray) -> np.ndarray:
    """Errors of the other rows when the first row of each group sets the scale of that group."""
    scales: dict[str, float] = {}
    left = []
    for case, error in zip(found, blind, strict=True):
        if case.group in scales:
            left.append((1 + error) / scales[case.group] - 1)
        else:
            scales[case.group] = 1 + error
    return np.array(left)


@dataclass(frozen=True)
class Ranks:
    """The order that a planner gives to the layouts of one group.

    correlation: Spearman's, of predicted and measured times. `first_choice`: the time that the
    predicted best takes longer than the measured best, as a share.
    """

    correlation: float
    first_choice: float


def ranks(found: list[Case], table: SoftwareTable) -> dict[str, Ranks]:
    """Returns the ranks within each group of rows."""
    groups: dict[str, list[Case]] = {}
    for case in found:
        groups.setdefault(case.group, []).append(case)
    return {group: _ranks(layouts, table) for group, layouts in groups.items()}


def _ranks(layouts: list[Case], table: SoftwareTable) -> Ranks:
    predicted = np.array([case.predict(table) for case in layouts])
    measured = np.array([case.measured for case in layouts])
    orders = (times.argsort().argsort() for times in (predicted, measured))
    correlation = np.corrcoef(*orders)[0, 1]
    return Ranks(float(correlation), float(measured[predicted.argmin()] / measured.min() - 1))


def kept_back() -> Iterator[tuple[str, np.ndarray]]:
    """Yields each training table with its errors by a fit to the other ones.

    A constant of a device that no other table has keeps its value.
    """
    for name in SPLIT["train"]:
        others = [cases(other) for other in SPLIT["train"] if other != name]
        values, _ = fit(others)
        yield name, errors(cases(name), software_table(*values))


def residuals(logs: np.ndarray, groups: list[list[Case]]) -> np.ndarray:
    """log(predicted / measured) at the constants exp(logs).

    Each row has the weight 1 / sqrt(rows of its table), so that no table drowns the others.
    """
    table = software_table(*np.exp(logs))
    return np.concatenate([np.log1p(errors(group, table)) / len(group) ** 0.5 for group in groups])


def fit(groups: list[list[Case]]) -> tuple[np.ndarray, np.ndarray]:
    """Values and standard errors of the constants: Levenberg-Marquardt on their logarithms."""
    logs = np.log([value for value, _ in FITTED.values()])
    damping = 1e-2
    for _ in range(40):
        now = residuals(logs, groups)
        slope = _slope(logs, now, groups)
        normal = slope.T @ slope
        scale = np.maximum(np.diag(normal), 1e-9)  # of a constant that no row depends on
        step = np.linalg.solve(normal + damping * np.diag(scale), -slope.T @ now)
        if (residuals(logs + step, groups) ** 2).sum() < (now**2).sum():
            logs = logs + step
            damping /= 3
        else:
            damping *= 4
    variance = (now**2).sum() / (len(now) - len(logs))
    values = np.exp(logs)
    return values, values * np.sqrt(variance * np.diag(np.linalg.pinv(slope.T @ slope)))


def _slope(logs: np.ndarray, now: np.ndarray, groups: list[list[Case]]) -> np.ndarray:
    """[rows, constants]: finite differences of the residuals."""
    width = 1e-4
    units = np.eye(len(logs))
    return np.stack(
        [(residuals(logs + width * unit, groups) - now) / width for unit in units], axis=1
    )


def show_table(table: str, found: list[Case], software: SoftwareTable, trains: bool) -> np.ndarray:
    """Prints one line of errors in %; gives the blind ones."""
    blind = errors(found, software)
    after = calibrated(found, blind)
    print(
        f"{table:<28}{len(found):>5}{100 * abs(blind).mean():>12.1f}{100 * abs(blind).max():>8.1f}"
        f"{100 * blind.mean():>+8.1f}{100 * abs(after).mean():>17.1f}{100 * abs(after).max():>8.1f}"
        f"{'  (train)' if trains else ''}"
    )
    return blind


def show_rows(found: list[Case], blind: np.ndarray) -> None:
    for case, error in zip(found, blind, strict=True):
        predicted = case.measured * (1 + error)
        print(f"    {case.name:<34}{case.measured:>10.3f}{predicted:>10.3f}{100 * error:>+8.1f}")


def show_ranks(of_groups: Mapping[str, Ranks]) -> None:
    for group, order in of_groups.items():
        print(
            f"    {group:<34} rank correlation {order.correlation:.2f}, "
            f"first choice +{100 * order.first_choice:.0f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--keep-back", action="store_true")
    parsed = parser.parse_args()
    unknown = set(MAKERS) - set(SPLIT["train"]) - set(SPLIT["validate"])
    assert not unknown, f"split.toml does not say what {unknown} are for"
    values = [value for value, _ in FITTED.values()]
    if parsed.fit:
        values, deviations = fit([cases(name) for name in SPLIT["train"]])
        for name, value, deviation in zip(FITTED, values, deviations, strict=True):
            print(f'    "{name}": ({value:.4g}, {deviation:.2g}),')
    software = software_table(*values)
    if parsed.keep_back:
        for name, off in kept_back():
            print(f"{name:<28}{100 * abs(off).mean():>6.1f} mean{100 * off.mean():>+7.1f} bias")
        return
    print(
        f"{'table':<28}{'rows':>5}{'blind mean':>12}{'worst':>8}{'bias':>8}"
        f"{'calibrated mean':>17}{'worst':>8}"
    )
    for name in (*SPLIT["train"], *SPLIT["validate"]):
        found = cases(name)
        for table in dict.fromkeys(case.table for case in found):
            own = [case for case in found if case.table == table]
            blind = show_table(table, own, software, trains=name in SPLIT["train"])
            if parsed.rows:
                show_rows(own, blind)
        if name in RANKED:
            show_ranks(ranks(cases(name), software))
        if parsed.rows:
            print(f"    assumed: {ASSUMED[name]}")


if __name__ == "__main__":
    main()
