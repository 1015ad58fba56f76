"""The model file of ``lighteval custom MODEL eval/lighteval/perl_model.py TASKS``: an adapter on its base.

MODEL is a Hub id, a run's or an adapter's folder, or ``zoo:NAME``; behind commas settings, as ``temperature=1,seed=3``.
"""

from perl.evaluation.lighteval.model import PerlModel

__all__ = ["PerlModel"]
