"""Computes AdamW and its schedule-free form in float64, as their papers define them.

They are independent of optax, layouts and the training step, and say how far a weight must move.
"""

from dataclasses import dataclass

import numpy as np

from spmdtrain.config.schema import AdamW, ScheduleFreeAdamW


@dataclass
class Adam:
    """The AdamW of one weight, arXiv:1711.05101. `decay` is 0 for a weight that does not decay."""

    beta1: float
    beta2: float
    epsilon: float
    decay: float
    count: int = 0
    first: np.ndarray | float = 0.0
    second: np.ndarray | float = 0.0

    def moved(self, gradient: np.ndarray, weight: np.ndarray, rate: float) -> np.ndarray:
        """Returns how far the next step moves the weight."""
        return -rate * self.direction(gradient, weight)

    def direction(self, gradient: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Counts a step, and returns its change of the weight over minus the learning rate."""
        self.count += 1
        self.first = self.beta1 * self.first + (1 - self.beta1) * gradient
        self.second = self.beta2 * self.second + (1 - self.beta2) * gradient**2
        mean = self.first / (1 - self.beta1**self.count)
        spread = np.sqrt(self.second / (1 - self.beta2**self.count))
        return mean / (spread + self.epsilon) + self.decay * weight


@dataclass
class ScheduleFree:
    """The schedule-free AdamW of one weight, arXiv:2405.15682: `z` moves, the weight averages."""

    beta1: float
    base: Adam
    z: np.ndarray
    largest_rate: float = 0.0
    weights: float = 0.0

    def moved(self, gradient: np.ndarray, weight: np.ndarray, rate: float) -> np.ndarray:
        """Returns how far the next step moves the weight."""
        y = (1 - self.beta1) * self.z + self.beta1 * weight
        self.z = self.z - rate * self.base.direction(gradient, y)
        self.largest_rate = max(self.largest_rate, rate)
        self.weights += self.largest_rate**2
        share = self.largest_rate**2 / self.weights if self.weights else 0.0
        return share * (self.z - weight)


def follow(
    optimizer: AdamW | ScheduleFreeAdamW, weight: np.ndarray, decays: bool
) -> Adam | ScheduleFree:
    """Returns the optimizer of one weight, before its first step."""
    decay = optimizer.weight_decay if decays else 0.0
    if isinstance(optimizer, AdamW):
        return Adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon, decay)
    base = Adam(0.0, optimizer.beta2, optimizer.epsilon, decay)
    return ScheduleFree(optimizer.beta1, base, weight)
