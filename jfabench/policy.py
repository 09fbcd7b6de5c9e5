"""How long and how often to measure: the `measure:` part of a sweep file."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Mode = Literal["profiler", "events", "cudagraph", "wall"]
MODES: tuple[Mode, ...] = get_args(Mode)


class MeasurePolicy(BaseModel):
    """One stopping rule for all modes: warm up until stable, then sample until precise or until a cap is reached."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode | None = Field(None, description="None: `profiler` on CUDA, `wall` on a CPU")
    target: float = Field(0.01, gt=0, lt=1, description="relative width of the median's 95% interval to stop at")
    rounds: int = Field(4, ge=1, description="interleaved rounds at least; their order alternates (ABBA)")
    min_iterations: int = Field(12, ge=1, description="samples at least, over all rounds")
    max_iterations: int = Field(1000, ge=1, description="samples at most, over all rounds")
    max_seconds: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="measured time of one case at most, in seconds"
    )
    warmup_seconds: float = Field(0.5, ge=0, allow_inf_nan=False, description="warm-up seconds of one case at most")
    warm_up: bool = Field(
        default=True, description="false: no warm-up call at all, and so 0 seconds of it; times are of cold calls"
    )

    @model_validator(mode="after")
    def _no_seconds_without_warm_up(self) -> Self:
        """Seconds that nobody gave become 0, so that what is written of a policy can be read again."""
        if not self.warm_up and self.warmup_seconds > 0:
            if "warmup_seconds" in self.model_fields_set:
                raise ValueError(
                    f"warm_up: false and warmup_seconds: {self.warmup_seconds:g} contradict each other: set "
                    "warmup_seconds to 0, or warm_up to true"
                )
            object.__setattr__(self, "warmup_seconds", 0.0)  # nobody has seen it yet
        return self

    @model_validator(mode="after")
    def _as_many_at_most_as_at_least(self) -> Self:
        if self.min_iterations > self.max_iterations:
            raise ValueError(
                f"min_iterations: {self.min_iterations} and max_iterations: {self.max_iterations} contradict each "
                f"other: set min_iterations to {self.max_iterations} at most as well, or max_iterations to "
                f"{self.min_iterations} at least"
            )
        return self

    def mode_on(self, device: str) -> Mode:
        """The mode to use on `device` (`"cuda"` or `"cpu"`). Raises `ValueError` for a CUDA mode on a CPU."""
        if self.mode is None:
            return "profiler" if device == "cuda" else "wall"
        if device == "cpu" and self.mode != "wall":
            raise ValueError(f"measure mode {self.mode!r} needs a CUDA device; on a CPU use 'wall'")
        return self.mode
