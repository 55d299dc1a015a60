"""The loss of a cycle and its bounds, as plain values that a backend elsewhere can be sent."""

from dataclasses import dataclass
from typing import Self

from onlinerl.trainer.config import FilterName, LossName, TrainerConfig

RATIO_BOUNDS: dict[LossName, tuple[float, float]] = {
    "icepop": (0.5, 5.0),  # arXiv 2510.18855
    "ppo": (0.8, 1.2),  # arXiv 1707.06347, as absolute bounds
    "cispo": (0.0, 4.0),  # arXiv 2506.13585
    "gspo": (1 - 3e-4, 1 + 4e-4),  # arXiv 2507.18071, section 5.1
}
"""Published bounds on the importance ratio, for the losses that have two."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """A loss, its ratio bounds, its row filters and its pull towards the base model."""

    name: LossName = "tis"
    ratio_cap: float = 2.0
    ratio_low: float = 0.0
    ratio_high: float = float("inf")
    filters: tuple[FilterName, ...] = ()
    k3_max: float = 0.01
    veto_ratio: float = 1e-5
    geometric_band: float = 0.01
    kl_coef: float = 0.0

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Self:
        """The configured loss; bounds that are not set take the published values."""
        low, high = RATIO_BOUNDS.get(config.loss, (0.0, float("inf")))
        return cls(
            name=config.loss,
            ratio_cap=config.ratio_cap,
            ratio_low=low if config.ratio_low is None else config.ratio_low,
            ratio_high=high if config.ratio_high is None else config.ratio_high,
            filters=config.filters,
            k3_max=config.k3_max,
            veto_ratio=config.veto_ratio,
            geometric_band=config.geometric_band,
            kl_coef=config.kl_coef,
        )
