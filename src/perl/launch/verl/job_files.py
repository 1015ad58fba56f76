"""Names of a job's files, which the one side writes and the other reads.

Imports nothing, since both sides do.
"""

VERL_VERSION = "0.9.1"
"""The version whose configuration a job is written for."""
FORMAT = 1
"""Of ``job.json``; raised with a change that readers must know of."""
JOB, OVERRIDES, RUN, README, RECIPE = "job.json", "overrides.txt", "run.sh", "README.txt", "recipe.yaml"
TRAIN, EVAL, REWARDS = "train.parquet", "eval.parquet", "rewards.py"
LOG, EARLIER = "verl_metrics.jsonl", "verl_metrics.earlier.jsonl"
"""verl's log, which it begins anew at each start; those of earlier starts of a job."""
FURTHER = "further_overrides.txt"
"""Overrides that were given to run.sh, of all starts, one a line."""
FREE = (README, RUN)
"""Files that may be changed after the export: where a job runs a start may need more. Nothing checks their sums."""
CHECKPOINTS = "checkpoints"
BASE, ADAPTER = "base", "adapter"
"""Folders of a job: a model of the sandbox; the adapter to start from."""
