"""What differs between the logs of two trainings that do the same: what a clock says."""

CLOCKS = {
    "step_time",
    "rollout/seconds",
    "update/seconds",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
}
