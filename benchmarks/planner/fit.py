"""How far the planner's step times are from published ones; `--fit` fits the six constants to the training tables.

    python benchmarks/planner/fit.py [--fit] [--rows]

For every table: mean and worst absolute error in % as predicted blind, and after calibrating each of its stacks on
that stack's first row.
"""

import argparse
import tomllib
from pathlib import Path

import numpy as np
from cases import ASSUMED, MAKERS, Case, Stacks, cases

from spmdtrain.planner.stack import FITTED, stacks

SPLIT = tomllib.loads((Path(__file__).parent / "split.toml").read_text())


def errors(found: list[Case], at: Stacks) -> np.ndarray:
    """Relative: predicted / measured - 1."""
    return np.array([case.predict(at) / case.measured - 1 for case in found])


def calibrated(found: list[Case], blind: np.ndarray) -> np.ndarray:
    """Errors of the rows that are left when the first row of each stack sets the scale of that stack."""
    first: dict[str, float] = {}
    return np.array(
        [
            (1 + error) / (1 + first[case.stack]) - 1
            for case, error in zip(found, blind, strict=True)
            if first.setdefault(case.stack, error) is not error
        ]
    )


def residuals(logs: np.ndarray, groups: list[list[Case]]) -> np.ndarray:
    """log(predicted / measured), each table with the weight of one row per sqrt(rows): none drowns the others."""
    at = stacks(*np.exp(logs))
    return np.concatenate([np.log1p(errors(group, at)) / len(group) ** 0.5 for group in groups])


def fit(groups: list[list[Case]]) -> tuple[np.ndarray, np.ndarray]:
    """Values and standard errors of the constants: Gauss-Newton on their logarithms, damped."""
    logs = np.log([value for value, _ in FITTED.values()])
    damping = 1e-2
    for _ in range(40):
        now = residuals(logs, groups)
        slope = np.stack([(residuals(logs + 1e-4 * unit, groups) - now) / 1e-4 for unit in np.eye(len(logs))], axis=1)
        step = np.linalg.solve(slope.T @ slope + damping * np.diag(np.diag(slope.T @ slope)), -slope.T @ now)
        better = (residuals(logs + step, groups) ** 2).sum() < (now**2).sum()
        logs, damping = (logs + step, damping / 3) if better else (logs, damping * 4)
    spread = (now**2).sum() / (len(now) - len(logs))
    return np.exp(logs), np.exp(logs) * np.sqrt(spread * np.diag(np.linalg.inv(slope.T @ slope)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parsed = parser.parse_args()
    unknown = set(MAKERS) - set(SPLIT["train"]) - set(SPLIT["validate"])
    assert not unknown, f"split.toml does not say what {unknown} are for"
    values = [value for value, _ in FITTED.values()]
    if parsed.fit:
        values, deviations = fit([cases(name) for name in SPLIT["train"]])
        for name, value, deviation in zip(FITTED, values, deviations, strict=True):
            print(f'    "{name}": ({value:.4g}, {deviation:.2g}),')
    at = stacks(*values)
    print(f"{'table':<28}{'rows':>5}{'blind mean':>12}{'worst':>8}{'bias':>8}{'calibrated mean':>17}{'worst':>8}")
    for name in (*SPLIT["train"], *SPLIT["validate"]):
        found = cases(name)
        for table in dict.fromkeys(case.table for case in found):
            own = [case for case in found if case.table == table]
            blind = errors(own, at)
            after = calibrated(own, blind)
            print(
                f"{table:<28}{len(own):>5}{100 * abs(blind).mean():>12.1f}{100 * abs(blind).max():>8.1f}"
                f"{100 * blind.mean():>+8.1f}{100 * abs(after).mean():>17.1f}{100 * abs(after).max():>8.1f}"
                f"{'  (train)' if name in SPLIT['train'] else ''}"
            )
            if parsed.rows:
                for case, error in zip(own, blind, strict=True):
                    predicted = case.measured * (1 + error)
                    print(f"    {case.name:<34}{case.measured:>10.3f}{predicted:>10.3f}{100 * error:>+8.1f}")
        print(f"    assumed: {ASSUMED[name]}") if parsed.rows else None


if __name__ == "__main__":
    main()
