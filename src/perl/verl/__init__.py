"""A recipe as a job for verl, and what verl trained as a run.

Out: start reading at ``keys.toml``, which ``settings.py`` reads. Back: at ``import_job.py``. verl itself is imported by
``check_job.py`` alone, which runs beside it.
"""
