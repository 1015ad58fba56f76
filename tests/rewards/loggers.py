"""The loggers that a trainer gives to a reward function, which remember."""

from collections import defaultdict


class Log:
    """TRL's loggers: a metric is averaged, an extra column must be as long as the batch."""

    def __init__(self):
        self.metrics = defaultdict(list)
        self.columns = defaultdict(list)

    def arguments(self):
        return {
            "log_metric": lambda name, value: self.metrics[name].append(value),
            "log_extra": lambda column, values: self.columns[column].extend(values),
        }
