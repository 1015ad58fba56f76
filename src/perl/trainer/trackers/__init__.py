"""Experiment trackers: one run of each however often a training is gone on with, and tables in it.

transformers' callbacks -> the same, in the run that `trackers.json` names; samples, alarms, scores -> tables there
"""
