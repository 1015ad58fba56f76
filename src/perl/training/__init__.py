"""recipe -> run; `stages.py` has the whole on one screen."""
