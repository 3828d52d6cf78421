"""How often to save: the interval that loses least to saving and to what a failure throws away."""

import math

DEVICE_YEARS = 5.8  # between failures: 419 in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783, section 3.3.4)
YEAR = 365.25 * 24 * 3600


def seconds_between_failures(devices: int, device_years: float = DEVICE_YEARS) -> float:
    """Of a job that any one of its devices stops."""
    return device_years * YEAR / devices


def best_interval(save: float, between_failures: float) -> float:
    """Seconds of training between saves that each stop it for `save` seconds.

    Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (FGCS 2006), equation 37; its
    first term is Young's sqrt(2 save x between_failures). Where saving takes longer than twice the time between
    failures, that time.
    """
    if save >= 2 * between_failures:
        return between_failures
    share = save / (2 * between_failures)
    return math.sqrt(2 * save * between_failures) * (1 + math.sqrt(share) / 3 + share / 9) - save


def lost_share(interval: float, save: float, between_failures: float) -> float:
    """Share of the time that saving and repeated work take, to first order."""
    return save / (interval + save) + (interval / 2) / between_failures
