"""Concludes a run: how it ended, in words and in summary.json."""

from dataclasses import dataclass, field
from typing import Any, Literal

from spmdtrain.config.errors import DONE, PREEMPTED
from spmdtrain.config.run_files import SUMMARY
from spmdtrain.running.report import summary
from spmdtrain.running.report.summary import Prediction
from spmdtrain.running.start.begin import Session
from spmdtrain.running.start.prepare import Prepared

Status = Literal["finished", "preempted", "stopped", "stopped_early", "nothing to do"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: how it ended, and after how many steps in total.

    A signal leaves a run preempted, a hook leaves it stopped, and `eval.patience` stopped_early;
    each time it is saved and can be resumed. `step_seconds` is the median of the steps taken in
    this session, except the first.
    """

    status: Status
    step: int
    step_seconds: float | None = field(default=None, compare=False)

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ended this way."""
        return PREEMPTED if self.status == "preempted" else DONE


def nothing_to_do(session: Session) -> Outcome | None:
    """Returns the outcome of a run that has already ended, and prints it; None if steps remain."""
    directory = session.prepared.directory
    step = session.done
    early_stop = session.early_stop
    if step >= session.setup.config.train.steps:
        why = f"{directory} is finished at step {step}"
        more = f"--set train.steps={2 * step}"
    elif early_stop.is_over:
        why = f"{directory} has stopped early at step {step}: {early_stop.describe()}"
        more = f"--set eval.patience={early_stop.more_patience}"
    else:
        return None
    session.reporter.say(f"{why}; to continue: {more}")
    return Outcome("nothing to do", step)


def conclude(
    session: Session,
    outcome: Outcome,
    report: dict[str, Any],
    prediction: Prediction | None,
) -> None:
    """Says how the run ended, and writes summary.json: predicted, compiled and measured.

    `report` is that of the compiled step.
    """
    session.attempt.exit_code = outcome.exit_code
    session.reporter.say(_ending(session, outcome))
    peak = summary.peak_bytes(session.setup.mesh)
    figures = summary.figures(prediction, report, outcome.step_seconds, peak)
    session.reporter.write(SUMMARY, figures)
    session.reporter.say(summary.show(figures))


def _ending(session: Session, outcome: Outcome) -> str:
    directory = session.prepared.directory
    end = f"{outcome.status}, saved at step {outcome.step}; {_again(session.prepared)} continues"
    if outcome.status == "stopped_early":
        why = f"stopped early after {outcome.step} steps: {session.early_stop.describe()}"
        end = f"{why}; everything is in {directory}"
    if outcome.status == "finished":
        end = f"finished {outcome.step} steps; everything is in {directory}"
    best = session.checkpoints.best()
    return end if best is None else f"{end}; the best is step {best[0]}, eval loss {best[1]:.4f}"


def _again(prepared: Prepared) -> str:
    """Returns the command that resumes the run: the same, without what would restart or rewind
    it.
    """
    without = "--fresh" if prepared.fresh else "--step" if prepared.step else ""
    return f"the same command without {without}" if without else "the same command"
