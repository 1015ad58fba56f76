"""What ``benchmarks/gpu.py`` measures: a module for each stage, run in a process of its own by ``__main__``."""

OF_THE_STAGE = "(the stage)"  # the case of what went wrong outside all cases
